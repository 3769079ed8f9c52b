"""Eager order: what runs without any plan."""

from __future__ import annotations

from magis.ir.graph import Graph, Schedule
from magis.ir.structure import topological_order


def eager_order(graph: Graph) -> Schedule:
    """The order of capture, in which ids count; nodes that edits added run as soon as they can. Inputs included."""
    return topological_order(graph)
