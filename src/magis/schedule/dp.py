"""The order of a piece with the least peak: dynamic programming over sets of nodes that have run (paper section 5.1).

What is live follows from the set, so no set needs more than one visit to find out whether the whole piece can run
without exceeding a *level*. The least such level is found by bisection, between a lower bound and the peak of the
given order (`search` has the walk for one level). A beam takes over when there are too many sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magis.schedule.bounds import lower_bound
from magis.schedule.problem import Problem
from magis.schedule.search import Moves, Walk, beam


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """When the dynamic programming of a piece has visited `states` sets, a beam of `beam` sets takes over.
    Peaks less than `gain` bytes lower are not looked for."""

    states: int = 16384
    beam: int = 24
    gain: int = 1


@dataclass(frozen=True, slots=True)
class PieceOrder:
    """An order, its peak in bytes over what was live before, the number of sets visited, and whether it is proven
    that no order has a peak that is `SearchLimits.gain` lower."""

    order: tuple[int, ...]
    peak: int
    states: int
    optimal: bool


def least_peak(given: Problem, piece: Sequence[int], done: int, limits: SearchLimits) -> PieceOrder:
    """The best order of `piece` when `done` have run; `piece` itself, a valid order, if none is better."""
    order, peak, states = tuple(piece), given.peak(piece, done), 0
    bound = lower_bound(given, piece, done)
    if bound > peak - limits.gain:
        return PieceOrder(order, peak, 0, True)
    directions = [Moves(given, piece, done, backward) for backward in (True, False)]
    level = peak - limits.gain
    while bound <= peak - limits.gain:
        walks = [Walk(moves, level) for moves in directions]
        found, capped = _decide(walks, limits.states - states)
        states += sum(len(walk.reached) for walk in walks)
        if found is not None:
            order, peak = found, given.peak(found, done)
        elif capped:
            wide = [beam(moves, (bound, peak), limits.beam) for moves in directions]
            order = min((order, *filter(None, wide)), key=lambda each: given.peak(each, done))
            return PieceOrder(order, given.peak(order, done), states, False)
        else:
            bound = min(peak, *(walk.exceeding for walk in walks if walk.exhausted))
        level = (bound + peak - limits.gain) // 2
    return PieceOrder(order, peak, states, True)


def _decide(walks: Sequence[Walk], states: int) -> tuple[tuple[int, ...] | None, bool]:
    """An order within the walks' level, None if there is none; and whether `states` were too few to tell. Each walk
    goes on for as long as the others have: which direction is short is not known before."""
    share = 64
    while True:
        share = min(4 * share, max(states, 1))
        for walk in walks:
            found = walk.proceed(share)
            if found is not None or walk.exhausted:
                return found, False
        if share >= states:
            return None, True
