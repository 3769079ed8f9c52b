"""`magis devices`: what a plan can be made for."""

from __future__ import annotations

from magis.api.units import human_bytes
from magis.cli.options import Json
from magis.cli.output import print_table, write, write_json


def command(as_json: Json = False) -> None:
    """List the devices that --device takes."""
    from magis.cost.device import DEVICES

    if as_json:
        write_json({"measured": ["cpu"], "simulated": list(DEVICES.values())})
        return
    rows = [["cpu", "measured", "", "", "", "", ""]]
    for name, spec in DEVICES.items():
        rates = (spec.peak_flops_fp32 / 1e12, spec.peak_flops_bf16 / 1e12)
        links = (spec.bandwidth_bytes_per_s / 1e9, spec.link_bytes_per_s / 1e9)
        memory = human_bytes(spec.memory_bytes)
        rows.append([name, "simulated", *(f"{x:g}" for x in rates), *(f"{x:g}" for x in links), memory])
    columns = ("device", "costs", "fp32 TFLOP/s", "bf16 TFLOP/s", "memory GB/s", "link GB/s", "memory")
    print_table(columns, rows, right=columns[2:])
    write("\ncpu is this machine: operators are measured once, for up to a minute, and kept.\n")
    write("A device of your own is a .toml file with the same numbers: peak_tflops_fp32, peak_tflops_bf16,\n")
    write("bandwidth_gb_s, sms, memory_gib, launch_us, link_gb_s.\n")
