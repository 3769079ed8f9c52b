"""F-Tree: which regions of the graph run in parts; and the program, all that a rule may rewrite (paper 4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from magis.ir.graph import Graph, NodeId


@dataclass(frozen=True)
class Fission:
    """f = (S, D, n): split the nodes of `region` into `parts`, each along its loop number `loop_of[node]`.

    `parts == 1` is a candidate that changes nothing; `parts > 1` is enabled. The regions of `children` lie
    inside this one.
    """

    region: frozenset[NodeId]
    loop_of: Mapping[NodeId, int]
    parts: int = 1
    children: tuple[Fission, ...] = ()

    @property
    def enabled(self) -> bool:
        """Whether it, or a region inside it, really runs in parts."""
        return self.parts > 1 or any(child.enabled for child in self.children)


@dataclass(frozen=True)
class Program:
    """A graph and the regions of it that run in parts."""

    graph: Graph
    ftree: tuple[Fission, ...] = field(default=())
