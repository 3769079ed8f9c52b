"""How fast costs are looked up, what measuring costs, and how near the measured costs come to a real step (ADR 4).

    python benchmarks/costs.py [--model peer-bert] [--batch N] [--pairs 5]

On one thread, for the operator calls of one step of a model: calls a second of the analytic model (worked out, and
looked up by an equal call), of measured costs (looked up, interpolated), rows a second to and from the SQLite table
(a new file, removed afterwards), seconds to measure every distinct call and how much of that is not running the
operators. Then the sum of the measured latencies over the CPU time of the step that generated code runs: median and
range of the pairs, each of which measures all calls anew and runs the step, so that a loaded machine slows both.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from magis import zoo
from magis.backend.measure import RUNS, Measurer, measured_cost
from magis.backend.meters import cpu_time_s
from magis.backend.runtime import compile_routine
from magis.capture.capture import Captured, capture
from magis.capture.workload import Workload, workload
from magis.cost.calibrate import work
from magis.cost.device import DEVICES
from magis.cost.measured import MeasuredCost
from magis.cost.model import AnalyticCost
from magis.cost.profile import ProfileCache, call_text
from magis.fission.tree import Program
from magis.ir.graph import Call
from magis.lower.lower import lower


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rate(run: Callable[[Call], object], calls: Sequence[Call]) -> str:
    """Calls a second, and microseconds for one."""
    taken_s = seconds(lambda: [run(call) for call in calls])
    return f"{len(calls) / taken_s:>12,.0f} /s {taken_s / len(calls) * 1e6:>9.2f} us"


def resized(calls: Sequence[Call], rows: int = 3) -> list[Call]:
    """The calls on another number of rows, where they have a slice."""
    measurer = Measurer()
    parts = (measurer.with_fewer_rows(call, 1 / rows) for call in calls)
    return [part for part in parts if part is not None]


def print_rates(calls: Sequence[Call], distinct: Sequence[Call]) -> None:
    """Speed of the analytic model."""
    analytic = AnalyticCost(DEVICES["rtx3090"])
    print(f"analytic, worked out      {rate(analytic.latency_s, distinct)}")
    print(f"analytic, looked up       {rate(analytic.latency_s, [replace(call) for call in calls])}")


def print_measured(calls: Sequence[Call], distinct: Sequence[Call], folder: Path) -> None:
    """Speed of measuring, of the table and of measured costs."""
    cache, measurer = ProfileCache(folder / "costs.sqlite"), Measurer()
    costs = MeasuredCost(cache, measurer)
    taken_s = seconds(lambda: costs.prepare(calls))
    runs_s = (RUNS + 2) * sum(costs.latency_s(call) for call in distinct)
    print(f"measuring                 {taken_s:.2f} s for {len(distinct)} distinct calls: {costs.coverage(calls)}")
    print(f"  besides running them    {max(0.0, taken_s - runs_s) / len(distinct) * 1e3:.1f} ms each (wall - CPU)")
    print(f"measured, looked up       {rate(costs.latency_s, [replace(call) for call in calls])}")
    parts = resized(distinct)
    print(f"measured, interpolated    {rate(costs.latency_s, parts)}  ({costs.coverage(parts)})")
    table = cache.load(measurer.environment)
    by_text = {call_text(call): call for call in distinct}
    rows = [(by_text[text], cost) for text, cost in table.items() if text in by_text]
    print(
        f"table, stored             {rate(lambda call: cache.store(measurer.environment, call, rows[0][1]), distinct)}"
    )
    load_s = seconds(lambda: MeasuredCost(cache, measurer))
    print(f"table, loaded             {len(table) / load_s:>12,.0f} /s {load_s / len(table) * 1e6:>9.2f} us")


def print_step(given: Workload, captured: Captured, calls: Sequence[Call], pairs: int, folder: Path) -> None:
    """Sum of the latencies against the step."""
    compiled = compile_routine(lower(Program(captured.graph), captured.schedule))
    inputs = [tensor.detach() for tensor in captured.bind(given)]

    @torch.no_grad()
    def step() -> object:
        return compiled(list(inputs))

    step()
    ratios, steps = [], []
    for pair in range(pairs):
        costs = measured_cost(cache=ProfileCache(folder / f"pair{pair}.sqlite"))
        costs.prepare(calls)
        steps.append(median(cpu_time_s(step) for _ in range(3)))
        ratios.append(sum(costs.latency_s(call) for call in calls) / steps[-1])
    print(f"step                      {median(steps):.3f} s of CPU time ({min(steps):.3f} to {max(steps):.3f})")
    print(f"latencies / step          {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="peer-bert")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = workload(zoo.build(options.model, batch=options.batch), options.model)
    captured = capture(given)
    graph = captured.graph
    calls = [graph.call(node) for node in graph.nodes.values() if not node.is_input]
    calls = [call for call in calls if work(call) is not None]
    distinct = list({call_text(call): call for call in calls}.values())
    print(f"{options.model}, one thread: {len(calls)} operators that are no views, {len(distinct)} distinct")
    print_rates(calls, distinct)
    with tempfile.TemporaryDirectory() as folder:
        print_measured(calls, distinct, Path(folder))
        print_step(given, captured, calls, options.pairs, Path(folder))


if __name__ == "__main__":
    main()
