"""Exact selection in rounds: choose, build, look where the schedule is really worst, choose again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from magis.ir.graph import Call, NodeId
from magis.rules.base import Site
from magis.rules.remat import Rematerialise
from magis.rules.swap import Swap
from magis.search.candidates import Candidates, Selection, Spans
from magis.search.objective import Objective
from magis.search.selection import GAP, Moment, Solved, merged, moment_at, solve
from magis.search.state import MState

ROUNDS = 10
"""Most rounds for one turn."""
NEAR = 0.96
"""From which share of the peak on a step is a moment to look at."""
MOMENTS = 24
"""Most moments that one round adds."""
LEVELS = 3
"""Most turns, one after the other: each starts from the best state of the one before."""
STEPS = 4
"""Most peaks that are asked for in the end, each below the best state's by a quarter of what is possible."""
STALLED = 5e-4
"""Share of the time that operators may wait for transfers without anything being done about it."""
LEAST_SHARE = 0.7
"""Least share of a link's time that a choice is given in the end."""
CLOSE = 0.005
"""How far below a peak that was asked for a schedule may end, as a share of it, without more being asked for."""
CLOSER = 4
"""How often a little more is asked for."""
STEP_ROUNDS = 5
"""Most rounds for one of them."""

Key = tuple[int, NodeId | None]


def selected(
    base: MState,
    objective: Objective,
    latency_s: Callable[[Call], float],
    remaining_s: Callable[[], float | None] = lambda: None,
) -> Iterator[MState]:
    """States that recompute what an exact choice says: what is asked for, for one turn after the other; then, as long
    as it helps, a peak below the best so far. `remaining_s` is asked how long a choice may take.

    Where much runs again, schedules turn out far above what was chosen, and the moments found there rule out good
    choices as well: small steps start without them."""
    best = base
    for state in _turn_by_turn(base, objective, latency_s, remaining_s):
        yield state
        best = _better(state, best, objective)
    seconds = objective.max_latency_s
    least = base.scheduled.flat.resident_bytes if seconds is not None else objective.max_peak_bytes
    for _ in range(STEPS):
        if least is None or best.peak_bytes <= least:
            return
        before, peak = best, best.peak_bytes - (best.peak_bytes - least) // 4
        target = _Target(base, seconds, peak, strict=True)
        for state in islice(_around(base, target, latency_s, remaining_s), STEP_ROUNDS):
            yield state
            best = _better(state, best, objective)
        if best is before:
            return


def _better(state: MState, best: MState, objective: Objective) -> MState:
    new, old = (objective.key(each.latency_s, each.peak_bytes) for each in (state, best))
    return state if new < old else best


def _turn_by_turn(
    base: MState,
    objective: Objective,
    latency_s: Callable[[Call], float],
    remaining_s: Callable[[], float | None],
) -> Iterator[MState]:
    seconds, peak = objective.max_latency_s, objective.max_peak_bytes
    for _ in range(LEVELS):
        best = base
        target = _Target(base, seconds, peak if seconds is None else None)
        for state in _around(base, target, latency_s, remaining_s):
            yield state
            best = _better(state, best, objective)
        if best is base or (seconds is None and objective.met(best.latency_s, best.peak_bytes)):
            return
        base = best


def _around(
    base: MState,
    target: _Target,
    latency_s: Callable[[Call], float],
    remaining_s: Callable[[], float | None],
) -> Iterator[MState]:
    """States of one turn: the first worst moment of the base."""
    live = base.scheduled.live
    turn = live.index(max(live)) if live else 0
    given = Candidates(base.scheduled, base.latencies_s.__getitem__, turn, base.host)
    if not given.takes:
        return
    chosen = given.everything_kept()
    spans = given.spans(chosen)
    moments: dict[Key, Moment] = {(turn, None): Moment(turn)}
    for _ in range(ROUNDS):
        solved = target.solve(given, merged(moments), spans, remaining_s())
        if solved is None or solved.selection == chosen:
            return
        chosen = solved.selection
        state = _carried_out(base, given, chosen, latency_s)
        if state is None:
            return
        yield state
        if target.reached(state, solved):
            return
        spans = given.spans(chosen)
        for key, moment in _worst(base, given, chosen, spans, state):
            _remember(moments, key, moment)


class _Target:
    """What to ask of the exact choice: least peak, or least latency within a peak and, unless `strict`, least peak when
    there is no such choice; always within `max_latency_s`. Where schedules turn out above a peak that was asked for,
    less is asked next time, and a little more where they turn out below it; where operators wait for transfers, less is
    put on the links."""

    def __init__(
        self, base: MState, max_latency_s: float | None, max_peak_bytes: int | None, strict: bool = False
    ) -> None:
        self._resident_bytes = base.scheduled.flat.resident_bytes
        self._seconds = None if max_latency_s is None else max(max_latency_s - base.latency_s, 0.0)
        self._peak = None if max_peak_bytes is None else max_peak_bytes - self._resident_bytes
        self._asked = self._peak
        self._strict = strict
        self._link_share = 1.0
        self._closer = 0

    def solve(
        self, given: Candidates, moments: Sequence[Moment], spans: Spans, time_limit_s: float | None
    ) -> Solved | None:
        """The choice."""
        if self._asked is not None:
            asked = self._asked
            found = None
            if asked > 0:
                found = solve(given, moments, spans, self._seconds, asked, time_limit_s, self._link_share)
            if found is not None or self._strict:
                return found
            self._asked = self._peak = None
        return solve(given, moments, spans, self._seconds, None, time_limit_s, self._link_share)

    def reached(self, state: MState, solved: Solved) -> bool:
        """Whether the schedule is as good as the choice promised."""
        peak = state.peak_bytes - self._resident_bytes
        waited = state.stalls_s > STALLED * state.latency_s and self._link_share > LEAST_SHARE
        if waited:
            self._link_share *= 0.95
        if self._peak is None or self._asked is None:
            return peak <= solved.peak_bytes * (1 + GAP) and not waited
        if peak > self._peak:
            self._asked -= min(max(peak - self._peak, 0), self._asked // 50)
            return False
        slack = self._peak - peak
        if slack > CLOSE * self._peak and self._closer < CLOSER:
            self._closer += 1
            self._asked += slack // 2
            return False
        return not waited


def built(base: MState, where: Site, latency_s: Callable[[Call], float]) -> MState | None:
    """The base with a recomputation carried out, re-ordered around its worst moments; None when nothing is dropped."""
    change = Rematerialise().apply(base.program, where) if where else None
    if change is None:
        return None
    edited = base.scheduled.edited(change.program.graph, change.old_nodes, change.new_nodes)
    better, _ = edited.lowered(thorough=False)
    return base.followed_by((Rematerialise.name, where), change, better, latency_s)


def _carried_out(
    base: MState, given: Candidates, chosen: Selection, latency_s: Callable[[Call], float]
) -> MState | None:
    """The base as a selection says; None when it keeps everything."""
    state = built(base, given.site(chosen), latency_s) or base
    swap = Swap()
    for storage in sorted(chosen.swapped):
        where = given.swap_site(storage, state.graph)
        change = None if where is None else swap.apply(state.program, where)
        if change is None or where is None:
            continue
        edited = state.scheduled.edited(change.program.graph, change.old_nodes, change.new_nodes)
        state = state.followed_by((Swap.name, where), change, edited, latency_s)
    return None if state is base or not state.fits_host else state


def _worst(base: MState, given: Candidates, chosen: Selection, spans: Spans, state: MState) -> list[tuple[Key, Moment]]:
    """The worst moments of a built state, as the model counts them: by the next of the base's own operators, and by
    the operator that runs again at that moment, if one does."""
    live, order = state.scheduled.live, state.scheduled.order
    position = base.scheduled.position
    peak = max(live)
    found: dict[Key, int] = {}
    original = _originals(base, state)
    place = len(base.scheduled.order) - 1
    for step in range(len(order) - 1, -1, -1):
        node = order[step]
        own = node < len(position) and position[node] >= 0 and node not in original
        place = position[node] if own else place
        if live[step] >= NEAR * peak:
            key = (place, original.get(node))
            found[key] = max(found.get(key, 0), live[step])
    worst = sorted(found.items(), key=lambda item: (-item[1], item[0][0], item[0][1] or -1))[:MOMENTS]
    return [(key, moment_at(given, chosen, spans, key[0], nbytes, key[1])) for key, nbytes in worst]


def _remember(moments: dict[Key, Moment], key: Key, new: Moment) -> None:
    """Adds what was found at a moment, or raises what was found there before."""
    known = moments.setdefault(key, new)
    known.more_bytes = max(known.more_bytes, new.more_bytes)
    for node, nbytes in new.transient_bytes.items():
        known.transient_bytes[node] = max(known.transient_bytes.get(node, 0), nbytes)


def _originals(base: MState, state: MState) -> dict[NodeId, NodeId]:
    """For each copy that the last step of the history added, the operator of the base that it repeats."""
    steps = state.history[len(base.history) :]
    where = next((site for name, site in steps if name == Rematerialise.name), (0,))
    segment = {NodeId(n) for n in where[1 : where[0] + 1]}
    first = max(base.graph.nodes) + 1
    order = [node.id for node in base.graph.nodes_in_order() if node.id in segment]
    return {NodeId(first + i): original for i, original in enumerate(order)}
