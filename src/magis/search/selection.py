"""The best choice of what to recompute, exactly: a 0-1 program over one turn of the schedule (ADR 8).

A storage that is read after the turn is kept across it, or its maker runs again; an operator that runs again needs
each storage that it reads kept or made again. Memory is bounded at a few moments, which the caller adds one by one,
where a real schedule turned out to be worst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from magis.errors import MagisError
from magis.ir.graph import NodeId
from magis.search.candidates import NEVER, Candidates, Selection, Spans

GAP = 1e-3
"""How far from the best a solution may be, as a fraction of the peak or of the latency."""
NODES = 300
"""Most branch-and-bound nodes of one solution: the same end everywhere, unlike a time."""
_MIB = 1 << 20
_MILLI = 1e3
_LESSER = 1e-3
"""Weight of what only decides between equals."""


@dataclass
class Moment:
    """A position of the base order: bytes live there beyond the base's own undecided ones and the selection's, and
    bytes more while an operator runs again for it."""

    place: int
    more_bytes: int = 0
    transient_bytes: dict[NodeId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Solved:
    """The selection, its peak over the moments and its seconds of recomputation, as far as the model knows."""

    selection: Selection
    peak_bytes: int
    latency_s: float


def solve(
    given: Candidates,
    moments: Sequence[Moment],
    spans: Spans,
    max_latency_s: float | None = None,
    max_peak_bytes: int | None = None,
    time_limit_s: float | None = None,
    link_share: float = 1.0,
) -> Solved | None:
    """The selection with the least peak, residents left out, that takes at most `max_latency_s` of recomputation; with
    `max_peak_bytes` the fastest that stays within it, of equals the one with the least peak. None: none was found, in
    at most `time_limit_s`. Swapping may use `link_share` of the time on the links."""
    model = _Model(given, moments, spans, link_share)
    if max_latency_s is not None:
        model.limit_latency(max_latency_s)
    if max_peak_bytes is not None:
        model.limit_peak(max_peak_bytes)
    return model.solve(latency_first=max_peak_bytes is not None, time_limit_s=time_limit_s)


class _Model:
    """Variables are 0 or 1; bytes count in MiB, seconds in shares of all that could run again."""

    def __init__(self, given: Candidates, moments: Sequence[Moment], spans: Spans, link_share: float = 1.0) -> None:
        self._given = given
        self._solver = solver = _library().Solver.CreateSolver("SCIP")
        if solver is None:
            raise MagisError("this OR-Tools is built without SCIP: install the wheel from PyPI (pip install ortools)")
        self._second = 1.0 / (sum(given.latency_s.values()) or 1.0)
        wanted = [s for s in given.storages if given.last_late[s] != NEVER or given.users[s]]
        self._kept = {s: solver.BoolVar(f"kept{s}") for s in wanted}
        self._again = {node: solver.BoolVar(f"again{node}") for node in given.takes}
        self._swapped = {s: solver.BoolVar(f"swapped{s}") for s in given.transfers_s}
        for storage in wanted:
            if given.last_late[storage] != NEVER:
                solver.Add(self._there(storage) >= 1)
        for node, runs in self._again.items():
            for storage in given.takes[node]:
                solver.Add(self._there(storage) >= runs)
        self._seconds = sum(given.latency_s[n] * self._second * v for n, v in self._again.items())
        if self._swapped:
            away = sum(given.nbytes[s] / _MIB * v for s, v in self._swapped.items())
            solver.Add(away <= given.host_bytes / _MIB)
        for storages, seconds in given.links(spans) if self._swapped else ():
            solver.Add(
                sum(given.transfers_s[s] * _MILLI * self._swapped[s] for s in storages) <= link_share * seconds * _MILLI
            )
        self._peak = solver.NumVar(0, solver.infinity(), "peak")
        self._only_made: dict[int, Any] = {}
        for moment in moments:
            self._bound(moment, spans)

    def _there(self, storage: int) -> Any:
        """How often a storage is there after the turn."""
        return self._kept[storage] + self._again.get(self._given.maker[storage], 0) + self._swapped.get(storage, 0)

    def _bound(self, moment: Moment, spans: Spans) -> None:
        """The peak is at least what is live at a moment."""
        given = self._given
        kept, again = given.held(moment.place, spans)
        live = [given.nbytes[s] / _MIB * self._kept[s] for s in kept if s in self._kept]
        live += [given.nbytes[s] / _MIB * self._made(s) for s in again if given.maker[s] in self._again]
        live += [given.nbytes[s] / _MIB * self._swapped[s] for s in again if s in self._swapped]
        transients = moment.transient_bytes.items()
        live += [nbytes / _MIB * self._again[node] for node, nbytes in transients if node in self._again]
        fixed = (given.undecided_bytes(moment.place) + moment.more_bytes) / _MIB
        self._solver.Add(sum(live) + fixed <= self._peak)

    def _made(self, storage: int) -> Any:
        """Whether a storage is made again and not kept as well, as it may be when its maker has several results."""
        maker = self._given.maker[storage]
        if len(self._given.makes[maker]) == 1:
            return self._again[maker]
        if storage not in self._only_made:
            self._only_made[storage] = self._solver.BoolVar(f"made{storage}")
            self._solver.Add(self._only_made[storage] >= self._again[maker] - self._kept[storage])
        return self._only_made[storage]

    def limit_latency(self, seconds: float) -> None:
        self._solver.Add(self._seconds <= seconds * self._second)

    def limit_peak(self, nbytes: int) -> None:
        self._solver.Add(self._peak <= nbytes / _MIB)

    def solve(self, latency_first: bool, time_limit_s: float | None) -> Solved | None:
        given, library = self._given, _library()
        most = (max(given.state.live, default=0) or 1) / _MIB
        share = self._peak * (1 / most)
        kept = sum(given.nbytes[s] / _MIB / most * v for s, v in self._kept.items())
        kept += sum(given.nbytes[s] / _MIB / most * v for s, v in self._swapped.items())
        away = sum(given.nbytes[s] / _MIB / most * v for s, v in self._swapped.items())
        if latency_first:
            self._solver.Minimize(self._seconds + _LESSER * share + _LESSER**2 * (kept + away))
        else:
            self._solver.Minimize(share + _LESSER * self._seconds + _LESSER**2 * kept)
        parameters = library.MPSolverParameters()
        parameters.SetDoubleParam(library.MPSolverParameters.RELATIVE_MIP_GAP, GAP)
        self._solver.SetSolverSpecificParametersAsString(f"limits/nodes = {NODES}\nmisc/catchctrlc = FALSE\n")
        if time_limit_s is not None:
            self._solver.SetTimeLimit(max(int(time_limit_s * 1000), 1))
        status = self._solver.Solve(parameters)
        if status not in (library.Solver.OPTIMAL, library.Solver.FEASIBLE):
            return None
        chosen = frozenset(s for s, v in self._kept.items() if v.solution_value() > 0.5)
        again = frozenset(n for n, v in self._again.items() if v.solution_value() > 0.5)
        swapped = frozenset(s for s, v in self._swapped.items() if v.solution_value() > 0.5 and s not in chosen)
        seconds = sum(given.latency_s[n] for n in sorted(again))
        return Solved(Selection(chosen, again, swapped), round(self._peak.solution_value() * _MIB), seconds)


@cache
def _library() -> Any:
    """OR-Tools' linear solver, which takes a moment to load."""
    from ortools.linear_solver import pywraplp

    return pywraplp


def moment_at(
    given: Candidates,
    chosen: Selection,
    spans: Spans,
    place: int,
    live_bytes: int,
    running_again: NodeId | None,
) -> Moment:
    """What the model has to know of a position at which `live_bytes` were found, residents left out, under a selection:
    while a copy of `running_again` ran for it, or the base's own operator."""
    kept, again = given.held(place, spans)
    known = given.undecided_bytes(place)
    known += sum(given.nbytes[s] for s in kept if s in chosen.kept)
    known += sum(given.nbytes[s] for s in again if given.maker[s] in chosen.again and s not in chosen.kept)
    known += sum(given.nbytes[s] for s in again if s in chosen.swapped)
    more = live_bytes - known
    if running_again is None or more <= 0:
        return Moment(place, more)
    return Moment(place, 0, {running_again: more})


def merged(moments: Mapping[tuple[int, NodeId | None], Moment]) -> list[Moment]:
    """One moment a position: the largest surplus, and every transient."""
    found: dict[int, Moment] = {}
    for (place, _), moment in sorted(moments.items(), key=lambda item: (item[0][0], item[0][1] or -1)):
        whole = found.setdefault(place, Moment(place, moment.more_bytes))
        whole.more_bytes = max(whole.more_bytes, moment.more_bytes)
        whole.transient_bytes.update(moment.transient_bytes)
    return list(found.values())
