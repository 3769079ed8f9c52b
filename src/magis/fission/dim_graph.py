"""D-Graph: along which loops of which operators one dimension runs through the graph (paper section 4.1; ADR 9).

The paper's vertex <v, i> is here a loop of an operator: its number i says which axes of inputs and outputs belong
together. Reshapes merge and divide dimensions, so loops run over *factors* of dimensions, the common refinement of
all shapes a tensor is seen in: `[B,T,H*h]` is B, T, H and h.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import NamedTuple

from magis.fission.tree import Cut
from magis.ir.graph import Call, Graph, NodeId, Value
from magis.ops.loop import Axis, Concat, Loop
from magis.ops.registry import rule_for


class Vertex(NamedTuple):
    """<v, i>: loop number `index` of those that `DimGraph.loops` has for a node."""

    node: NodeId
    number: int


@dataclass(frozen=True, slots=True)
class Refined:
    """A loop of a node over one factor, and how it follows from the rule's."""

    cut: Cut
    loop: Loop


@dataclass(frozen=True)
class DimGraph:
    """Loops of every node (of a graph input: one for each factor of its dimensions), and which of them are the same
    loop: `edges[w]` are the vertices u of producers whose concatenated axis w's input is sliced along."""

    graph: Graph
    loops: Mapping[NodeId, Sequence[Refined]]
    edges: Mapping[Vertex, Sequence[Vertex]]

    @property
    def vertices(self) -> Iterator[Vertex]:
        """All vertices, by node."""
        return (Vertex(node, index) for node, found in self.loops.items() for index in range(len(found)))

    def loop(self, vertex: Vertex) -> Refined:
        """The loop of a vertex."""
        return self.loops[vertex.node][vertex.number]

    @cached_property
    def readers(self) -> Mapping[Vertex, Sequence[Vertex]]:
        """For each vertex, those that read along it."""
        found: dict[Vertex, list[Vertex]] = {}
        for reader, producers in self.edges.items():
            for producer in producers:
                found.setdefault(producer, []).append(reader)
        return found

    @cached_property
    def components(self) -> tuple[tuple[Vertex, ...], ...]:
        """The connected components: graph-level dimensions. Largest first."""
        parent: dict[Vertex, Vertex] = {}
        for reader, producers in self.edges.items():
            for producer in producers:
                a, b = _find(parent, reader), _find(parent, producer)
                if a != b:
                    parent[max(a, b)] = min(a, b)
        found: dict[Vertex, list[Vertex]] = {}
        for vertex in self.vertices:
            found.setdefault(_find(parent, vertex), []).append(vertex)
        return tuple(tuple(c) for c in sorted(found.values(), key=lambda c: (-len(c), c)))

    @cached_property
    def strict_components(self) -> tuple[tuple[Vertex, ...], ...]:
        """Components in which each node occurs once: from outputs to inputs, a vertex joins the components of all
        that read along it only if no node of one of them is in, above or below another; else it starts its own (the
        rule of the published implementation, which keeps query rows and key columns apart)."""
        return _Strict(self).components()

    def strict_component(self, vertex: Vertex) -> tuple[Vertex, ...]:
        """The strict component of a vertex; empty when there is no such vertex."""
        return self._strict_of.get(vertex, ())

    @cached_property
    def _strict_of(self) -> Mapping[Vertex, tuple[Vertex, ...]]:
        return {vertex: component for component in self.strict_components for vertex in component}


def _find(parent: dict[Vertex, Vertex], vertex: Vertex) -> Vertex:
    root = vertex
    while root in parent:
        root = parent[root]
    while vertex in parent and parent[vertex] != root:
        parent[vertex], vertex = root, parent[vertex]
    return root


@dataclass
class _Group:
    """A component that grows: its vertices; its nodes, and those above or below any of them, as sets of bits."""

    vertices: list[Vertex]
    nodes: int
    related: int


class _Strict:
    def __init__(self, dims: DimGraph) -> None:
        self.dims = dims
        order = dims.graph.nodes_in_order()
        self.order = [node.id for node in order]
        self.place = {node.id: i for i, node in enumerate(order)}
        above, below = [0] * len(order), [0] * len(order)
        for i, node in enumerate(order):
            for value in node.inputs:
                j = self.place[value.node]
                above[i] |= above[j] | 1 << j
        for i in range(len(order) - 1, -1, -1):
            for value in order[i].inputs:
                below[self.place[value.node]] |= below[i] | 1 << i
        self.related = [a | b for a, b in zip(above, below)]
        self.group: dict[Vertex, _Group] = {}

    def components(self) -> tuple[tuple[Vertex, ...], ...]:
        for node in reversed(self.order):
            for index in range(len(self.dims.loops[node])):
                self._place(Vertex(node, index))
        groups = {id(group): group for group in self.group.values()}
        found = [tuple(sorted(group.vertices)) for group in groups.values()]
        return tuple(sorted(found, key=lambda c: (-len(c), c)))

    def _place(self, vertex: Vertex) -> None:
        place = self.place[vertex.node]
        bit = 1 << place
        groups = list({id(g): g for r in self.dims.readers.get(vertex, ()) for g in (self.group[r],)}.values())
        if groups and not any(g.nodes & bit for g in groups) and self._apart(groups):
            first, *others = groups
            for other in others:
                first.vertices += other.vertices
                first.nodes |= other.nodes
                first.related |= other.related
                for moved in other.vertices:
                    self.group[moved] = first
        else:
            first = _Group([], 0, 0)
        first.vertices.append(vertex)
        first.nodes |= bit
        first.related |= self.related[place]
        self.group[vertex] = first

    def _apart(self, groups: Sequence[_Group]) -> bool:
        """Whether no node of one group is in, above or below another."""
        return not any(
            one.nodes & (other.nodes | other.related) for i, one in enumerate(groups) for other in groups[i + 1 :]
        )


def dim_graph(graph: Graph) -> DimGraph:
    """The D-Graph of a graph, made once for each. Window loops (halos) are left out."""
    found = graph.__dict__.get("_dim_graph")
    if not isinstance(found, DimGraph):
        found = graph.__dict__["_dim_graph"] = _Build(graph).dim_graph()
    return found


def window_graph(graph: Graph) -> DimGraph:
    """The D-Graph of whole dimensions, those that are read through windows included: of regions with a halo."""
    found = graph.__dict__.get("_window_graph")
    if not isinstance(found, DimGraph):
        found = graph.__dict__["_window_graph"] = _Whole(graph).dim_graph()
    return found


@dataclass
class _Factors:
    """Lengths of factors that are known to be the same, and how they divide further: union-find over classes, each
    with its length or the two classes that it divides into."""

    parent: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    halves: list[tuple[int, int] | None] = field(default_factory=list)

    def new(self, length: int) -> int:
        self.parent.append(len(self.parent))
        self.length.append(length)
        self.halves.append(None)
        return len(self.parent) - 1

    def find(self, item: int) -> int:
        while self.parent[item] != item:
            self.parent[item] = self.parent[self.parent[item]]
            item = self.parent[item]
        return item

    def leaves(self, item: int) -> list[int]:
        """The undivided classes of one class, outer first."""
        item = self.find(item)
        halves = self.halves[item]
        return [item] if halves is None else self.leaves(halves[0]) + self.leaves(halves[1])

    def divide(self, leaf: int, outer: int) -> None:
        """Divides an undivided class into [outer, rest]."""
        self.halves[leaf] = self.new(outer), self.new(self.length[leaf] // outer)

    def cut(self, item: int, outer: int, length: int) -> list[int] | None:
        """The leaves that make up the middle of [outer, length, rest]; None if the class divides otherwise."""
        skipped, rest = self._split_at(self.leaves(item), outer)
        if skipped is None or rest is None:
            return None
        middle, _ = self._split_at(rest, length)
        return middle

    def _split_at(self, leaves: list[int], product: int) -> tuple[list[int] | None, list[int] | None]:
        taken: list[int] = []
        todo = list(leaves)
        while product > 1:
            if not todo:
                return None, None
            leaf = todo.pop(0)
            length = self.length[leaf]
            if product % length == 0:
                taken.append(leaf)
                product //= length
                continue
            if length % product:
                return None, None
            self.divide(leaf, product)
            outer, inner = self.leaves(leaf)
            taken.append(outer)
            todo.insert(0, inner)
            product = 1
        return taken, todo

    def unify(self, ones: list[int], others: list[int]) -> None:
        """Makes two sequences of leaves of the same total length the same factors, as far as they can be: where only
        coprime rests are left, they stay what they are."""
        a, b = list(reversed(ones)), list(reversed(others))
        while a and b:
            x, y = self.find(a.pop()), self.find(b.pop())
            if x == y:
                continue
            if self.halves[x] is not None:
                a += reversed(self.leaves(x))
                b.append(y)
                continue
            if self.halves[y] is not None:
                b += reversed(self.leaves(y))
                a.append(x)
                continue
            if self.length[x] == self.length[y]:
                self.parent[max(x, y)] = min(x, y)
                continue
            common = gcd(self.length[x], self.length[y])
            if common == 1:
                return
            for leaf in (x, y):
                if self.length[leaf] != common:
                    self.divide(leaf, common)
            a.append(x)
            b.append(y)


class _Build:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.factors = _Factors()
        self.dims: dict[tuple[Value, int], int] = {}
        self.rule_loops: dict[NodeId, tuple[Loop, ...]] = {}

    def dim_graph(self) -> DimGraph:
        known: dict[Call, tuple[Loop, ...]] = {}
        for node in self.graph.nodes_in_order():
            if node.is_input or node.writes or node.stream is not None:
                continue
            call = self.graph.call(node)
            if call not in known:
                known[call] = tuple(rule_for(node.op).loops(call))
            self.rule_loops[node.id] = known[call]
            for loop in known[call]:
                self._relate(node.id, node.inputs, loop)
        loops: dict[NodeId, Sequence[Refined]] = {}
        for node in self.graph.nodes_in_order():
            if node.is_input:
                loops[node.id] = list(self._of_input(Value(node.id)))
            else:
                loops[node.id] = list(self._refined(node.id, node.inputs))
        return DimGraph(self.graph, loops, _edges(self.graph, loops))

    def _class(self, value: Value, dim: int) -> int:
        key = (value, dim)
        if key not in self.dims:
            self.dims[key] = self.factors.new(self.graph.spec(value).shape[dim])
        return self.dims[key]

    def _axes(self, node: NodeId, inputs: Sequence[Value], loop: Loop) -> Iterator[tuple[Value, Axis]]:
        for output, role in enumerate(loop.roles):
            if isinstance(role, Concat):
                yield Value(node, output), role.axis
        for value, axis in zip(inputs, loop.inputs):
            if axis is not None:
                yield value, axis

    def _relate(self, node: NodeId, inputs: Sequence[Value], loop: Loop) -> None:
        if loop.window is not None:
            return
        first: tuple[Value, Axis] | None = None
        for value, axis in self._axes(node, inputs, loop):
            leaves = self.factors.cut(self._class(value, axis.dim), axis.outer, axis.length)
            if leaves is None:
                continue
            if first is None:
                first = value, axis
                continue
            other = self.factors.cut(self._class(first[0], first[1].dim), first[1].outer, first[1].length)
            if other is not None:
                self.factors.unify(other, leaves)

    def _lengths(self, value: Value, axis: Axis) -> list[int] | None:
        leaves = self.factors.cut(self._class(value, axis.dim), axis.outer, axis.length)
        return None if leaves is None else [self.factors.length[leaf] for leaf in leaves]

    def _of_input(self, value: Value) -> Iterator[Refined]:
        """The factors of an input's dimensions, as loops that read nothing."""
        for dim, length in enumerate(self.graph.spec(value).shape):
            outer = 1
            for factor in self._lengths(value, Axis(dim, length)) or ():
                if factor > 1:
                    yield Refined(Cut(-1, outer, factor), Loop((), (Concat(Axis(dim, factor, outer)),)))
                outer *= factor

    def _refined(self, node: NodeId, inputs: Sequence[Value]) -> Iterator[Refined]:
        for number, loop in enumerate(self.rule_loops.get(node, ())):
            if loop.window is not None:
                continue
            ways = {tuple(self._lengths(v, axis) or ()) for v, axis in self._axes(node, inputs, loop)}
            if len(ways) != 1 or () in ways:  # seen in views that have no common refinement
                continue
            outer = 1
            for factor in next(iter(ways)):
                if factor > 1 and (loop.uniform or outer == 1):
                    yield Refined(Cut(number, outer, factor), loop.refined(outer, factor))
                outer *= factor


class _Whole:
    """Dimensions as they are, not divided."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def dim_graph(self) -> DimGraph:
        loops: dict[NodeId, Sequence[Refined]] = {}
        for node in self.graph.nodes_in_order():
            found: list[Refined] = []
            if node.is_input:
                for dim, length in enumerate(self.graph.spec(Value(node.id)).shape):
                    if length > 1:
                        found.append(Refined(Cut(-1, 1, length), Loop((), (Concat(Axis(dim, length)),))))
            elif not node.writes and node.stream is None:
                for number, loop in enumerate(rule_for(node.op).loops(self.graph.call(node))):
                    if self._is_whole(node.id, node.inputs, loop):
                        found.append(Refined(Cut(number, 1, loop.length), loop))
            loops[node.id] = found
        return DimGraph(self.graph, loops, _edges(self.graph, loops))

    def _is_whole(self, node: NodeId, inputs: Sequence[Value], loop: Loop) -> bool:
        axes = [(value, axis) for value, axis in zip(inputs, loop.inputs) if axis is not None]
        axes += [(Value(node, i), r.axis) for i, r in enumerate(loop.roles) if isinstance(r, Concat)]
        return all(self.graph.spec(value).shape[axis.dim] == axis.length for value, axis in axes)


def _edges(graph: Graph, loops: Mapping[NodeId, Sequence[Refined]]) -> dict[Vertex, Sequence[Vertex]]:
    made: dict[tuple[Value, Axis], list[Vertex]] = {}
    for node, found in loops.items():
        for index, refined in enumerate(found):
            for output, role in enumerate(refined.loop.roles):
                if isinstance(role, Concat):
                    made.setdefault((Value(node, output), role.axis), []).append(Vertex(node, index))
    edges: dict[Vertex, Sequence[Vertex]] = {}
    for node, found in loops.items():
        inputs = graph.nodes[node].inputs
        for index, refined in enumerate(found):
            linked: dict[Vertex, None] = {}
            for value, axis in zip(inputs, refined.loop.inputs):
                if axis is not None:
                    linked.update(dict.fromkeys(made.get((value, axis), ())))
            edges[Vertex(node, index)] = tuple(linked)
    return edges
