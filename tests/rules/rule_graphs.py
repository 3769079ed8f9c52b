"""Graphs for tests of rules and of the search: small ones by their edges, and random legal applications."""

from __future__ import annotations

import random
from dataclasses import replace

from magis.fission.tree import Program
from magis.ir.graph import Graph, Node
from magis.rules.base import Site
from magis.rules.remat import recomputable, site

FIGURE = ("AB", "BC", "AD", "CD", "BE", "DE", "EF")
"""A graph that needs 4 tensors at once in any order, and 3 when B runs again for E."""


def known(graph: Graph) -> Graph:
    """The same graph of operators that may run twice, but for those that write; no two are the same call."""

    def may_run_twice(node: Node) -> Node:
        return node if node.is_input or node.writes else replace(node, op="aten.add.Tensor", args=(*node.args, node.id))

    return replace(graph, nodes={node.id: may_run_twice(node) for node in graph.nodes.values()})


def random_site(graph: Graph, chosen: random.Random) -> Site:
    """Some operators that may run twice and some of their readers; empty when there is none."""
    able = [n.id for n in graph.nodes.values() if recomputable(n)]
    segment = set(chosen.sample(able, min(len(able), chosen.randint(1, 3))))
    readers = sorted({user for n in segment for user in graph.users[n]} - segment)
    return site(segment, chosen.sample(readers, chosen.randint(1, len(readers)))) if readers else ()


def letters(program: Program, names: str) -> set[str]:
    """Edges as letters; the copy of an operator is its small letter."""
    name = {n.id: names[n.id] if n.id < len(names) else _original(n.origin.module, names) for n in _nodes(program)}
    return {name[value.node] + name[node.id] for node in _nodes(program) for value in node.inputs}


def _nodes(program: Program) -> list[Node]:
    return list(program.graph.nodes.values())


def _original(note: str, names: str) -> str:
    return names[int(note.rpartition("%")[2].rstrip(")"))].lower()
