"""F-Tree: which regions of the graph run in parts; and the program, all that a rule may rewrite (paper 4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from magis.ir.graph import Call, Graph, NodeId
from magis.ops.loop import Loop
from magis.ops.registry import rule_for


@dataclass(frozen=True, slots=True)
class Cut:
    """Which loop of a node is split: number `loop` of its rule's, of which the factor [outer, length, rest]."""

    loop: int
    outer: int
    length: int

    def of(self, call: Call) -> Loop:
        """The loop itself. Raises IndexError when the operator has none of that number."""
        return loops_of(call)[self.loop].refined(self.outer, self.length)


@lru_cache(maxsize=1 << 16)
def loops_of(call: Call) -> tuple[Loop, ...]:
    """The loops of a call, in its rule's order."""
    return tuple(rule_for(call.op).loops(call))


@dataclass(frozen=True)
class Fission:
    """f = (S, D, n): split the nodes of `region` into `parts`, each along its own loop.

    `parts == 1` is a candidate that changes nothing; `parts > 1` is enabled. The regions of `children` lie
    inside this one. `length` is how many positions there are to divide, `dimension` its name for people. Sums of
    half-precision parts are kept in float32 if `wide`. With a `halo`, parts read overlapping slices through windows.
    """

    region: frozenset[NodeId]
    cuts: Mapping[NodeId, Cut]
    length: int
    parts: int = 1
    children: tuple[Fission, ...] = ()
    dimension: str = ""
    wide: bool = True
    halo: bool = False

    @property
    def enabled(self) -> bool:
        """Whether it, or a region inside it, really runs in parts."""
        return self.parts > 1 or any(child.enabled for child in self.children)

    def walk(self) -> Iterator[Fission]:
        """This region and all inside it, outer before inner."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Program:
    """A graph and the regions of it that run in parts."""

    graph: Graph
    ftree: tuple[Fission, ...] = field(default=())

    @property
    def enabled(self) -> tuple[Fission, ...]:
        """The outermost regions that really run in parts, each with only such regions inside."""
        return tuple(found for fission in self.ftree for found in _enabled(fission))


def _enabled(fission: Fission) -> Iterator[Fission]:
    inside = tuple(found for child in fission.children for found in _enabled(child))
    if fission.parts == 1:
        yield from inside
    else:
        yield replace(fission, children=inside)


def sections(length: int, parts: int) -> tuple[tuple[int, int], ...]:
    """How `length` positions are divided into `parts`, as (how many parts, their length), larger parts first; they
    differ by at most one position."""
    short, longer = divmod(length, parts)
    return tuple(pair for pair in ((longer, short + 1), (parts - longer, short)) if pair[0] and pair[1])
