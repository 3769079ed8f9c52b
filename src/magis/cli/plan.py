"""`magis plan MODEL`: captures a step, plans it and writes the plan file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magis.api.limits import BUDGET_S
from magis.api.units import human_bytes, human_percent, human_seconds
from magis.cli.options import Batch, Image, Json, Model, Seed, Seq, SwapDir, sizes
from magis.cli.output import guarded_stdout, note, print_table, working, write, write_json

if TYPE_CHECKING:
    from magis.api.plan import Plan
    from magis.api.regions import Region


LIMIT_NOT_MET = 3
BY_HAND = "made by hand"


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
    max_slowdown: Annotated[
        float | None,
        typer.Option("--max-slowdown", metavar="X", help="At most X times eager's time: 1.10 is 10 % slower."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="M", help="Peak memory at most M: 8GiB, 500MB, bytes, or 40% of eager's peak."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="S",
            help=f"Seconds of search, {BUDGET_S:g} unless --iterations is given; Ctrl-C ends it earlier.",
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option("--iterations", metavar="N", help="States that the search may try: the same end everywhere."),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            "--split",
            metavar="DIM=PARTS[@MODULE]",
            help="Make exactly this region, without a search; may be repeated, and nests. `magis dims` lists DIM.",
        ),
    ] = None,
    accumulate: Annotated[
        str,
        typer.Option("--accumulate", metavar="T", help="Keep sums of half-precision parts in float32, or the same."),
    ] = "float32",
    swap_dir: SwapDir = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", metavar="M", help="Swap out at most M at a time; 256GiB by default.")
    ] = None,
    starts: Annotated[
        str, typer.Option("--starts", metavar="all|none", help="none: the search is handed no plans made by hand.")
    ] = "all",
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="RULE", help="Leave a rule out; may be repeated.")
    ] = None,
    search: Annotated[
        str, typer.Option("--search", metavar="best|paper", help="paper: Algorithm 3 of the paper, nothing else.")
    ] = "best",
    as_json: Json = False,
) -> None:
    """Plan a model's training step within limits on time or memory, and write the plan to a file."""
    from magis.api.limits import budget as search_budget
    from magis.api.limits import limits, splits, strategy
    from magis.api.models import resolve

    seconds = BUDGET_S if budget is None and iterations is None else budget
    wanted, allowed = limits(max_slowdown, memory), search_budget(seconds, iterations)
    cut, way = splits(split or (), accumulate), strategy(starts, without or (), search)
    source = resolve(model, sizes(batch, seq, image), seed)
    with guarded_stdout(as_json), working(f"loading {model}") as progress:
        from magis.api.plan import make_plan
        from magis.api.plan_file import check_writable, default_path, save_plan

        path = output or default_path(model)
        check_writable(path)
        plan = make_plan(source, device, progress, wanted, allowed, cut, swap_dir, host_memory, way)
        save_plan(plan, path)
    if as_json:
        write_json(summary(plan, path))
    else:
        _print(plan, path)
    if not plan.met:
        note(not_met(plan))
        raise typer.Exit(LIMIT_NOT_MET)


def not_met(plan: Plan) -> str:
    """One line on a plan that misses its limits."""
    limit, best = plan.limit, plan.optimized
    wanted = []
    if limit.memory_bytes is not None:
        wanted.append(f"{human_bytes(limit.memory_bytes)} of memory")
    if limit.max_slowdown is not None:
        wanted.append(f"{limit.max_slowdown:g} times eager's time")
    lowest = f"{human_bytes(best.peak_bytes)} ({plan.memory_ratio:.1%} of eager's)"
    return f"limit not met: {' and '.join(wanted)} asked for; the lowest peak known is {lowest}; that plan is written"


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
    write("\neager: the captured step in its own order; `magis run` measures eager itself\n")
    _print_search(plan)
    write(f"\nwritten to {path}; `magis run {path}` runs it and proves its numbers\n")


def region_line(region: Region) -> str:
    """One line about a region."""
    inside = "" if region.parent is None else f", inside region {region.parent}"
    name = f"{region.dimension} of {region.length}" if region.dimension else f"length {region.length}"
    return f"region {region.id}: {name} in {region.parts} parts, {region.nodes} operators{inside}\n"


def _print_search(plan: Plan) -> None:
    """How the plan was found."""
    from magis.api.plan import ratio
    from magis.api.show import recomputed

    search = plan.search
    for region in plan.regions:
        write(f"\n{region_line(region)}" if region.id == 0 else region_line(region))
    if plan.regions:
        write("\n" if not search.starts else "")
    if search.stop_reason == BY_HAND:
        return
    if plan.limit.max_slowdown is None and plan.limit.memory_bytes is None:
        write("\nno limit given: this is eager's step; pass --max-slowdown 1.10 or --memory 50% to make it smaller\n")
        return
    write(
        f"\nsearch: {search.evaluated:,} variants, {search.states} of them made, in {human_seconds(search.seconds)}, "
        f"the best after {human_seconds(search.best_at_s)}; {search.stop_reason}\n"
    )
    before = plan.baseline
    again = [f"{times} {op.split('.')[1]}" for op, times in recomputed(plan).items()]
    write(f"computed again: {', '.join(again) or 'nothing'}\n\n")
    starts = {start.name: start for start in search.starts}
    rows = [
        (
            start.name,
            f"{ratio(start.peak_bytes, before.peak_bytes):.1%}",
            human_percent(ratio(start.latency_s, before.latency_s) - 1),
        )
        for start in starts.values()
    ]
    print_table(("started from", "peak", "time"), rows, right=("peak", "time"))
    used = [(r.name, str(r.sites), str(r.applied), str(r.kept), human_seconds(r.seconds)) for r in search.rules]
    print_table(("rule", "sites", "applied", "kept", "time"), used, right=("sites", "applied", "kept", "time"))
