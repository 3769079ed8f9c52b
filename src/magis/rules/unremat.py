"""The inverse of re-materialisation: keep a result instead of computing it again (paper section 5.2, figure 8).

    before   v = f(x);  early reads v;  ...;  v' = f(x);  late reads v'
    after    v = f(x);  early reads v;  ...;  late reads v

Trades the bytes of v between its early and its late readers for the time of f.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar

from magis.errors import InvalidGraphError
from magis.fission.tree import Program
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, NodeId, Value
from magis.ir.structure import topological_order
from magis.rules.base import Change, Latency, Site, changed, remove_unread
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

    def apply(self, program: Program, site: Site) -> Change | None:
        """Merges the two. None when they are not there, or differ in what they compute."""
        graph = program.graph
        if len(site) != 2:
            return None
        kept, copy = NodeId(site[0]), NodeId(site[1])
        if kept == copy or kept not in graph.nodes or copy not in graph.nodes:
            return None
        numbers = value_numbers(graph)
        if numbers[kept] != numbers[copy] or graph.nodes[copy].is_input:
            return None
        edit = GraphEdit(graph)
        for output, spec in enumerate(graph.nodes[copy].outputs):
            if spec is not None:
                edit.redirect_all(Value(copy, output), Value(kept, output))
        remove_unread(edit, program, {copy})
        change = changed(program, edit)
        if copy in change.program.graph.nodes:
            return None  # the first draw of a random number stays
        try:
            topological_order(change.program.graph)
        except InvalidGraphError:
            return None
        return change


def value_numbers(graph: Graph) -> dict[NodeId, int]:
    """Equal numbers for nodes that compute equal results: the same call of equal inputs, the same random draw."""
    numbers: dict[NodeId, int] = {}
    known: dict[Hashable, int] = {}
    for node in graph.nodes_in_order():
        reads = tuple((numbers[value.node], value.output) for value in node.inputs)
        key: Hashable = (node.op, node.args, node.kwargs, reads, node.stream)
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
