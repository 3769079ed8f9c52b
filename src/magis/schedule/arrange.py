"""Pieces ordered one by one and put together again (paper section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from magis.schedule.dp import PieceOrder, SearchLimits, least_peak
from magis.schedule.interval import IntervalLimits
from magis.schedule.merge import humps, merged
from magis.schedule.partition import CUT, components, pieces
from magis.schedule.problem import Problem


@dataclass(frozen=True, slots=True)
class SchedulingLimits:
    """Up to `whole` operators are ordered as one piece. Neighbouring pieces of a component that a cut of some loss
    separates stay one while they have at most `joined` operators. `cut`: see `magis.schedule.partition`.
    Around the peak, operators up to `reach` positions away are ordered anew (0: none), with `near_peak` for `search`;
    gains of less than one part in `least_gain` of the peak do not count there. `margins`: see `Scheduled.lowered`."""

    whole: int = 128
    joined: int = 14
    cut: int = CUT
    margins: tuple[int, ...] = (0, 60)
    reach: int = 60
    least_gain: int = 2048
    interval: IntervalLimits = field(default=IntervalLimits())
    search: SearchLimits = field(default=SearchLimits())
    near_peak: SearchLimits = field(default=SearchLimits(states=2048, beam=8))


@dataclass(frozen=True, slots=True)
class Work:
    """Pieces ordered, operators of the largest, sets of operators visited, and pieces whose order is not proven
    optimal because there were too many sets."""

    pieces: int = 0
    largest_piece: int = 0
    states: int = 0
    capped_pieces: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.pieces + other.pieces,
            max(self.largest_piece, other.largest_piece),
            self.states + other.states,
            self.capped_pieces + other.capped_pieces,
        )

    @classmethod
    def of(cls, found: Sequence[PieceOrder]) -> Work:
        """The sum over pieces."""
        largest = max((len(piece.order) for piece in found), default=0)
        states = sum(piece.states for piece in found)
        return cls(len(found), largest, states, sum(not piece.optimal for piece in found))


def arrange(given: Problem, limits: SchedulingLimits, search: SearchLimits) -> tuple[Sequence[int], Work]:
    """The best order found of a problem, the given one if none has a smaller peak.

    Components' orders are put together in three ways: as given, one after the other, and hump by hump."""
    everything = list(range(len(given.nodes)))
    if len(everything) <= limits.whole:
        found = [least_peak(given, everything, 0, search)] if everything else []
        return (found[0].order if found else ()), Work.of(found)
    found, sequences, done = [], [], 0
    for component in components(given):
        sequence: list[int] = []
        start = done
        for piece in pieces(given, component, limits.joined, limits.cut):
            ordered = least_peak(given, piece, done, search)
            found.append(ordered)
            sequence += ordered.order
            for node in piece:
                done |= 1 << node
        sequences.append((sequence, start))
    candidates = [everything, [node for sequence, _ in sequences for node in sequence]]
    if len(sequences) > 1:
        candidates.append(merged([humps(order, given.steps(order, start)) for order, start in sequences]))
    return min(candidates, key=given.peak), Work.of(found)
