"""Regions seen from outside and from inside: as one operator each, and as a graph of their own (ADR 9).

So whatever schedules or rewrites a graph does so for a program with regions too: on the contracted graph, where a
region is one operator that needs some memory for itself; and on the body, a graph at the size of one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from magis.fission.parts import Part, Scope
from magis.fission.region import boundary
from magis.fission.tree import Fission
from magis.ir.args import Slot
from magis.ir.graph import Graph, Node, NodeId, Origin, TensorSpec, Value
from magis.ops.loop import Axis

REGION = "magis.region"
"""A region as one operator; its arguments are the bytes that it needs beyond its inputs and results, and seconds."""
SLICE = "magis.slice"
"""A copy of a slice that a part reads."""
HAND_OUT = "magis.hand_out"
"""Takes a part's result out of the body, as soon as it is there."""


@dataclass(frozen=True, slots=True)
class RegionCost:
    """What a region takes: bytes beyond its inputs and whole results, at the worst moment of its largest part, and
    seconds for all parts."""

    transient_bytes: int
    latency_s: float


def contracted(graph: Graph, regions: Sequence[tuple[Fission, RegionCost]]) -> Graph:
    """The graph with each region as one operator that has the least id of its nodes."""
    nodes = dict(graph.nodes)
    moved: dict[Value, Value] = {}
    for fission, cost in regions:
        border = boundary(graph, fission.region)
        region_id = min(fission.region)
        for node_id in fission.region:
            del nodes[node_id]
        moved.update((value, Value(region_id, i)) for i, value in enumerate(border.outputs))
        args = (cost.transient_bytes, cost.latency_s)
        outputs = tuple(allocated(graph.spec(value)) for value in border.outputs)
        label = Origin(module=fission.dimension, direction=_direction(graph, fission))
        nodes[region_id] = Node(region_id, REGION, border.inputs, outputs, args, origin=label)
    for node_id, node in nodes.items():
        if any(value in moved for value in node.inputs):
            nodes[node_id] = replace(node, inputs=tuple(moved.get(value, value) for value in node.inputs))
    outputs_now = tuple(moved.get(value, value) for value in graph.outputs)
    return replace(graph, nodes=dict(sorted(nodes.items())), outputs=outputs_now)


def allocated(spec: TensorSpec) -> TensorSpec:
    """The type of a whole result of a region."""
    return replace(spec, storage_bytes=spec.nbytes, alias_of=None, writes=False, offset=0)


def _direction(graph: Graph, fission: Fission) -> str:
    directions = {graph.nodes[node].origin.direction for node in fission.region}
    return directions.pop() if len(directions) == 1 else "backward"


def expanded(order: Iterable[NodeId], regions: Mapping[NodeId, Sequence[NodeId]]) -> tuple[NodeId, ...]:
    """An order of the contracted graph as one of the graph itself, each region's nodes in their own order."""
    return tuple(node for unit in order for node in regions.get(unit, (unit,)))


def body(scope: Scope, fission: Fission, part: Part, children: Sequence[tuple[Fission, RegionCost]]) -> Graph:
    """One part as a graph: slices and shared tensors come in and occupy nothing; results leave as soon as they are
    there. Nodes keep their ids; the regions inside are contracted."""
    graph = scope.graph
    fresh = count(max(graph.nodes) + 1)
    nodes: dict[NodeId, Node] = {}
    given: dict[tuple[Value, Axis | None], Value] = {}
    for node_id in sorted(fission.region):
        node, call, loop = graph.nodes[node_id], part.calls[node_id], part.loops[node_id]
        inputs = []
        for value, axis, spec in zip(node.inputs, loop.inputs, call.inputs):
            if value.node in fission.region:
                inputs.append(value)
                continue
            key = (value, axis)
            if key not in given:
                piece = None if axis is None else part.slices[value, axis]
                given[key] = _taken(nodes, fresh, spec, piece)
            inputs.append(given[key])
        nodes[node_id] = Node(node_id, call.op, tuple(inputs), call.outputs, call.args, call.kwargs, origin=node.origin)
    outputs = boundary(graph, fission.region).outputs
    for value in outputs:
        made = NodeId(next(fresh))
        nodes[made] = Node(made, HAND_OUT, (value,), (), (Slot(0),))
    found = Graph(dict(sorted(nodes.items())), (), (), graph.name)
    return contracted(found, children) if children else found


def _taken(nodes: dict[NodeId, Node], fresh: Iterator[int], spec: TensorSpec, piece: TensorSpec | None) -> Value:
    made = NodeId(next(fresh))
    shared = replace(spec, storage_bytes=0, alias_of=None, writes=False)
    nodes[made] = Node(made, "input", (), (shared,), ("constant", f"from outside {made}"))
    if piece is None or not piece.storage_bytes:
        return Value(made)
    copy = NodeId(next(fresh))
    nodes[copy] = Node(copy, SLICE, (Value(made),), (piece,), (Slot(0),))
    return Value(copy)
