"""Where added operators go in a given order, before anything is re-ordered."""

from __future__ import annotations

from collections.abc import Sequence, Set

from magis.ir.graph import NodeId, Schedule
from magis.schedule.flat import Flat, topological


def placed(flat: Flat, order: Sequence[NodeId], added: Sequence[NodeId] = ()) -> Schedule:
    """All operators of a graph: `order` as it was, each of `added` right before its first reader, and a write that
    must wait for one of them right after that.

    So a copy that reads what is overwritten later delays the write, and is not pulled ahead of it."""
    new = set(added)
    waiting = {n for n in order if waits(flat, n, new)}
    rest = topological(flat, [*(n for n in order if n not in waiting), *added])
    if not waiting:
        return rest
    position = {node: i for i, node in enumerate(rest)}
    slot = {node: (i, -1) for i, node in enumerate(rest)}
    beside = -1
    for place, node in enumerate(order):
        if node in waiting:
            slot[node] = (max(beside, *(position[n] for n in flat.before[node])), place)
        else:
            beside = position[node]
    return tuple(sorted(slot, key=slot.__getitem__))


def waits(flat: Flat, node: NodeId, added: Set[NodeId]) -> bool:
    """Whether it is a write that has to wait for an added operator to read what it overwrites, and for which nobody
    waits in turn."""
    found = flat.graph.nodes[node]
    return (
        found.writes
        and not flat.after[node]
        and any(n in added for n in flat.before[node])
        and not any(value.node in added for value in found.inputs)
    )
