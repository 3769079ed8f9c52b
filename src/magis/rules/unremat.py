"""The inverse of re-materialisation: keep a result instead of computing it again (paper section 5.2, figure 8).

    before   v = f(x);  early reads v;  ...;  v' = f(x);  late reads v'
    after    v = f(x);  early reads v;  ...;  late reads v

Trades the bytes of v between its early and its late readers for the time of f.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.rules.base import Change, Latency, Site, changed, remove_unread, same_home
from magis.schedule.incremental import Scheduled


class Unrematerialise:
    """Site: the node to keep, and the copy of it whose readers take its results from then on. What only the copy
    read is removed with it."""

    name: ClassVar[str] = "keep"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """Pairs of an earlier and a later node with equal results, most seconds saved for a byte first."""
        graph, position = state.flat.graph, state.position
        ranked = []
        for same in _equals(graph):
            first, *later = sorted(same, key=lambda n: position[n])
            for copy in later:
                nbytes = sum(spec.storage_bytes for spec in graph.nodes[copy].outputs if spec is not None)
                ranked.append((-latency_s(copy) / (nbytes + 1), (int(first), int(copy))))
        yield from (found for seconds, found in sorted(ranked) if seconds)

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Merges the two. None when they are not there, differ in what they compute, or when the copy is handed back:
        the caller gets as many tensors as before, each with its own storage."""
        graph = program.graph
        if len(site) != 2:
            return None
        kept, copy = NodeId(site[0]), NodeId(site[1])
        if kept == copy or kept not in graph.nodes or copy not in graph.nodes:
            return None
        if graph.nodes[copy].is_input or not _equal(graph, kept, copy):
            return None
        if _handed_back(graph, kept, copy) or not same_home(program, (kept, copy)):
            return None
        edit = GraphEdit(graph)
        for output, spec in enumerate(graph.nodes[copy].outputs):
            if spec is not None:
                edit.redirect_all(Value(copy, output), Value(kept, output))
        remove_unread(edit, program, {copy})
        if copy in edit.node_ids():
            return None  # the first draw of a random number stays
        return changed(program, edit)


def _handed_back(graph: Graph, kept: NodeId, copy: NodeId) -> bool:
    """Whether the caller gets the copy, or tensors in two storages of which a merge would make one."""
    if any(value.node == copy for value in graph.outputs):
        return True
    returned = {graph.root(value) for value in graph.outputs}
    outputs = [i for i, spec in enumerate(graph.nodes[copy].outputs) if spec is not None]
    storages = [{graph.root(Value(node, i)) for node in (kept, copy)} for i in outputs]
    return any(len(both) > 1 and both <= returned for both in storages)


def _equal(graph: Graph, first: NodeId, second: NodeId) -> bool:
    """Whether two nodes compute equal results: the same call, the same draw, of the same or of equal inputs."""
    todo, seen = [(first, second)], set()
    while todo:
        pair = todo.pop()
        if pair in seen or pair[0] == pair[1]:
            continue
        seen.add(pair)
        one, other = graph.nodes[pair[0]], graph.nodes[pair[1]]
        if one.is_input or one.writes or _essence(one) != _essence(other):
            return False
        todo += [(a.node, b.node) for a, b in zip(one.inputs, other.inputs)]
    return True


def _essence(node: Node) -> Hashable:
    """All of a node but the numbers of its inputs."""
    return node.op, node.args, node.kwargs, node.outputs, node.stream, tuple(value.output for value in node.inputs)


def value_numbers(graph: Graph) -> dict[NodeId, int]:
    """Equal numbers for nodes that compute equal results: the same call of equal inputs, the same random draw."""
    numbers: dict[NodeId, int] = {}
    known: dict[Hashable, int] = {}
    for node in graph.nodes_in_order():
        reads = tuple((numbers[value.node], value.output) for value in node.inputs)
        key: Hashable = (node.op, node.args, node.kwargs, node.outputs, reads, node.stream)
        if node.is_input or node.writes:
            key = node.id
        numbers[node.id] = known.setdefault(key, len(known))
    return numbers


def _equals(graph: Graph) -> list[list[NodeId]]:
    """Nodes with equal results, where there are several."""
    found: dict[int, list[NodeId]] = {}
    for node_id, number in value_numbers(graph).items():
        found.setdefault(number, []).append(node_id)
    return [same for same in found.values() if len(same) > 1]
