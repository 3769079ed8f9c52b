"""What no order can do without: a lower bound of a piece's peak."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from magis.schedule.problem import Problem, members


def lower_bound(given: Problem, piece: Sequence[int], done: int) -> int:
    """Bytes over what is live before that no order can do without: the most, over all nodes, of what must be
    live while the node runs."""
    inside = 0
    for node in piece:
        inside |= 1 << node
    base, sets, weights = 0, [], []
    for maker, users, nbytes, ends in given.storages:
        here = users & inside
        if not here:
            continue
        made_here = maker >= 0 and inside >> maker & 1
        needed = (given.below[maker] | 1 << maker) & inside if made_here else inside
        if ends and not users & ~(done | inside):
            last = 0
            for node in members(here):
                last |= given.above[node] | 1 << node
            needed &= last
        elif not made_here:
            continue
        base -= 0 if made_here else nbytes
        sets.append(needed)
        weights.append(nbytes)
    needed_bytes = _sums(sets, weights, len(given.nodes))
    return base + max(int(needed_bytes[node]) + given.extra[node] for node in piece)


def _sums(sets: Sequence[int], weights: Sequence[int], size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """For each of `size` nodes, the summed weights of the sets that hold it (exact below 2^53)."""
    width = size // 8 + 1
    total = np.zeros(width * 8)
    for start in range(0, len(sets), 256):
        rows = b"".join(nodes.to_bytes(width, "little") for nodes in sets[start : start + 256])
        packed = np.frombuffer(rows, np.uint8).reshape(-1, width)
        total += np.asarray(weights[start : start + 256], np.float64) @ np.unpackbits(packed, 1, bitorder="little")
    return total
