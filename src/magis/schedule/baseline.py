"""Eager order: what runs without any plan."""

from __future__ import annotations

from math import inf

from magis.ir.graph import Graph, NodeId, Schedule
from magis.ir.structure import topological_order

_BEFORE = 1e-3


def eager_order(graph: Graph) -> Schedule:
    """The order of capture, in which ids count; nodes that edits added run right before their first reader. Inputs
    included."""
    prefer: dict[NodeId, float] = {}
    for node in reversed(graph.nodes_in_order()):
        first = min((prefer.get(user, user) for user in graph.users[node.id]), default=inf)
        if first < node.id:
            prefer[node.id] = first - _BEFORE
    return topological_order(graph, prefer)
