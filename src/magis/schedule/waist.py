"""Narrow waists: how many operators are independent of one (paper section 5.1). Sets are bits of integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def ancestors(predecessors: Sequence[Iterable[int]]) -> list[int]:
    """For each node of a topologically numbered graph, the set of its ancestors: bit i stands for node i."""
    above: list[int] = []
    for earlier in predecessors:
        found = 0
        for node in earlier:
            found |= above[node] | 1 << node
        above.append(found)
    return above


def descendants(predecessors: Sequence[Iterable[int]]) -> list[int]:
    """For each node of a topologically numbered graph, the set of its descendants."""
    below = [0] * len(predecessors)
    for node in range(len(predecessors) - 1, -1, -1):
        found = below[node] | 1 << node
        for earlier in predecessors[node]:
            below[earlier] |= found
    return below


def narrow_waist(above: Sequence[int], below: Sequence[int]) -> list[int]:
    """nw(v) = |V| - |anc(v)| - |des(v)| - 1, from the sets of ancestors and descendants."""
    size = len(above)
    return [size - up.bit_count() - down.bit_count() - 1 for up, down in zip(above, below)]
