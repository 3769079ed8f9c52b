"""Simulated devices (device model v1): the constants of the analytic cost model, and devices from a file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from magis.errors import UsageError
from magis.ir.dtype import DType

MODEL_VERSION = 1
"""Changes whenever the formula or a constant does: published comparisons rest on them."""

_HALF = (DType.BF16, DType.F16, DType.F8E4M3FN, DType.F8E5M2)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device that is simulated. Rates are per second and decimal (1 TFLOP/s = 1e12, 1 GB/s = 1e9).

    `launch_s` is paid by every kernel, `transfer_launch_s` by every transfer over the link. `memory_bytes`
    is informational: a memory limit is always given by the user."""

    name: str
    peak_flops_fp32: float
    peak_flops_bf16: float
    bandwidth_bytes_per_s: float
    sms: int
    memory_bytes: int
    launch_s: float
    link_bytes_per_s: float
    transfer_launch_s: float = 10e-6

    def peak_flops(self, dtype: DType) -> float:
        """Peak rate of matrix products, FLOP/s: the half-precision peak for 16 and 8 bit floats, else the
        fp32 (tf32) one. The table has no rate for float64 or integers; they are charged as fp32."""
        return self.peak_flops_bf16 if dtype in _HALF else self.peak_flops_fp32


def _preset(
    name: str,
    fp32_tflops: float,
    bf16_tflops: float,
    bandwidth_gb_s: float,
    sms: int,
    memory_gib: float,
    launch_us: float,
    link_gb_s: float,
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        peak_flops_fp32=fp32_tflops * 1e12,
        peak_flops_bf16=bf16_tflops * 1e12,
        bandwidth_bytes_per_s=bandwidth_gb_s * 1e9,
        sms=sms,
        memory_bytes=int(memory_gib * 2**30),
        launch_s=launch_us / 1e6,
        link_bytes_per_s=link_gb_s * 1e9,
    )


DEVICES: Mapping[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        #       name        fp32  bf16  GB/s  SMs  GiB  us  link GB/s
        _preset("rtx3090", 35.6, 71, 936, 82, 24, 5, 12),
        _preset("a100-80g", 156, 312, 2039, 108, 80, 5, 24),
        _preset("h100", 495, 990, 3350, 132, 80, 5, 50),
        _preset("h200", 495, 990, 4800, 132, 141, 5, 50),
    )
}

_FILE_KEYS = (
    "peak_tflops_fp32",
    "peak_tflops_bf16",
    "bandwidth_gb_s",
    "sms",
    "memory_gib",
    "launch_us",
    "link_gb_s",
)


def device(name: str) -> DeviceSpec:
    """A preset by name, or the device described by a TOML file when `name` ends in `.toml`.

    The file holds the seven numbers of a preset, in the same units, and optionally a `name`:

        name = "my-gpu"            # default: the file's name
        peak_tflops_fp32 = 82.6    # of tf32 where the device has it
        peak_tflops_bf16 = 165.2
        bandwidth_gb_s = 1008
        sms = 128
        memory_gib = 24
        launch_us = 5
        link_gb_s = 25

    Raises UsageError, in one line, naming close matches or the offending key."""
    if name.lower().endswith(".toml"):
        return _from_file(Path(name))
    if name in DEVICES:
        return DEVICES[name]
    if name == "cpu":
        raise UsageError("cpu is measured, not simulated; simulated devices: " + ", ".join(DEVICES))
    known = ", ".join((*DEVICES, "cpu"))
    hint = _did_you_mean(name.lower(), DEVICES)
    raise UsageError(f"unknown device {name!r}{hint}; known: {known}, or a .toml file")


def _did_you_mean(word: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    begun = [name for name in known if len(word) > 1 and name.startswith(word)]
    close = begun or get_close_matches(word, known, n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _from_file(path: Path) -> DeviceSpec:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"device file {str(path)!r} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"device file {str(path)!r} is no valid TOML: {str(error).splitlines()[0]}") from None
    for key in table:
        if key != "name" and key not in _FILE_KEYS:
            raise UsageError(f"device file {str(path)!r}: unknown key {key!r}{_did_you_mean(key, _FILE_KEYS)}")
    name = table.get("name", path.stem)
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UsageError(f"device file {str(path)!r}: 'name' must be a one-line text")
    numbers = [_number(path, table, key) for key in _FILE_KEYS]
    if numbers[3] != int(numbers[3]):
        raise UsageError(f"device file {str(path)!r}: 'sms' must be a whole number, not {numbers[3]!r}")
    fp32, bf16, bandwidth, sms, memory, launch, link = numbers
    return _preset(name, fp32, bf16, bandwidth, int(sms), memory, launch, link)


def _number(path: Path, table: Mapping[str, Any], key: str) -> float:
    if key not in table:
        raise UsageError(f"device file {str(path)!r}: missing key {key!r}")
    value = table[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    least = "0 or more" if key == "launch_us" else "above 0"
    if not is_number or not isfinite(value) or value < 0 or (value == 0 and least == "above 0"):
        raise UsageError(f"device file {str(path)!r}: {key!r} must be a number, {least}, not {value!r}")
    return float(value)
