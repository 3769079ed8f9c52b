"""`magis plan MODEL`: captures a step, plans it and writes the plan file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magis.api.units import human_bytes, human_percent, human_seconds
from magis.cli.options import Batch, Image, Json, Model, Seed, Seq, sizes
from magis.cli.output import guarded_stdout, print_table, working, write, write_json

if TYPE_CHECKING:
    from magis.api.plan import Plan


def command(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write the plan; default: MODEL.plan.json."),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="D", help="cpu, a preset (`magis devices`) or a .toml file.")
    ] = "cpu",
    batch: Batch = None,
    seq: Seq = None,
    image: Image = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Plan a model's training step and write the plan to a file."""
    from magis.api.models import resolve

    source = resolve(model, sizes(batch, seq, image), seed)
    with guarded_stdout(as_json), working(f"loading {model}") as progress:
        from magis.api.plan import make_plan
        from magis.api.plan_file import check_writable, default_path, save_plan

        path = output or default_path(model)
        check_writable(path)
        plan = make_plan(source, device, progress)
        save_plan(plan, path)
    if as_json:
        write_json(summary(plan, path))
    else:
        _print(plan, path)


def summary(plan: Plan, path: Path) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "model": plan.model,
        "batch": plan.batch,
        "device": plan.device,
        "latency_source": plan.latency_source,
        "limit": plan.limit,
        "met": plan.met,
        "baseline": plan.baseline,
        "optimized": plan.optimized,
        "memory_ratio": plan.memory_ratio,
        "latency_overhead": plan.latency_overhead,
        "regions": plan.regions,
        "search": plan.search,
        "plan": str(path),
    }


def _print(plan: Plan, path: Path) -> None:
    before, after = plan.baseline, plan.optimized
    write(f"{plan.model}, batch {plan.batch}, on {plan.device}: {plan.costs}\n\n")
    rows = [
        ("peak memory", human_bytes(before.peak_bytes), human_bytes(after.peak_bytes), f"{plan.memory_ratio:.1%}"),
        ("  of the step", human_bytes(before.step_peak_bytes), human_bytes(after.step_peak_bytes), ""),
        ("  parameters", human_bytes(before.parameter_bytes), human_bytes(before.parameter_bytes), ""),
        (
            f"latency, {plan.latency_source}",
            human_seconds(before.latency_s),
            human_seconds(after.latency_s),
            human_percent(plan.latency_overhead),
        ),
    ]
    print_table(("", "eager", "planned", ""), rows, right=("eager", "planned"))
    write(f"\nwritten to {path}; `magis run {path}` runs it and proves its numbers\n")
