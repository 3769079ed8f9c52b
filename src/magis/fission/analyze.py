"""M-Analyzer: which regions are worth splitting (paper section 4.3, Algorithm 1).

Over the dominator tree T of the graph, with the hot-spots H of the schedule at hand:

    heat(v)  = sum |w| for w in H and T.des(v)
    score(v) = (1 - 1/n) heat(v) - sum |u| for u in inps(T.des(v)) minus H        with n = 2
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import rustworkx

from magis.fission.dim_graph import DimGraph, Vertex
from magis.fission.dimensions import component_names
from magis.fission.pieces import Pieces
from magis.fission.region import boundary
from magis.fission.tree import Fission
from magis.ir.graph import Graph, NodeId, Value

MAX_LEVELS = 4
"""L: how many bands of scores candidates are taken from."""
PARTS = 2
"""n of the score."""
LEAST = 0.01
"""Dimensions that hold no more than this share of the hot bytes are not looked at."""


@dataclass(frozen=True)
class DominatorTree:
    """T(G): immediate dominators of the nodes that the entries reach, and for each of these its place in a walk of
    the tree, and the place after its last descendant."""

    parent: Mapping[NodeId, NodeId | None]
    begin: Mapping[NodeId, int]
    end: Mapping[NodeId, int]

    def dominates(self, above: NodeId, below: NodeId) -> bool:
        """Whether every path from the entries to one node passes the other (a node dominates itself)."""
        return self.begin[above] <= self.begin[below] < self.end[above]


def dominator_tree(graph: Graph, entries: Iterable[NodeId]) -> DominatorTree:
    """The dominator tree of a graph from some entries; with several, all hang from nothing."""
    index = {node_id: i for i, node_id in enumerate(graph.nodes)}
    ids = list(graph.nodes)
    flow: rustworkx.PyDiGraph = rustworkx.PyDiGraph()
    flow.add_nodes_from(ids)
    root = flow.add_node(None)
    flow.add_edges_from_no_data([(root, index[entry]) for entry in entries])
    for node in graph.nodes.values():
        flow.add_edges_from_no_data([(index[producer], index[node.id]) for producer in {v.node for v in node.inputs}])
    found = rustworkx.immediate_dominators(flow, root)
    parent = {ids[i]: (None if above == root else ids[above]) for i, above in sorted(found.items()) if i != root}
    return _walked(parent)


def _walked(parent: Mapping[NodeId, NodeId | None]) -> DominatorTree:
    children: dict[NodeId | None, list[NodeId]] = {}
    for node_id, above in parent.items():
        children.setdefault(above, []).append(node_id)
    begin: dict[NodeId, int] = {}
    end: dict[NodeId, int] = {}
    todo: list[tuple[NodeId, bool]] = [(node, False) for node in reversed(children.get(None, []))]
    while todo:
        node_id, left = todo.pop()
        if left:
            end[node_id] = len(begin)
            continue
        begin[node_id] = len(begin)
        todo.append((node_id, True))
        todo += [(child, False) for child in reversed(children.get(node_id, []))]
    return DominatorTree(parent, begin, end)


def entries(graph: Graph) -> list[NodeId]:
    """Where data flows in: the batch, but for inputs that only the loss reads (labels), if anything is left then."""
    batch = [node.id for node in graph.inputs if node.kind == "batch"]
    data = [n for n in batch if not all("loss" in graph.nodes[user].op for user in graph.users[n])]
    return data or batch or [node.id for node in graph.inputs]


@dataclass(frozen=True)
class Scored:
    """A dominator v of a component (None: the component as a whole): its T.des within the component, as a set of bits
    by place in the graph; its heat and its score, in bytes."""

    node: NodeId | None
    below: int
    memory_heat: float
    fission_score: float


class Analyzer:
    """Finds regions. `hot_bytes` are, for each node, the bytes of its results that are live at the peak."""

    def __init__(self, dims: DimGraph, hot_bytes: Mapping[NodeId, int], tree: DominatorTree | None = None) -> None:
        self.dims, self.hot_bytes = dims, hot_bytes
        self.graph = dims.graph
        self.tree = tree or dominator_tree(dims.graph, entries(dims.graph))
        self.pieces = Pieces(dims)
        self._ids = list(dims.graph.nodes)
        self._bit = {n: 1 << i for i, n in enumerate(self._ids)}
        self._reads = {n.id: sum({self._bit[v.node] for v in n.inputs}) for n in dims.graph.nodes.values()}
        self._cold = sum(bit for n, bit in self._bit.items() if n not in hot_bytes and not self.graph.nodes[n].is_input)

    def candidates(self, max_levels: int = MAX_LEVELS) -> list[Fission]:
        """Algorithm 1: candidates of all components, each once, as a flat list, largest first."""
        found: dict[tuple[frozenset[NodeId], tuple[object, ...]], Fission] = {}
        for component in self.dims.strict_components:
            for fission in self._of_component(component, max_levels):
                found.setdefault((fission.region, tuple(fission.cuts.items())), fission)
        return sorted(found.values(), key=lambda f: (-len(f.region), min(f.region), f.length))

    def _of_component(self, component: Sequence[Vertex], max_levels: int) -> Iterator[Fission]:
        if not self._may_help(component):
            return
        scored = self.scores(component)
        for each in select(scored, self.tree, max_levels):
            name = component_names(self.dims)[component[0]]
            regions = self.pieces.of(component, [self._ids[i] for i in _members(each.below)], name)
            yield from filter(self._shrinks, regions)

    def _shrinks(self, fission: Fission) -> bool:
        """Whether enough of what is hot stays inside: whole results are there in any case."""
        outputs = {value.node for value in boundary(self.graph, fission.region).outputs}
        inside = sum(self.hot_bytes.get(n, 0) for n in fission.region - outputs)
        return inside > LEAST * sum(self.hot_bytes.values())

    def _may_help(self, component: Sequence[Vertex]) -> bool:
        """Whether enough of what is hot would shrink."""
        shrinks = (self.hot_bytes.get(v.node, 0) for v in component if self.dims.loop(v).loop.concatenates)
        return sum(shrinks) > LEAST * sum(self.hot_bytes.values())

    def scores(self, component: Sequence[Vertex]) -> list[Scored]:
        """Heat and score of every dominator in a component, and of the component as a whole (node None)."""
        shrinks = {v.node: self.dims.loop(v).loop.concatenates for v in component}
        nodes = [n for n in shrinks if n in self.tree.begin]
        nodes.sort(key=self.tree.begin.__getitem__)
        own = {n: 0 if self.graph.nodes[n].is_input else self._bit[n] for n in shrinks}
        reads = self._reads
        hot = {n: self.hot_bytes.get(n, 0) if shrinks[n] else 0 for n in shrinks}
        below: dict[NodeId, list[int]] = {n: [0, 0, 0] for n in nodes}  # nodes and what they read, as sets; heat
        stack: list[NodeId] = []
        order: list[tuple[NodeId, NodeId | None]] = []
        for node in nodes:
            while stack and not self.tree.dominates(stack[-1], node):
                stack.pop()
            order.append((node, stack[-1] if stack else None))
            stack.append(node)
        total = [0, 0, 0]
        for node in shrinks.keys() - set(nodes):
            total = [total[0] | own[node], total[1] | reads[node], total[2] + hot[node]]
        for node, above in reversed(order):
            into = total if above is None else below[above]
            into[0] |= below[node][0] | own[node]
            into[1] |= below[node][1] | reads[node]
            into[2] += below[node][2] + hot[node]
        every: list[tuple[NodeId | None, list[int]]] = [(node, below[node]) for node in nodes]
        return [self._scored(node, *sums) for node, sums in ((None, total), *every)]

    def _scored(self, node: NodeId | None, region: int, reads: int, heat: int) -> Scored:
        outside = sum(self._bytes(self._ids[i]) for i in _members(reads & ~region & self._cold))
        score = (1 - 1 / PARTS) * heat - outside
        return Scored(node, region, heat, score)

    def _bytes(self, node: NodeId) -> int:
        return sum(spec.storage_bytes for spec in self.graph.nodes[node].outputs if spec is not None)


def select(scored: Sequence[Scored], tree: DominatorTree, max_levels: int) -> list[Scored]:
    """Candidates by bands of their score: in each band those that dominate no other of it. None when no score is
    positive."""
    best = max((each.fission_score for each in scored), default=0)
    if best <= 0:
        return []
    found: dict[int, Scored] = {}
    for level in range(1, max_levels + 1):
        band = [s for s in scored if level <= max_levels * s.fission_score / best < level + 1]
        for each in band:
            if not any(other is not each and _above(tree, each.node, other.node) for other in band):
                found.setdefault(each.below, each)
    return list(found.values())


def _above(tree: DominatorTree, above: NodeId | None, below: NodeId | None) -> bool:
    if above is None or below is None:
        return above is None
    return tree.dominates(above, below)


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def hot_bytes(graph: Graph, hotspots: Collection[Value]) -> dict[NodeId, int]:
    """Bytes live at the peak, by the node that makes them."""
    found: dict[NodeId, int] = {}
    for value in hotspots:
        found[value.node] = found.get(value.node, 0) + graph.spec(value).storage_bytes
    return found


def nested(candidates: Iterable[Fission]) -> tuple[Fission, ...]:
    """Candidates as a forest: the parent of a region is the smallest that contains it."""
    placed: list[tuple[Fission, list[int]]] = []
    ordered = sorted(candidates, key=lambda f: (-len(f.region), min(f.region), f.length))
    roots: list[int] = []
    for i, fission in enumerate(ordered):
        above = [j for j in range(i) if fission.region < ordered[j].region]
        placed.append((fission, []))
        if above:
            placed[min(above, key=lambda j: len(ordered[j].region))][1].append(i)
        else:
            roots.append(i)

    built: dict[int, Fission] = {}
    for i in range(len(placed) - 1, -1, -1):
        fission, children = placed[i]
        built[i] = replace(fission, children=tuple(built[j] for j in children))
    return tuple(built[i] for i in roots)
