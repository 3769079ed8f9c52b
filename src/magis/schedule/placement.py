"""Where added operators go in a given order, before anything is re-ordered."""

from __future__ import annotations

from collections.abc import Sequence

from magis.ir.graph import NodeId, Schedule
from magis.schedule.flat import Flat, topological


def placed(flat: Flat, order: Sequence[NodeId], added: Sequence[NodeId] = ()) -> Schedule:
    """All operators of a graph: `order` as it was, each of `added` right before its first reader, and a write that
    nobody waits for no earlier than right after the last operator that must come before it.

    So a copy that reads what is overwritten later delays the write, and is not pulled ahead of it."""
    nodes = flat.graph.nodes
    writes = {n for n in order if nodes[n].writes and not flat.after[n]}
    rest = topological(flat, [*(n for n in order if n not in writes), *added])
    if not writes:
        return rest
    position = {node: i for i, node in enumerate(rest)}
    slot = {node: (i, -1) for i, node in enumerate(rest)}
    beside = -1
    for place, node in enumerate(order):
        if node in writes:
            waits_for = max((position[n] for n in flat.before[node]), default=-1)
            slot[node] = (max(beside, waits_for), place)
        else:
            beside = position[node]
    return tuple(sorted(slot, key=slot.__getitem__))
