"""Order in a graph: data dependencies, and those that in-place writes and random draws add."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence

from magis.errors import InvalidGraphError
from magis.ir.graph import Graph, NodeId, Schedule, Value


def predecessors(graph: Graph) -> Mapping[NodeId, tuple[NodeId, ...]]:
    """For each node, all that must run before it, ascending: producers of its inputs; for a write, the
    readers of what it overwrites; for the first draw of a random number, the draw before it."""
    before: dict[NodeId, set[NodeId]] = {
        node.id: {value.node for value in node.inputs} for node in graph.nodes.values()
    }
    for writer, readers in readers_before_write(graph).items():
        before[writer].update(readers)
    for earlier, later in _draw_order(graph):
        before[later].add(earlier)
    return {node_id: tuple(sorted(ids)) for node_id, ids in before.items()}


def readers_before_write(graph: Graph) -> Mapping[NodeId, tuple[NodeId, ...]]:
    """For each node that writes in place, the nodes that read the version it overwrites."""
    versions: dict[tuple[Value, int], NodeId] = {}
    for node in graph.nodes.values():
        for index in node.written():
            overwritten = node.inputs[index]
            versions[graph.root(overwritten), graph.version(overwritten)] = node.id
    found: dict[NodeId, set[NodeId]] = {writer: set() for writer in versions.values()}
    if not versions:
        return {}
    for node in graph.nodes.values():
        for value in node.inputs:
            writer = versions.get((graph.root(value), graph.version(value)))
            if writer is not None and writer != node.id:
                found[writer].add(node.id)
    return {writer: tuple(sorted(readers)) for writer, readers in found.items()}


def _draw_order(graph: Graph) -> Iterable[tuple[NodeId, NodeId]]:
    """Pairs (earlier, later): the first node of each draw, in the generator's order.

    Copies of a draw restore the generator state that the first one recorded, so they follow it."""
    draws: dict[int, list[NodeId]] = {}
    for node in graph.nodes.values():
        if node.stream is not None:
            draws.setdefault(node.stream, []).append(node.id)
    first = [min(draws[stream]) for stream in sorted(draws)]
    yield from itertools.pairwise(first)
    for nodes in draws.values():
        for copy in nodes:
            if copy != min(nodes):
                yield min(nodes), copy


def topological_order(graph: Graph, prefer: Mapping[NodeId, float] | None = None) -> Schedule:
    """A valid order; among ready nodes the least `prefer`, then the least id, runs first.

    Raises InvalidGraphError("acyclic") when there is none."""
    before = predecessors(graph)
    missing = {node_id: len(ids) for node_id, ids in before.items()}
    after: dict[NodeId, list[NodeId]] = {node_id: [] for node_id in graph.nodes}
    for node_id, ids in before.items():
        for earlier in ids:
            after[earlier].append(node_id)
    rank = prefer or {}
    ready = [(rank.get(n, n), n) for n, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order: list[NodeId] = []
    while ready:
        _, node_id = heapq.heappop(ready)
        order.append(node_id)
        for later in after[node_id]:
            missing[later] -= 1
            if missing[later] == 0:
                heapq.heappush(ready, (rank.get(later, later), later))
    if len(order) != len(graph.nodes):
        stuck = min(n for n, count in missing.items() if count > 0)
        raise InvalidGraphError("acyclic", f"%{stuck} waits for itself through data, writes or random draws")
    return tuple(order)


def order_violation(graph: Graph, schedule: Sequence[NodeId]) -> str | None:
    """Why `schedule` is no valid order of the graph; None when it is one."""
    position = {node_id: i for i, node_id in enumerate(schedule)}
    if len(position) != len(schedule):
        return "a node is scheduled twice"
    if position.keys() != graph.nodes.keys():
        odd = min(position.keys() ^ graph.nodes.keys())
        return f"%{odd} is in the graph or in the order, not in both"
    for node_id, ids in predecessors(graph).items():
        for earlier in ids:
            if position[earlier] > position[node_id]:
                return f"%{node_id} runs before %{earlier}, which it must follow"
    return None
