"""Regions whose dimension is read through windows: parts overlap by a halo (ADR 9, beyond the paper).

Each part of a convolution along the height reads some rows more than it gives. So, from the region's results backwards,
every operator of a part computes the hull of the rows that its readers in that part need; what lies between two parts
is computed twice. Results are handed out without overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magis.fission.parts import CannotSplitError
from magis.fission.region import boundary
from magis.fission.tree import Fission
from magis.ir.graph import Graph, NodeId, Value
from magis.ops.loop import Concat, Loop, Reduce


@dataclass(frozen=True)
class Rows:
    """One part: for each node the positions of its axis that it computes, and for each result of the region those that
    it hands out. Of a node that reduces the axis: those that it reads."""

    computed: Mapping[NodeId, range]
    shares: Mapping[Value, range]


def rows_of_parts(graph: Graph, fission: Fission, loops: Mapping[NodeId, Loop]) -> list[Rows]:
    """The positions of every part. Raises CannotSplitError for more parts than positions, or for a region inside."""
    if fission.children:
        raise CannotSplitError("a region with a halo cannot hold other regions")
    outputs = boundary(graph, fission.region).outputs
    parts = min(fission.parts, fission.length, *(loops[value.node].length for value in outputs))
    return [_rows(graph, fission, loops, outputs, part, parts) for part in range(parts)]


def _rows(
    graph: Graph,
    fission: Fission,
    loops: Mapping[NodeId, Loop],
    outputs: tuple[Value, ...],
    part: int,
    parts: int,
) -> Rows:
    wanted: dict[NodeId, range] = {}
    shares: dict[Value, range] = {}
    for value in outputs:
        loop = loops[value.node]
        role = loop.roles[value.output]
        if not isinstance(role, (Concat, Reduce)):
            raise CannotSplitError(f"%{value.node} gives a result that parts with a halo cannot hand out")
        share = range(loop.length * part // parts, loop.length * (part + 1) // parts)
        shares[value] = share
        wanted[value.node] = _hull(wanted.get(value.node), share)
    computed: dict[NodeId, range] = {}
    for node in reversed(graph.nodes_in_order()):
        if node.id not in fission.region:
            continue
        if node.id not in wanted:
            raise CannotSplitError(f"nobody needs %{node.id} ({node.op})")
        rows = computed[node.id] = wanted[node.id]
        loop = loops[node.id]
        for value, axis in zip(node.inputs, loop.inputs):
            if axis is not None and not read(loop, rows):
                raise CannotSplitError(f"a part of %{node.id} ({node.op}) would read nothing but padding")
            if axis is not None and value.node in fission.region:
                wanted[value.node] = _hull(wanted.get(value.node), read(loop, rows))
    return Rows(computed, shares)


def read(loop: Loop, rows: range) -> range:
    """The positions of a sliced input that some positions of the result need, within the input."""
    if loop.window is None:
        return rows
    length = next(axis.length for axis in loop.inputs if axis is not None)
    start, stop = loop.window.reads(rows.start, rows.stop)
    return range(max(start, 0), min(stop, length))


def _hull(one: range | None, other: range) -> range:
    return other if one is None else range(min(one.start, other.start), max(one.stop, other.stop))
