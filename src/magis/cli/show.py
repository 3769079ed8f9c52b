"""`magis show PLAN`: the plan's program, or the code that it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from magis.api.units import human_bytes, human_seconds
from magis.cli.options import Json, PlanPath
from magis.cli.output import guarded_stdout, working, write, write_json
from magis.cli.plan import region_line
from magis.errors import UsageError

if TYPE_CHECKING:
    from magis.api.plan import Plan
    from magis.api.show import ProgramView


def command(
    path: PlanPath,
    code: Annotated[bool, typer.Option("--code", help="Show the Python code that runs.")] = False,
    as_json: Json = False,
) -> None:
    """Show a plan's program with sizes, costs and lifetimes. The model is not needed, and not run."""
    if code and as_json:
        raise UsageError("--code and --json exclude each other: leave one out")
    with guarded_stdout(as_json), working(f"reading {path}"):
        from magis.api import show
        from magis.api.plan_file import load_plan

        plan = load_plan(path)
        text = show.code(plan) if code else ""
        shown = None if code else show.view(plan)
        if shown is not None and not as_json:
            text = heading(plan) + show.program_text(shown)
    if shown is not None and as_json:
        write_json(contents(shown))
    else:
        write(text)


def contents(shown: ProgramView) -> dict[str, Any]:
    """What `--json` prints."""
    plan = shown.plan
    return {
        "model": plan.model,
        "batch": plan.batch,
        "device": plan.device,
        "latency_source": plan.latency_source,
        "torch": plan.torch,
        "digest": plan.digest,
        "peak": {"bytes": shown.peak_bytes, "step": shown.peak_step},
        "operators": shown.operators,
        "regions": plan.regions,
        "program": plan.program,
        "schedule": [int(number) for number in plan.schedule.split()],
        "certificate": plan.certificate,
    }


def heading(plan: Plan) -> str:
    """Comment lines about the plan as a whole."""
    sizes = "".join(f" --{name} {value}" for name, value in plan.sizes.items())
    lines = [
        f"plan of {plan.model}{sizes}, batch {plan.batch}, seed {plan.seed}",
        f"made by magis {plan.magis} with torch {plan.torch}",
        f"costs on {plan.device}: {plan.costs}",
        f"predicted: peak {human_bytes(plan.optimized.peak_bytes)} of eager's "
        f"{human_bytes(plan.baseline.peak_bytes)}, latency {human_seconds(plan.optimized.latency_s)} of "
        f"{human_seconds(plan.baseline.latency_s)} ({plan.latency_source})",
        *_limits(plan),
        *(region_line(region).rstrip("\n") for region in plan.regions),
        _proof(plan),
    ]
    return "".join(f"# {line}\n" for line in lines)


def _limits(plan: Plan) -> list[str]:
    """What was asked for, whether it is met, and what runs again for it."""
    from magis.api.show import recomputed

    wanted = []
    if plan.limit.max_slowdown is not None:
        wanted.append(f"at most {plan.limit.max_slowdown:g} times eager's time")
    if plan.limit.memory_bytes is not None:
        wanted.append(f"at most {human_bytes(plan.limit.memory_bytes)}")
    if not wanted:
        return []
    again = [f"{times} {op.split('.')[1]}" for op, times in recomputed(plan).items()]
    met = "met" if plan.met else "not met"
    return [f"limits: {' and '.join(wanted)}: {met}", f"computed again: {', '.join(again) or 'nothing'}"]


def _proof(plan: Plan) -> str:
    proof = plan.certificate
    if proof is None:
        return "not proven yet: `magis run` proves it"
    return (
        f"proven equal to eager: {proof.tensors} tensors, largest relative error {proof.max_rel_error:.2g}, "
        f"batch {proof.batch}, on {proof.device} with torch {proof.torch}"
    )
