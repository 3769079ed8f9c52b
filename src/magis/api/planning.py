"""From a captured step to a program within the limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from math import isclose

from magis.api.costs import Costs, Progress, silent
from magis.api.limits import DEFAULT_BUDGET, NO_LIMITS, NO_SPLITS, Budget, Limits, Splits
from magis.api.lowering import lowered
from magis.api.splits import split_by_hand
from magis.api.units import human_percent
from magis.errors import UsageError
from magis.fission.parts import CannotSplitError
from magis.fission.tree import Program
from magis.ir.graph import Call, Graph, Schedule
from magis.lower.launches import launches
from magis.lower.lower import lower
from magis.schedule.incremental import Scheduled
from magis.search.fission import FissionSearch
from magis.search.objective import Objective
from magis.search.rewriting import rewritten
from magis.search.search import INTERRUPTED, Found, Search, Watch
from magis.search.splitting import Prices, SplitState, Splitter
from magis.search.state import MState, Solution
from magis.search.strategy import DEFAULT, Strategy
from magis.sim.estimate import Estimate
from magis.sim.simulate import simulate

MEASURED_SEARCHES = 3
"""Most searches when operators are measured: each knows more about the parts that the one before chose."""


@dataclass(frozen=True)
class Planned:
    """A program and its order, what is predicted of it and of eager's step, whether it keeps to the limits, and
    how it was found. `peak_limit_bytes` is the limit on memory in bytes, None without one."""

    program: Program
    schedule: Schedule
    baseline: Estimate
    optimized: Estimate
    met: bool
    peak_limit_bytes: int | None
    found: Found

    @property
    def seconds(self) -> float:
        """How long the search took."""
        return self.found.seconds


def plan_step(
    graph: Graph,
    schedule: Schedule,
    costs: Costs,
    limits: Limits = NO_LIMITS,
    budget: Budget = DEFAULT_BUDGET,
    progress: Progress = silent,
    splits: Splits = NO_SPLITS,
    strategy: Strategy = DEFAULT,
) -> Planned:
    """The best program found for a captured step (`schedule` is eager's order); the step itself without limits; exactly
    the regions that are asked for by `splits`, if any are.

    Ctrl-C during the search ends it and keeps the best program so far."""
    routine = lower(Program(graph), schedule)
    costs.prepare((call for call, _ in launches(routine)), progress)
    baseline = simulate(routine, costs.latency_s, costs.workspace_bytes)
    base = MState.of(Scheduled.of(graph, schedule, costs.workspace_bytes), costs.latency_s, costs.host)
    objective = _objective(limits, baseline)
    if splits.wanted:
        found = _by_hand(base, objective, costs, splits, progress)
    elif limits == NO_LIMITS:
        found = replace(Search(base, objective, costs.latency_s, iterations=0).run(), stop_reason="no limit")
    else:
        found = _searched(base, objective, costs, budget, progress, baseline, splits.wide, strategy)
    best = found.best
    planned = lowered(best.program, best.schedule)
    optimized = simulate(planned, costs.latency_s, costs.workspace_bytes, costs.transfer_s)
    assert optimized.peak_bytes == best.peak_bytes and isclose(optimized.latency_s, best.latency_s, rel_tol=1e-9)
    return Planned(best.program, best.schedule, baseline, optimized, found.met, objective.max_peak_bytes, found)


def _by_hand(base: MState, objective: Objective, costs: Costs, splits: Splits, progress: Progress) -> Found:
    """The state with the regions asked for, as if a search had found it."""
    started = time.perf_counter()
    program, history = split_by_hand(base.graph, splits)
    splitter = _splitter(costs, splits.wide)
    try:
        state = splitter.state(program, history)
        costs.prepare((call for call, _ in launches(lowered(program, state.schedule))), progress)
        state = splitter.state(program, history)
    except CannotSplitError as error:
        raise UsageError(f"this split cannot run: {error}") from None
    met = objective.met(state.latency_s, state.peak_bytes)
    seconds = time.perf_counter() - started
    return Found(state, met, 1, 1, seconds, seconds, "made by hand")


def _searched(
    base: MState,
    objective: Objective,
    costs: Costs,
    budget: Budget,
    progress: Progress,
    baseline: Estimate,
    wide: bool,
    strategy: Strategy,
) -> Found:
    """What the search finds. Where operators are measured, those of parts are too: first of whole steps in some numbers
    of parts, then of the plan found; if the limits do not hold then, the search is made again."""
    splitter = _splitter(costs, wide)
    watch = _watch(progress, baseline)
    made = base
    if not strategy.paper:
        prepare = partial(costs.prepare, progress=progress)
        made = rewritten(base, costs.latency_s, splitter.prices.infer, prepare, strategy)
    if costs.source == "simulated":
        return _search(base, made, objective, costs, budget, watch, splitter, strategy)
    likely = FissionSearch(made, objective, splitter, wide=wide).samples()
    costs.prepare([call for state in likely for call in _calls(state)], progress)
    found = _search(base, made, objective, costs, budget, watch, splitter, strategy)
    for _ in range(MEASURED_SEARCHES - 1):
        costs.prepare(_calls(found.best), progress)
        best = _repriced(found.best, costs, splitter)
        found = replace(found, best=best, met=objective.met(best.latency_s, best.peak_bytes))
        if found.met or found.stop_reason == INTERRUPTED:
            return found
        found = _search(base, made, objective, costs, budget, watch, splitter, strategy)
    costs.prepare(_calls(found.best), progress)
    best = _repriced(found.best, costs, splitter)
    return replace(found, best=best, met=objective.met(best.latency_s, best.peak_bytes))


def _calls(best: Solution) -> list[Call]:
    return [call for call, _ in launches(lowered(best.program, best.schedule))]


def _repriced(best: Solution, costs: Costs, splitter: Splitter) -> Solution:
    """The same solution by what is measured now."""
    if isinstance(best, SplitState):
        return splitter.state(best.program, best.history, best.orders, best.top.schedule)
    scheduled = Scheduled.of(best.program.graph, best.schedule, costs.workspace_bytes)
    return replace(MState.of(scheduled, costs.latency_s, costs.host), history=best.history)


def _splitter(costs: Costs, wide: bool) -> Splitter:
    from magis.aten.infer import infer

    return Splitter(Prices(costs.latency_s, costs.workspace_bytes, infer, costs.host), wide)


def _search(
    base: MState,
    made: MState,
    objective: Objective,
    costs: Costs,
    budget: Budget,
    watch: Watch,
    splitter: Splitter,
    strategy: Strategy,
) -> Found:
    """The search; for a limit on memory alone that it misses, in the time that is left also one for the least peak,
    which knows nothing of the limit: so limits that cannot be met end at the same peak."""
    seconds, iterations = budget.seconds, budget.iterations
    found = Search(base, objective, costs.latency_s, seconds, iterations, watch, splitter, made, strategy).run()
    left_s = None if budget.seconds is None else budget.seconds - found.seconds
    missed = objective.max_latency_s is None and not found.met and found.stop_reason != INTERRUPTED
    if not missed or (left_s is not None and left_s <= 0):
        return found
    least = Search(base, Objective(None, 0), costs.latency_s, left_s, iterations, watch, splitter, made, strategy).run()
    return found.followed_by(least, objective)


def _objective(limits: Limits, baseline: Estimate) -> Objective:
    seconds = None if limits.max_slowdown is None else limits.max_slowdown * baseline.latency_s
    return Objective(seconds, limits.peak_bytes(baseline.peak_bytes))


def _watch(progress: Progress, baseline: Estimate) -> Watch:
    def watch(found: Found) -> None:
        best = found.best
        share = best.peak_bytes / baseline.peak_bytes if baseline.peak_bytes else 1.0
        slower = best.latency_s / baseline.latency_s - 1 if baseline.latency_s else 0.0
        progress(
            f"{found.stop_reason}: {share:.1%} of eager's peak at {human_percent(slower)} time, "
            f"{found.evaluated:,} variants, {found.seconds:.0f} s; Ctrl-C keeps it"
        )

    return watch
