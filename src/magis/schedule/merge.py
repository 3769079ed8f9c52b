"""Independent sequences merged into one of least peak.

Each sequence is cut into *humps*: stretches that are best run without a pause. Humps that leave less live than they
found go first, the lowest peak first; then those that leave more, the one that drops most from its peak first. For
sequences that share no storage no merge of them has a smaller peak (Abdel-Wahab and Kameda 1978; Liu 1987 for trees).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hump:
    """Nodes that run in one go: most bytes meanwhile and bytes afterwards, both over what was live before."""

    nodes: tuple[int, ...]
    peak: int
    left: int

    @property
    def key(self) -> tuple[int, int]:
        """Humps run by ascending key."""
        return (0, self.peak) if self.left <= 0 else (1, self.left - self.peak)

    def then(self, following: Hump) -> Hump:
        """Both as one."""
        peak = max(self.peak, self.left + following.peak)
        return Hump(self.nodes + following.nodes, peak, self.left + following.left)


def humps(order: Sequence[int], steps: Iterable[tuple[int, int]]) -> list[Hump]:
    """A sequence cut into humps of ascending key; `steps` has each node's bytes while and after it runs."""
    found: list[Hump] = []
    live = 0
    for node, (during, after) in zip(order, steps):
        hump = Hump((node,), during - live, after - live)
        live = after
        while found and found[-1].key >= hump.key:
            hump = found.pop().then(hump)
        found.append(hump)
    return found


def merged(sequences: Sequence[list[Hump]]) -> list[int]:
    """All nodes, each sequence in its order; between equals, the earlier sequence goes first."""
    queue = [(sequence[0].key, number, 0) for number, sequence in enumerate(sequences) if sequence]
    heapq.heapify(queue)
    order: list[int] = []
    while queue:
        _, number, place = heapq.heappop(queue)
        order += sequences[number][place].nodes
        if place + 1 < len(sequences[number]):
            heapq.heappush(queue, (sequences[number][place + 1].key, number, place + 1))
    return order
