"""What a transformation rule is: where it may be applied, and what it makes of the program there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Fission, Program
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, Node, NodeId
from magis.schedule.incremental import Scheduled

Site = tuple[int, ...]
"""Where a rule applies: plain numbers, so that it can be saved and replayed. Each rule says what they mean."""
Latency = Callable[[NodeId], float]
"""Seconds of one launch of a node of the state at hand."""


@dataclass(frozen=True, slots=True)
class Change:
    """A changed program, and which nodes the change touched (as `GraphEdit` records them): what Algorithm 2 needs.
    `copies` has, for each node that was added as a copy, the node that it repeats; `added` other nodes that later steps
    may name."""

    program: Program
    old_nodes: frozenset[NodeId]
    new_nodes: frozenset[NodeId]
    copies: Mapping[NodeId, NodeId] = field(default_factory=dict)
    added: tuple[NodeId, ...] = ()


class Rule(Protocol):
    """A transformation that leaves all results as they are."""

    name: ClassVar[str]

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """Where it may help a scheduled program, most promising first."""

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """The program with the rule applied there; None when it does not apply. `infer` types new nodes."""


def changed(program: Program, edit: GraphEdit, copies: Mapping[NodeId, NodeId] | None = None) -> Change:
    """The change that an edit made. Copies lie in the regions of the nodes that they repeat."""
    graph = edit.finish()
    left = {copy: original for copy, original in (copies or {}).items() if copy in graph.nodes}
    ftree = tuple(_kept(fission, graph, left) for fission in program.ftree)
    return Change(Program(graph, ftree), frozenset(edit.old_nodes), frozenset(edit.new_nodes), left)


def _kept(fission: Fission, graph: Graph, copies: Mapping[NodeId, NodeId]) -> Fission:
    """A region with the copies of its nodes and without nodes that are gone."""
    if not copies and fission.region <= graph.nodes.keys():
        return fission
    cuts = {node: cut for node, cut in fission.cuts.items() if node in graph.nodes}
    cuts |= {copy: fission.cuts[original] for copy, original in copies.items() if original in fission.cuts}
    children = tuple(_kept(child, graph, copies) for child in fission.children)
    return replace(fission, region=frozenset(cuts), cuts=cuts, children=children)


def same_home(program: Program, nodes: Iterable[NodeId]) -> bool:
    """Whether some nodes lie in the same regions that run in parts: no rule matches across a region's border."""
    regions = [fission.region for root in program.enabled for fission in root.walk()]
    wanted = list(nodes)
    return all(len({node in region for node in wanted}) <= 1 for region in regions)


def remove_unread(edit: GraphEdit, program: Program, candidates: set[NodeId]) -> None:
    """Removes those of the candidates, and of what only they read, that nobody needs any more. What writes or is handed
    in stays, and the first draw of a random number: the generator has to move on."""
    graph = program.graph
    wanted = {value.node for value in edit.outputs}
    readers = _Readers(graph)
    for node_id in (edit.old_nodes | edit.new_nodes) & edit.node_ids():
        before = {value.node for value in graph.nodes[node_id].inputs} if node_id in graph.nodes else set()
        now = {value.node for value in edit.node(node_id).inputs}
        for producer in before - now:
            readers[producer].discard(node_id)
        for producer in now - before:
            readers[producer].add(node_id)
    todo = sorted(candidates, reverse=True)
    while todo:
        node_id = todo.pop()
        if node_id not in edit.node_ids() or node_id in wanted or readers[node_id]:
            continue
        node = edit.node(node_id)
        if node.is_input or node.writes or is_first_draw(graph, node):
            continue
        edit.remove(node_id)
        for producer in {value.node for value in node.inputs}:
            readers[producer].discard(node_id)
            todo.append(producer)


class _Readers(dict[NodeId, set[NodeId]]):
    """Who reads each node, for those that were asked for."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._users = graph.users

    def __missing__(self, node: NodeId) -> set[NodeId]:
        found = self[node] = set(self._users.get(node, ()))
        return found


def is_first_draw(graph: Graph, node: Node) -> bool:
    """Whether a node draws random numbers that its copies, if there are any, repeat."""
    if node.stream is None:
        return False
    return node.id == min(other.id for other in graph.nodes.values() if other.stream == node.stream)
