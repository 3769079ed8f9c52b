"""From a captured step to a program within the limits."""

from __future__ import annotations

import time
from dataclasses import dataclass

from magis.api.costs import Costs, Progress, silent
from magis.api.limits import DEFAULT_BUDGET, NO_LIMITS, Budget, Limits
from magis.fission.tree import Program
from magis.ir.graph import Graph, Schedule
from magis.lower.launches import launches
from magis.lower.lower import lower
from magis.sim.estimate import Estimate
from magis.sim.simulate import simulate


@dataclass(frozen=True)
class Planned:
    """A program and its order, what is predicted of it and of eager's step, whether it keeps to the limits, and
    how it was found."""

    program: Program
    schedule: Schedule
    baseline: Estimate
    optimized: Estimate
    met: bool
    seconds: float


def plan_step(
    graph: Graph,
    schedule: Schedule,
    costs: Costs,
    limits: Limits = NO_LIMITS,
    budget: Budget = DEFAULT_BUDGET,
    progress: Progress = silent,
) -> Planned:
    """The best program found for a captured step, of which `schedule` is eager's order; the step itself without limits."""
    program = Program(graph)
    routine = lower(program, schedule)
    costs.prepare((call for call, _ in launches(routine)), progress)
    start = time.perf_counter()
    found = simulate(routine, costs.latency_s, costs.workspace_bytes)
    return Planned(program, schedule, found, found, True, time.perf_counter() - start)
