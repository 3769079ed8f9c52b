"""What people do by hand, as plans: recompute each block; recompute all that is cheap. No answer of the search may
be worse than the best of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from magis.ir.graph import Call, Graph, Node, NodeId, Value
from magis.ops.registry import rule_for
from magis.rules.base import Site
from magis.rules.remat import Rematerialise, recomputable, site
from magis.search.state import MState

CHEAP = frozenset({"pointwise", "normalize", "batch_norm", "softmax", "random"})
"""Families of operators whose saved results are cheap to compute again."""


def built(base: MState, where: Site, latency_s: Callable[[Call], float]) -> MState | None:
    """The base with a recomputation carried out, re-ordered around its worst moments; None when nothing is dropped."""
    change = Rematerialise().apply(base.program, where) if where else None
    if change is None:
        return None
    edited = base.scheduled.edited(change.program.graph, change.old_nodes, change.new_nodes)
    better, _ = edited.lowered(thorough=False)
    return base.followed_by((Rematerialise.name, where), change, better, latency_s)


def trivial_sites(graph: Graph) -> Iterator[tuple[str, Site]]:
    """Names of trivial plans and the recomputation that each is; nothing for a graph without a backward pass."""
    found: dict[Site, str] = {}
    for name, depth in (("recompute each block", 0), ("recompute each inner block", -1)):
        found.setdefault(_recompute(graph, _inside_blocks(graph, block_of(graph, depth))), name)
    found.setdefault(_recompute(graph, lambda node: rule_for(node.op).family in CHEAP), "recompute cheap operators")
    yield from ((name, plan) for plan, name in found.items() if plan)


def block_of(graph: Graph, depth: int) -> dict[NodeId, str]:
    """For each node of the forward pass its block: the child of a repeated module list in which it lies (of several
    lists within each other, the one at `depth`: 0 is the outermost, -1 the innermost), else the top-level child."""
    paths = {node.id: node.origin.module.split(".") for node in graph.nodes.values() if is_early(node)}
    children: dict[tuple[str, ...], set[str]] = {}
    for path in paths.values():
        for place, word in enumerate(path):
            if word.isdigit():
                children.setdefault(tuple(path[:place]), set()).add(word)
    blocks = {}
    for node_id, path in paths.items():
        lists = [i for i, word in enumerate(path) if word.isdigit() and len(children[tuple(path[:i])]) > 1]
        if path != [""]:
            blocks[node_id] = ".".join(path[: lists[depth] + 1 if lists else 1])
    return blocks


def is_early(node: Node) -> bool:
    """Whether it is an operator of the forward pass."""
    return not node.is_input and node.origin.direction == "forward"


def _inside_blocks(graph: Graph, blocks: Mapping[NodeId, str]) -> Callable[[Node], bool]:
    """Whether only its own block and the backward pass read what a node makes, through views or not."""

    def inside(node: Node) -> bool:
        block = blocks.get(node.id)
        todo = [node.id]
        while todo and block is not None:
            for user in graph.users[todo.pop()]:
                reader = graph.nodes[user]
                if is_early(reader) and blocks.get(user) != block:
                    return False
                if any(spec is not None and spec.alias_of is not None for spec in reader.outputs):
                    todo.append(user)
        return block is not None

    return inside


def _recompute(graph: Graph, drops: Callable[[Node], bool]) -> Site:
    """The recomputation, for the backward pass, of all results for which `drops` holds and which it needs: to read
    them, or to make others that it reads."""
    handed_back = {graph.root(value).node for value in graph.outputs}
    makers = {
        node.id for node in filter(is_early, graph.nodes.values()) if recomputable(node) and node.id not in handed_back
    }
    makers = {node_id for node_id in makers if drops(graph.nodes[node_id])}
    dropped = {
        node.id
        for node in filter(is_early, graph.nodes.values())
        if recomputable(node) and all(root in makers for root in _roots(graph, node))
    }
    readers = {
        node.id
        for node in graph.nodes.values()
        if not (node.is_input or is_early(node)) and any(value.node in dropped for value in node.inputs)
    }
    segment: set[NodeId] = set()
    todo = list(readers)
    while todo:
        for value in graph.nodes[todo.pop()].inputs:
            if value.node in dropped and value.node not in segment:
                segment.add(value.node)
                todo.append(value.node)
    return site(segment, readers) if segment else ()


def _roots(graph: Graph, node: Node) -> list[NodeId]:
    """The nodes that own the storages of a node's results."""
    return [graph.root(Value(node.id, i)).node for i, spec in enumerate(node.outputs) if spec is not None]
