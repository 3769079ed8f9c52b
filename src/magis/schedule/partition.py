"""Independent parts of a scheduling problem: connected components, cut at narrow waists (paper section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence

from magis.schedule.problem import Problem, members
from magis.schedule.waist import narrow_waist

CUT = 1
"""Narrow-waist value up to which a node cuts its component in two."""


def components(given: Problem) -> list[int]:
    """The weakly connected components, as sets, by least node."""
    neighbours = list(given.needs)
    for node, earlier in enumerate(given.before):
        for other in earlier:
            neighbours[other] |= 1 << node
    found, left = [], given.everything
    while left:
        fresh = reached = left & -left
        while fresh:
            grown = 0
            for node in members(fresh):
                grown |= neighbours[node]
            fresh = grown & ~reached
            reached |= grown
        found.append(reached)
        left &= ~reached
    return found


def pieces(given: Problem, component: int, joined: int, cut: int = CUT) -> list[list[int]]:
    """The component's nodes in the given order, cut after each node whose narrow waist is at most `cut`.

    A node with waist 0 is a cut without loss: what must come before it is all that can. Neighbours that meet at
    another cut are left together while they have at most `joined` nodes.
    """
    nodes = list(members(component))
    waists = narrow_waist([given.above[n] for n in nodes], [given.below[n] for n in nodes])
    found: list[list[int]] = []
    current: list[int] = []
    lossless = True
    for node, waist in zip(nodes, waists):
        current.append(node)
        if waist > cut:
            continue
        _append(found, current, 0 if lossless else joined)
        current, lossless = [], waist == 0
    if current:
        _append(found, current, 0 if lossless else joined)
    return found


def _append(found: list[list[int]], piece: Sequence[int], joined: int) -> None:
    """Adds a piece, to the last one if both together have at most `joined` nodes."""
    if found and len(found[-1]) + len(piece) <= joined:
        found[-1] += piece
    else:
        found.append(list(piece))
