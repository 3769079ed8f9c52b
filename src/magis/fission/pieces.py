"""The regions that a dimension gives: of its component, the convex and connected pieces (paper section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from magis.fission.dim_graph import DimGraph, Vertex
from magis.fission.region import between, connected, is_view
from magis.fission.tree import Cut, Fission
from magis.ir.graph import NodeId, Value
from magis.ir.structure import predecessors
from magis.ops.loop import Axis, Concat, Loop, Same

HOISTED = 0.05
"""Most bytes, as a share of a region's, that are computed whole before it so that it need not break."""


class Pieces:
    """Regions of one graph."""

    def __init__(self, dims: DimGraph) -> None:
        self.dims = dims
        self.graph = dims.graph
        self.before = predecessors(dims.graph)
        self.order = [node.id for node in dims.graph.nodes_in_order()]

    def of(
        self, vertices: Iterable[Vertex], within: Iterable[NodeId] | None = None, dimension: str = ""
    ) -> list[Fission]:
        """The convex, connected regions that the vertices of one dimension give, largest first. Nodes outside lie
        between them, never on a path from one to itself.

        Left out are: a node with two loops among the vertices; what a partial or whole result is needed of inside, if
        it is small (it then runs whole before the region: counts of labels, masks), else who reads it; and views that
        nobody inside reads."""
        allowed = None if within is None else set(within)
        cuts = {n: cut for n, cut in self._cuts(vertices).items() if allowed is None or n in allowed}
        found = []
        for nodes in self._levels(self._unbroken(self._consistent(cuts))):
            for piece in connected(self.graph, nodes):
                for region in connected(self.graph, self._without_last_views(piece)):
                    own = {node: cuts[node] for node in sorted(region)}
                    length = max(cut.length for cut in own.values())
                    halo = any(self._has_window(node, cut) for node, cut in own.items())
                    found.append(Fission(region, own, length, dimension=dimension, halo=halo))
        return sorted(found, key=lambda f: (-len(f.region), min(f.region)))

    def _has_window(self, node: NodeId, cut: Cut) -> bool:
        return cut.of(self.graph.call(self.graph.nodes[node])).window is not None

    def _cuts(self, vertices: Iterable[Vertex]) -> dict[NodeId, Cut]:
        found: dict[NodeId, Cut] = {}
        twice = set()
        for vertex in vertices:
            if self.graph.nodes[vertex.node].is_input:
                continue
            if vertex.node in found:
                twice.add(vertex.node)
            found[vertex.node] = self.dims.loop(vertex).cut
        return {node: cut for node, cut in found.items() if node not in twice}

    def _consistent(self, cuts: Mapping[NodeId, Cut]) -> set[NodeId]:
        """Nodes whose every edge among them is along the dimension."""
        loops = {n: cuts[n].of(self.graph.call(self.graph.nodes[n])) for n in self.order if n in cuts}
        kept = set(loops)
        total = self._bytes(kept)
        for node_id in loops:
            if node_id not in kept:
                continue
            for value, axis in zip(self.graph.nodes[node_id].inputs, loops[node_id].inputs):
                if value.node not in kept or _fits(loops[value.node], value, axis):
                    continue
                cone = self._cone({value.node}, kept)
                if self._bytes(cone) <= HOISTED * total:
                    kept -= cone
                else:
                    kept.discard(node_id)
                    break
        return kept

    def _unbroken(self, kept: set[NodeId]) -> set[NodeId]:
        """Without what leads to nodes outside that lead back, if that is small."""
        crossing = between(self.before, frozenset(kept))
        if not crossing:
            return kept
        cone = self._cone(crossing, kept)
        return kept - cone if self._bytes(cone) <= HOISTED * self._bytes(kept) else kept

    def _cone(self, nodes: Iterable[NodeId], among: set[NodeId]) -> set[NodeId]:
        """Those of `among` that are, or lead to, some nodes."""
        seen = set(nodes)
        todo = list(seen)
        while todo:
            for other in self.before[todo.pop()]:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen & among

    def _bytes(self, nodes: Iterable[NodeId]) -> int:
        specs = (spec for node in nodes for spec in self.graph.nodes[node].outputs)
        return sum(spec.storage_bytes for spec in specs if spec is not None)

    def _levels(self, kept: set[NodeId]) -> Sequence[set[NodeId]]:
        """The nodes by how often a path has left them and come back: each level is convex."""
        level: dict[NodeId, int] = {}
        found: dict[int, set[NodeId]] = {}
        for node in self.order:
            earlier = [other for other in self.before[node] if other in level]
            if node in kept:
                level[node] = max((level[other] + (other not in kept) for other in earlier), default=0)
                found.setdefault(level[node], set()).add(node)
            elif earlier:
                level[node] = max(level[other] for other in earlier)
        return [found[key] for key in sorted(found)]

    def _without_last_views(self, region: frozenset[NodeId]) -> set[NodeId]:
        """Without views that nobody in the region reads: they cost nothing outside."""
        found = set(region)
        for node_id in reversed(self.order):
            if node_id not in found or not is_view(self.graph.nodes[node_id]):
                continue
            if not any(user in found for user in self.graph.users[node_id]):
                found.discard(node_id)
        return found


def _fits(made: Loop, value: Value, axis: Axis | None) -> bool:
    role = made.roles[value.output]
    return (isinstance(role, Concat) and role.axis == axis) or (isinstance(role, Same) and axis is None)
