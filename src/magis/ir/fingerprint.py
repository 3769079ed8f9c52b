"""Structural hashes: a local one that an edit updates locally, and a full digest to confirm and to bind plans.

The local fingerprint of a node sees its call, its producers' calls in argument order, and who reads it:
so it knows which user reads which of two equal copies. A graph's fingerprint is the sum of its nodes'.
Numbers of nodes and origins do not enter.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from magis.ir.graph import Graph, Node, NodeId
from magis.ir.text import print_graph, print_spec

_MASK = (1 << 64) - 1


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _label(node: Node) -> int:
    types = ",".join(print_spec(spec) for spec in node.outputs)
    return _hash(f"{node.op}|{node.args!r}|{node.kwargs!r}|{types}|{node.stream}")


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of a graph's nodes at three depths; `nodes` is the sum of the last, `total` adds the outputs."""

    labels: Mapping[NodeId, int]
    with_producers: Mapping[NodeId, int]
    with_users: Mapping[NodeId, int]
    nodes: int
    total: int


def fingerprint(graph: Graph) -> Fingerprint:
    """The fingerprint from scratch."""
    empty = replace(graph, nodes={}, outputs=(), output_names=())
    return update_fingerprint(Fingerprint({}, {}, {}, 0, 0), empty, graph, (), graph.nodes)


def update_fingerprint(
    before: Fingerprint, old: Graph, new: Graph, old_nodes: Iterable[NodeId], new_nodes: Iterable[NodeId]
) -> Fingerprint:
    """The fingerprint of `new`, from that of `old` and the two sets that the edit recorded.

    Equal to `fingerprint(new)`, but hashes only the touched nodes and their neighbours."""
    labels, ups, downs = dict(before.labels), dict(before.with_producers), dict(before.with_users)
    nodes = before.nodes
    touched = set(old_nodes)
    for gone in touched - new.nodes.keys():
        nodes -= downs.pop(gone)
        del labels[gone], ups[gone]
    fresh = set(new_nodes) & new.nodes.keys()
    for node_id in fresh:
        labels[node_id] = _label(new.nodes[node_id])
    stale_ups = fresh | {user for n in fresh for user in new.users[n]}
    for node_id in stale_ups:
        ups[node_id] = _with_producers(new.nodes[node_id], labels)
    lost_readers = {v.node for n in touched & old.nodes.keys() for v in old.nodes[n].inputs}
    stale_downs = stale_ups | {v.node for n in stale_ups for v in new.nodes[n].inputs}
    for node_id in stale_downs | (lost_readers & new.nodes.keys()):
        nodes -= downs.get(node_id, 0)
        downs[node_id] = _with_users(new, node_id, ups)
        nodes += downs[node_id]
    results = "|".join(f"{name}:{ups[v.node]}.{v.output}" for name, v in zip(new.output_names, new.outputs))
    return Fingerprint(labels, ups, downs, nodes & _MASK, (nodes + _hash(results)) & _MASK)


def _with_producers(node: Node, labels: Mapping[NodeId, int]) -> int:
    reads = ",".join(f"{labels[value.node]}.{value.output}" for value in node.inputs)
    return _hash(f"{labels[node.id]}({reads})")


def _with_users(graph: Graph, node_id: NodeId, ups: Mapping[NodeId, int]) -> int:
    reads = sorted(
        (ups[user], place, value.output)
        for user in graph.users[node_id]
        for place, value in enumerate(graph.nodes[user].inputs)
        if value.node == node_id
    )
    return _hash(f"{ups[node_id]}<{reads}")


def digest(graph: Graph) -> str:
    """A cryptographic digest of the whole program, however its nodes are numbered (32 hex digits). Origins stay out."""
    number = {node_id: NodeId(i) for i, node_id in enumerate(_canonical_order(graph))}
    text = print_graph(renumber(graph, number), origins=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _canonical_order(graph: Graph) -> Iterator[NodeId]:
    """Nodes after their producers, in an order that their calls, all that they depend on and all that depends on
    them decide; equals among them follow their producers."""
    nodes = graph.nodes_in_order()
    ups: dict[NodeId, int] = {}
    for node in nodes:
        reads = ",".join(f"{ups[value.node]}.{value.output}" for value in node.inputs)
        ups[node.id] = _hash(f"{_label(node)}({reads})")
    uses: dict[NodeId, list[tuple[int, int, int]]] = {node.id: [] for node in nodes}
    for place, value in enumerate(graph.outputs):
        uses[value.node].append((0, place, value.output))
    downs: dict[NodeId, int] = {}
    for node in reversed(nodes):
        downs[node.id] = _hash(f"{ups[node.id]}<{sorted(uses[node.id])}")
        for place, value in enumerate(node.inputs):
            uses[value.node].append((downs[node.id], place, value.output))
    missing = {node.id: len({value.node for value in node.inputs}) for node in nodes}
    ready: list[tuple[int, tuple[tuple[int, int], ...], NodeId]] = []
    ready += [(downs[n], (), n) for n, count in missing.items() if not count]
    heapq.heapify(ready)
    number: dict[NodeId, int] = {}
    while ready:
        _, _, node_id = heapq.heappop(ready)
        number[node_id] = len(number)
        yield node_id
        for user in graph.users[node_id]:
            missing[user] -= 1
            if not missing[user]:
                places = tuple((number[v.node], v.output) for v in graph.nodes[user].inputs)
                heapq.heappush(ready, (downs[user], places, user))


def renumber(graph: Graph, number: Mapping[NodeId, NodeId]) -> Graph:
    """The same graph with other node ids."""

    def moved(node: Node) -> Node:
        inputs = tuple(replace(value, node=number[value.node]) for value in node.inputs)
        return replace(node, id=number[node.id], inputs=inputs)

    nodes = {number[node.id]: moved(node) for node in graph.nodes.values()}
    outputs = tuple(replace(value, node=number[value.node]) for value in graph.outputs)
    return replace(graph, nodes=dict(sorted(nodes.items())), outputs=outputs)
