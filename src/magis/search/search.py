"""M-Optimizer: best-first search over program transformations (paper section 6.2, Algorithm 3).

It starts from more than the captured step: its best order, the plans that people make by hand, and annealed choices
of what to keep, make again or swap (ADR 12). So it is never worse than any of these.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from magis.fission.parts import no_infer
from magis.ir.graph import Call
from magis.rules.base import Change, Rule
from magis.rules.registry import rules
from magis.rules.remat import Rematerialise
from magis.rules.split import Split
from magis.rules.swap import Swap, Unswap
from magis.schedule.arrange import SchedulingLimits
from magis.schedule.dp import SearchLimits
from magis.search.choose import chosen
from magis.search.fission import STARTED, FissionSearch, Named
from magis.search.objective import SLACK, Objective
from magis.search.splitting import SplitState, Splitter
from magis.search.state import MState, Solution
from magis.search.strategy import DEFAULT, Strategy
from magis.search.trivial import built, trivial_sites

SITES = 16
"""Most sites of one rule that are tried on one state."""
EXPLORING = SchedulingLimits(
    whole=64, search=SearchLimits(states=512, beam=4), near_peak=SearchLimits(states=1024, beam=4)
)
"""How thoroughly a new state is re-ordered."""
WHOLE = 5000
"""Up to so many operators the captured step is ordered anew as a whole, else around its worst moments."""
EVALUATIONS = 20_000
"""How many variants of the whole step are evaluated for each of its turns."""
MOVING = 0.6
"""For which share of the budget moves of the F-Tree are tried; then the best are planned with more effort."""
TIGHTER = 2
"""How often that is done again with copies back held up near the peak."""
PATIENCE = 100
"""After so many states without a better one the search ends."""

SWAPPING = (Swap.name, Unswap.name)
"""Rules for states that may swap."""
INTERRUPTED = "interrupted"
"""Why a search ended that Ctrl-C stopped."""
Watch = Callable[["Found"], None]
"""Told how far the search is; called for every state."""


@dataclass(frozen=True, slots=True)
class RuleReport:
    """What a rule did: sites proposed, states made there, how often it is part of the best plan, seconds spent."""

    name: str
    sites: int = 0
    applied: int = 0
    kept: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StartReport:
    """A plan that the search started from."""

    name: str
    peak_bytes: int
    latency_s: float


@dataclass(frozen=True)
class Found:
    """The best state so far and how it was found. `best_at_s` is when; `stop_reason` why the search ended, or what
    it is doing. `states` are the programs that were made, `evaluated` all variants of them."""

    best: Solution
    met: bool
    states: int
    evaluated: int
    seconds: float
    best_at_s: float
    stop_reason: str
    rules: tuple[RuleReport, ...] = ()
    starts: tuple[StartReport, ...] = ()

    def followed_by(self, other: Found, objective: Objective) -> Found:
        """The better of this search and one made after it, and what both did."""
        key, after = (objective.key(found.best.latency_s, found.best.peak_bytes) for found in (self, other))
        best = other if after < key else self
        at_s = self.seconds + other.best_at_s if best is other else self.best_at_s
        used = [name for name, _ in best.best.history]
        rules = tuple(
            RuleReport(a.name, a.sites + b.sites, a.applied + b.applied, used.count(a.name), a.seconds + b.seconds)
            for a, b in zip(self.rules, other.rules)
        )
        return Found(
            best.best,
            objective.met(best.best.latency_s, best.best.peak_bytes),
            self.states + other.states,
            self.evaluated + other.evaluated,
            self.seconds + other.seconds,
            at_s,
            other.stop_reason,
            rules,
            self.starts + tuple(start for start in other.starts if start not in self.starts),
        )


class _Over(Exception):
    """The budget is used up, or nothing better is in sight."""


@dataclass
class _Tally:
    sites: int = 0
    applied: int = 0
    seconds: float = 0.0


@dataclass(order=True)
class _Entry:
    key: tuple[float, float, float]
    number: int
    state: MState = field(compare=False)


class Search:
    """One search. `base` is the captured step in eager's order; `latency_s` prices operator calls; at most
    `iterations` states are made in at most `budget_s` seconds. Without a `splitter` nothing runs in parts. `rewritten`
    is the step after rewrites, from which all goes on that is not done by hand."""

    def __init__(
        self,
        base: MState,
        objective: Objective,
        latency_s: Callable[[Call], float],
        budget_s: float | None = None,
        iterations: int | None = None,
        watch: Watch = lambda found: None,
        splitter: Splitter | None = None,
        rewritten: MState | None = None,
        strategy: Strategy = DEFAULT,
    ) -> None:
        self._strategy = strategy
        self._splitter = splitter
        self._infer = no_infer if splitter is None else splitter.prices.infer
        self._rewritten = rewritten or base
        self._objective = objective
        self._latency_s = latency_s
        self._budget_s, self._iterations, self._watch = budget_s, iterations, watch
        self._started = time.perf_counter()
        self._base = base
        self._best: Solution = base
        self._best_at_s, self._best_number = 0.0, 0
        self._states = self._evaluated = 0
        self._queue: list[_Entry] = []
        self._seen: set[int] = set()
        self._tallies: Mapping[str, _Tally] = {name: _Tally() for name in rules()}
        self._starts: list[StartReport] = []
        self._doing = "starting"

    def run(self) -> Found:
        """Searches. Ctrl-C ends it early and keeps the best plan."""
        try:
            self._check_iterations()
            for name, state in self._beginnings():
                self._starts.append(StartReport(name, state.peak_bytes, state.latency_s))
                self._meet(state)
            for go_on in (self._explore, self._split) if self._strategy.paper else (self._split, self._explore):
                go_on()
            reason = "nothing left to try"
        except _Over as over:
            reason = str(over)
        except KeyboardInterrupt:
            reason = INTERRUPTED
        return replace(self._found(reason), rules=tuple(self._reports()), starts=tuple(self._starts))

    def _beginnings(self) -> Iterator[tuple[str, MState]]:
        """States to start from, by name."""
        yield "eager", self._base
        if self._strategy.paper:
            return
        is_handed = self._strategy.starts and self._strategy.allows(Rematerialise.name)
        by_hand = trivial_sites(self._base.graph) if is_handed else ()
        for name, site in by_hand:  # quick, and tried however short the time is
            self._check_iterations()
            self._doing = name
            state = built(self._base, site, self._latency_s)
            if state is not None:
                yield name, state
        if self._rewritten is not self._base:
            yield "rewritten", self._rewritten
        self._check()
        self._doing = "ordering"
        scheduled = self._rewritten.scheduled
        better, _ = scheduled.improved() if len(scheduled.order) <= WHOLE else scheduled.lowered()
        ordered = replace(self._rewritten, scheduled=better)
        yield "order", ordered
        self._check()
        self._doing = "choosing"
        first = ordered if ordered.peak_bytes < self._rewritten.peak_bytes else self._rewritten
        for state in chosen(first, self._objective, self._latency_s, EVALUATIONS, self._tell, self._strategy, TIGHTER):
            yield "choice", state
            self._check()

    def _split(self) -> None:
        """The moves of the F-Tree."""
        if self._splitter is None or not self._strategy.allows(Split.name):
            return
        self._doing = "splitting"
        found = FissionSearch(
            self._rewritten, self._objective, self._splitter, self._tell, self._splitter.wide, self._strategy
        )
        self._meet_all(found.states(), self._is_enough_of_moves)
        self._meet_all(found.intensified(), lambda: False)

    def _is_enough_of_moves(self) -> bool:
        waited = self._states - self._best_number >= PATIENCE
        return waited or (self._budget_s is not None and self._elapsed_s() >= MOVING * self._budget_s)

    def _meet_all(self, states: Iterator[Named], is_enough: Callable[[], bool]) -> None:
        """Meets states with regions, until there are none or it is enough."""
        started = time.perf_counter()
        for name, state in states:
            tally = self._tallies[state.history[-1][0]]
            tally.sites, tally.applied = tally.sites + 1, tally.applied + 1
            tally.seconds += time.perf_counter() - started
            started = time.perf_counter()
            if name.endswith(STARTED):
                self._starts.append(StartReport(name, state.peak_bytes, state.latency_s))
            self._meet(state)
            self._check()
            if is_enough():
                return

    def _explore(self) -> None:
        """Algorithm 3's loop."""
        if not isinstance(self._best, MState):
            return  # what is not split is far behind
        self._doing = "exploring"
        while self._queue and not (self._strategy.paper and self._is_enough_of_moves()):
            state = heapq.heappop(self._queue).state
            self._seen.add(state.fingerprint.total)
            for name, rule in rules().items():
                if self._strategy.allows(name) and (self._base.host is not None or name not in SWAPPING):
                    self._apply(name, rule, state)

    def _apply(self, name: str, rule: Rule, state: MState) -> None:
        """Tries a rule's best sites on a state."""
        tally = self._tallies[name]
        start = time.perf_counter()
        try:
            for site in islice(rule.sites(state.scheduled, state.latencies_s.__getitem__), SITES):
                tally.sites += 1
                change = rule.apply(state.program, site, self._infer)
                if change is not None and self._is_new(state, change):
                    tally.applied += 1
                    better, _ = state.scheduled.after_edit(
                        change.program.graph, change.old_nodes, change.new_nodes, EXPLORING, thorough=False
                    )
                    made = state.followed_by((name, site), change, better, self._latency_s)
                    if made.fits_host:
                        self._meet(made)
                self._check()
        finally:
            tally.seconds += time.perf_counter() - start

    def _is_new(self, state: MState, change: Change) -> bool:
        """Whether the changed program was not made before; its hash costs neither schedule nor simulation."""
        total = state.changed_fingerprint(change).total
        if total in self._seen:
            return False
        self._seen.add(total)
        return True

    def _meet(self, state: MState | SplitState) -> None:
        """Counts a state, keeps it if it is the best, queues it if it is near the best."""
        self._states += 1
        self._evaluated += 1
        key = self._objective.key(state.latency_s, state.peak_bytes)
        best = self._best
        if key < self._objective.key(best.latency_s, best.peak_bytes):
            self._best, self._best_number = state, self._states
            self._best_at_s = self._elapsed_s()
            best = self._best
        if isinstance(state, MState) and key < self._objective.key(best.latency_s, best.peak_bytes, SLACK):
            heapq.heappush(self._queue, _Entry(key, self._states, state))
        self._watch(self._found(self._doing))

    def _tell(self, evaluated: int) -> bool:
        """Counts variants; says whether there is time for more."""
        self._evaluated += evaluated
        self._watch(self._found(self._doing))
        return self._budget_s is None or self._elapsed_s() < self._budget_s

    def _check(self) -> None:
        """Raises _Over when the search has to end."""
        self._check_iterations()
        if self._budget_s is not None and self._elapsed_s() >= self._budget_s:
            raise _Over("budget used up")
        if self._doing == "exploring" and not self._strategy.paper and self._states - self._best_number >= PATIENCE:
            raise _Over("no better plan in sight")

    def _check_iterations(self) -> None:
        if self._iterations is not None and self._states >= self._iterations:
            raise _Over("iterations used up")

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def _found(self, reason: str) -> Found:
        best = self._best
        met = self._objective.met(best.latency_s, best.peak_bytes)
        return Found(best, met, self._states, self._evaluated, self._elapsed_s(), self._best_at_s, reason)

    def _reports(self) -> Iterator[RuleReport]:
        used = [name for name, _ in self._best.history]
        for name, tally in self._tallies.items():
            yield RuleReport(name, tally.sites, tally.applied, used.count(name), tally.seconds)
