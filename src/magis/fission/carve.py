"""Makes room for a region: views that both sides of its border read get a copy outside, which costs nothing."""

from __future__ import annotations

from dataclasses import replace

from magis.fission.region import is_view
from magis.fission.tree import Fission
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, NodeId, Value


def carve(edit: GraphEdit, graph: Graph, fission: Fission) -> tuple[Fission, dict[NodeId, NodeId]]:
    """The region without views that are only needed outside; `edit` (of that graph) gives readers outside views of
    their own where the region needs them too: the second result has, for each such view, the one it repeats."""
    region, twins = _sides(graph, fission.region)
    copies: dict[NodeId, NodeId] = {}
    for node in graph.nodes_in_order():
        if node.id in twins:
            copies[node.id] = edit.copy(node.id, "outside")
            _take(edit, copies[node.id], copies)
    for node_id in [n for n in edit.node_ids() if n not in region and n not in copies.values()]:
        _take(edit, node_id, copies)
    for value in graph.outputs:
        if value.node in copies:
            edit.redirect_output(value, Value(copies[value.node], value.output))
    kept = replace(fission, region=region, cuts={n: fission.cuts[n] for n in sorted(region)})
    return kept, {copy: original for original, copy in copies.items()}


def _sides(graph: Graph, region: frozenset[NodeId]) -> tuple[frozenset[NodeId], set[NodeId]]:
    """The nodes that the region keeps, and those among them of which readers outside need a copy."""
    handed_back = {value.node for value in graph.outputs}
    outside: set[NodeId] = set()
    inside = set(region)
    for node in reversed(graph.nodes_in_order()):
        if node.id not in region or not is_view(node):
            continue
        users = graph.users[node.id]
        if node.id in handed_back or any(user not in inside or user in outside for user in users):
            outside.add(node.id)
        if not any(user in inside for user in users):
            inside.discard(node.id)
    return frozenset(inside), outside & inside


def _take(edit: GraphEdit, reader: NodeId, copies: dict[NodeId, NodeId]) -> None:
    for value in edit.node(reader).inputs:
        if value.node in copies:
            edit.redirect(reader, value, Value(copies[value.node], value.output))
