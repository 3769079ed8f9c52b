"""Which regions to run in parts, and in how many: best-first over moves of the F-Tree (paper sections 4.3, 5.2, 6.2).

It starts from every number of parts of the largest regions ("whole step in k parts"). Of each state the bodies are then
planned as graphs of their own: what to keep and what to compute again inside a part is annealed (ADR 9, 12).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from magis.fission.analyze import Analyzer, hot_bytes, nested
from magis.fission.dim_graph import dim_graph
from magis.fission.moves import Forest, coarser, disable, finer
from magis.fission.parts import CannotSplitError
from magis.fission.tree import Fission, Program, sections
from magis.lower.lower import lower
from magis.rules.loosen import Loosen, loose_ends
from magis.rules.split import Parts, Split, fitting, split, split_site
from magis.search.choose import Tell, always, chosen
from magis.search.objective import SLACK, Objective
from magis.search.splitting import SplitState, Splitter
from magis.search.state import MState, Step
from magis.search.strategy import DEFAULT, Strategy
from magis.sim.timeline import timeline

STARTED = " parts"
"""How the names of starts end."""
LADDER = 24
"""Most numbers of parts that a whole step is tried in."""
REFINED = 6
"""Of how many starts the bodies are planned."""
NESTED = 3
"""Numbers of parts in which a region inside or beside others is tried."""
MOST_NESTED = 4
"""Most parts of a region inside another: small operators take longer in a step than each by itself."""
WORTHWHILE = 0.02
"""By which share of eager's peak a region's first parts have to lower it for more parts to be tried at once."""
EVALUATIONS = 10_000
"""How many variants of a body are evaluated for each of its turns."""
INTENSIFIED = 3
"""Of how many states the bodies are planned once more in the end."""
MORE_EVALUATIONS = 60_000
"""How many variants are evaluated then."""
BEYOND = 1.25
"""By how much a start may exceed the latency allowed before larger numbers of parts are not tried any more."""

Named: TypeAlias = tuple[str, SplitState]


@dataclass(order=True)
class _Entry:
    key: tuple[float, float, float]
    number: int
    plain: SplitState = field(compare=False)


class FissionSearch:
    """States with regions, of a captured step. `splitter` makes and prices them."""

    def __init__(
        self,
        base: MState,
        objective: Objective,
        splitter: Splitter,
        tell: Tell = always,
        wide: bool = True,
        strategy: Strategy = DEFAULT,
    ) -> None:
        self.strategy = strategy
        self.wide = wide
        self.objective, self.splitter, self.tell = objective, splitter, tell
        self.base = base
        self.queue: list[_Entry] = []
        self.seen: set[object] = set()
        self.best: tuple[float, float, float] = self.key(base)
        self.numbered = 0
        self.planned: list[tuple[tuple[float, float, float], int, SplitState]] = []

    def key(self, state: MState | SplitState, slack: float = 1.0) -> tuple[float, float, float]:
        """Smaller is better."""
        return self.objective.key(state.latency_s, state.peak_bytes, slack)

    def states(self) -> Iterator[Named]:
        """States, each better or at least as promising as those before; it ends when no move leads on."""
        starts: list[tuple[str, SplitState]] = []
        if not self.strategy.starts:
            self._met(self.splitter.state(*self._loosened()))
        for name, state in self._starts() if self.strategy.starts else ():
            yield name, state
            starts.append((name, state))
        for name, state in self._promising(starts)[:REFINED]:
            for refined in self._refined(state):
                yield f"{name}, planned inside", refined
        while self.queue:
            entry = heapq.heappop(self.queue)
            for name, state in self._moved(entry.plain):
                yield name, state
                if self.key(state)[0] <= SLACK * self.best[0]:
                    for refined in self._refined(state):
                        yield f"{name}, planned inside", refined

    def intensified(self) -> Iterator[Named]:
        """The best of those whose bodies were planned, planned anew with more effort."""
        for _, _, state in sorted(self.planned)[:INTENSIFIED]:
            for refined in self._refined(state, MORE_EVALUATIONS):
                yield "planned inside, with more effort", refined

    def _promising(self, starts: list[Named]) -> list[Named]:
        """Those whose bodies are worth planning, best first: under a limit on memory alone, those that are fast but
        miss it, nearest ones first."""
        if self.objective.max_latency_s is not None:
            return sorted(starts, key=lambda named: self.key(named[1]))
        limit = self.objective.max_peak_bytes or 0
        peak, fastest, _ = self.best
        missing = [named for named in starts if named[1].peak_bytes > limit]
        if peak <= limit:
            missing = [named for named in missing if named[1].latency_s < fastest]
        return sorted(missing, key=lambda named: named[1].peak_bytes)

    def _starts(self) -> Iterator[Named]:
        program, history = self._loosened()
        forest = nested(self._analyzed(self.splitter.state(program)))
        for root in forest:
            for parts in ladder(root.length):
                state = self._split(program, history, replace(root, parts=parts, children=(), wide=self.wide))
                if state is None:
                    break
                yield f"{root.dimension} of {len(root.region)} operators in {parts}{STARTED}", state
                limit = self.objective.max_latency_s
                if limit is not None and state.latency_s > BEYOND * limit:
                    break
                if state.peak_bytes > (1 - WORTHWHILE) * self.base.peak_bytes:
                    break

    def samples(self) -> Iterator[SplitState]:
        """Whole steps in 2, 4, 8, ... parts, as far as there are regions worth it."""
        program, history = self._loosened()
        for root in nested(self._analyzed(self.splitter.state(program))):
            parts = 2
            while parts <= root.length:
                state = self._split(program, history, replace(root, parts=parts, children=(), wide=self.wide))
                if state is None or state.peak_bytes > (1 - WORTHWHILE) * self.base.peak_bytes:
                    break
                yield state
                parts *= 2

    def _loosened(self) -> tuple[Program, tuple[Step, ...]]:
        program = Program(self.base.graph)
        site = loose_ends(program.graph) if self.strategy.allows(Loosen.name) else ()
        change = Loosen().apply(program, site) if site else None
        if change is None:
            return program, self.base.history
        return change.program, (*self.base.history, (Loosen.name, site))

    def _analyzed(self, state: SplitState) -> list[Fission]:
        """Algorithm 1 with the hot-spots of a state."""
        graph = state.program.graph
        routine = lower(state.program, state.schedule, self.splitter.prices.infer)
        found = timeline(routine, self.splitter.prices.call_workspace_bytes).hotspots
        return Analyzer(dim_graph(graph), hot_bytes(graph, found)).candidates()

    def _split(self, program: Program, history: tuple[Step, ...], fission: Fission) -> SplitState | None:
        """The state with a region more; None when that is not possible."""
        try:
            site = split_site(fission, program.graph)
            change = split(program, fission)
            return self._met(self.splitter.state(change.program, (*history, (Split.name, site))))
        except CannotSplitError:
            return None

    def _met(self, state: SplitState) -> SplitState:
        """Remembers a state that is near the best, to move on from it."""
        key = self.key(state)
        self.best = min(self.best, key)
        if key < tuple(SLACK * k for k in self.best):
            self.numbered += 1
            heapq.heappush(self.queue, _Entry(key, self.numbered, state))
        return state

    def _refined(self, plain: SplitState, evaluations: int = EVALUATIONS) -> Iterator[SplitState]:
        """The state with the bodies of its regions planned, then with what is around them planned."""
        if self.strategy.paper:
            return
        state = plain
        for region in state.program.enabled:
            current = next((r for r in state.program.enabled if r.region & region.region), None)
            if current is None:
                continue
            better = self._with_planned_body(state, current, evaluations)
            if better is not None:
                state = better
                self.best = min(self.best, self.key(state))
                yield state
        better = self._with_planned_top(state, evaluations)
        if better is not None:
            state = better
            self.best = min(self.best, self.key(better))
            yield better
        if state is not plain:
            self.planned.append((self.key(state), len(self.planned), plain))

    def _chosen(self, base: MState, objective: Objective, evaluations: int) -> Iterator[MState]:
        return chosen(base, objective, self.splitter.prices.latency_s, evaluations, self.tell, self.strategy)

    def _with_planned_top(self, state: SplitState, evaluations: int) -> SplitState | None:
        """The best that planning what is around the regions gives; None if nothing is better than the state."""
        best = None
        for found in self._chosen(state.top, self.objective, evaluations):
            best = found
        if best is None:
            return None
        try:
            made = self.splitter.with_top(state, best)
        except CannotSplitError:
            return None
        return made if self.key(made) < self.key(state) else None

    def _with_planned_body(self, state: SplitState, region: Fission, evaluations: int) -> SplitState | None:
        """The best that planning a region's body gives; None if nothing is better than the state."""
        body = self.splitter.body(state, region)
        share = 1.0
        for _ in range(3):
            objective = self._inside(state, region, body, share)
            if objective is None:
                return None
            best = body
            for found in self._chosen(body, objective, evaluations):
                if objective.key(found.latency_s, found.peak_bytes) < objective.key(best.latency_s, best.peak_bytes):
                    best = found
            if best is body:
                return None
            try:
                made = self.splitter.with_body(state, region, body, best)
            except CannotSplitError:
                return None
            if self.key(made) < self.key(state):
                return made
            share *= 0.9  # parts of other sizes cost more than the largest suggests
        return None

    def _inside(self, state: SplitState, region: Fission, body: MState, share: float) -> Objective | None:
        """What to ask of a body: least peak within the time that is left, or least time within the bytes that are."""
        size = sections(region.length, min(region.parts, region.length))[0][1]
        parts = region.length / size
        seconds, peak = self.objective.max_latency_s, self.objective.max_peak_bytes
        if seconds is not None:
            left = seconds - state.latency_s
            return None if left <= 0 else Objective(body.latency_s + share * left / parts)
        assert peak is not None
        excess = state.peak_bytes - peak
        return None if excess <= 0 else Objective(None, max(body.peak_bytes - excess, 0))

    def _moved(self, plain: SplitState) -> Iterator[Named]:
        """All states that one move leads to."""
        resizes = self.strategy.allows(Parts.name)
        if resizes:
            yield from self._resized(plain)
        candidates = self._analyzed(plain)
        yield from self._enabled(plain, candidates)
        if resizes:
            yield from self._lifted(plain, candidates)

    def _resized(self, plain: SplitState) -> Iterator[Named]:
        for name, move in (("finer", finer), ("coarser", coarser), ("disable", disable)):
            for forest in move(plain.program.ftree):
                if any(child.parts > MOST_NESTED for root in forest for child in root.walk() if child is not root):
                    continue
                step = _resizing(plain.program.ftree, forest)
                change = None if step is None else Parts().apply(plain.program, step)
                if change is None or step is None or not change.program.enabled:
                    continue
                state = self._state(change.program, (*plain.history, (Parts.name, step)))
                if state is not None:
                    yield name, state

    def _enabled(self, plain: SplitState, candidates: Sequence[Fission]) -> Iterator[Named]:
        """Enables candidates for the hot-spots of the state: inside its regions along other dimensions, or beside."""
        for candidate in candidates:
            for fitted in fitting(plain.program, candidate):
                for parts in ladder(fitted.length)[:NESTED]:
                    yield from self._added(plain.program, plain.history, replace(fitted, parts=parts), "enable")

    def _lifted(self, plain: SplitState, candidates: Sequence[Fission]) -> Iterator[Named]:
        """Enables a candidate that contains a region in its place."""
        for candidate in candidates:
            for root in plain.program.enabled:
                if not root.region < candidate.region:
                    continue
                whole = (min(root.region), len(root.region), 1)
                change = Parts().apply(plain.program, whole)
                if change is not None:
                    history = (*plain.history, (Parts.name, whole))
                    fission = replace(candidate, parts=ladder(candidate.length)[0])
                    yield from self._added(change.program, history, fission, "lift")

    def _added(self, program: Program, history: tuple[Step, ...], fission: Fission, move: str) -> Iterator[Named]:
        wanted = replace(fission, wide=self.wide)
        if self._is_new(program.ftree, wanted):
            state = self._split(program, history, wanted)
            if state is not None:
                yield f"{move}: {wanted.dimension} in {wanted.parts}", state

    def _state(self, program: Program, history: tuple[Step, ...]) -> SplitState | None:
        key = _essence(program.ftree)
        if key in self.seen:
            return None
        self.seen.add(key)
        try:
            return self._met(self.splitter.state(program, history))
        except CannotSplitError:
            return None

    def _is_new(self, forest: Forest, fission: Fission) -> bool:
        key = (_essence(forest), fission.region, tuple(fission.cuts.items()), fission.parts)
        if key in self.seen:
            return False
        self.seen.add(key)
        return True


def ladder(length: int) -> list[int]:
    """Numbers of parts worth trying: one for each size of the largest part, few for long dimensions."""
    sizes = sorted({-(-length // parts) for parts in range(2, length + 1)}, reverse=True)
    found = [-(-length // size) for size in sizes]
    if len(found) <= LADDER:
        return found
    step = (length / 2) ** (1 / (LADDER - 1))
    wanted = [2 * step**i for i in range(LADDER)]
    return sorted({min(found, key=lambda n: (abs(n - w), n)) for w in wanted})


def _essence(forest: Sequence[Fission]) -> object:
    """What two forests have in common that run alike."""
    return frozenset(
        (f.region, tuple(sorted(f.cuts.items())), f.parts) for root in forest for f in root.walk() if f.parts > 1
    )


def _resizing(before: Forest, after: Forest) -> tuple[int, ...] | None:
    """The site of `Parts` that leads from one forest to another of the same regions."""
    for old, new in zip(before, after):
        if old.parts != new.parts:
            return (min(new.region), len(new.region), new.parts)
        inside = _resizing(old.children, new.children)
        if inside is not None:
            return inside
    return None
