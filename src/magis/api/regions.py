"""Regions as a plan file has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from magis.errors import PlanError
from magis.fission.tree import Cut, Fission, Program
from magis.ir.graph import NodeId


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the graph that runs in `parts` pieces along a dimension of that length; `nodes` of them.

    `cuts` says for each node which loop is split, as `node:loop.outer.length`; sums of half-precision parts are kept in
    float32 if `wide`. With a `halo`, parts overlap where they read through windows."""

    id: int
    parent: int | None
    dimension: str
    length: int
    parts: int
    nodes: int
    wide: bool
    halo: bool
    cuts: str


def regions_of(program: Program) -> tuple[Region, ...]:
    """The regions of a program that run in parts, outer before inner."""
    return tuple(_listed(program.enabled))


def _listed(forest: Sequence[Fission]) -> Iterator[Region]:
    todo: list[tuple[Fission, int | None]] = [(fission, None) for fission in reversed(forest)]
    number = 0
    while todo:
        fission, parent = todo.pop()
        cuts = " ".join(f"{n}:{cut.loop}.{cut.outer}.{cut.length}" for n, cut in sorted(fission.cuts.items()))
        size = len(fission.region)
        yield Region(
            number, parent, fission.dimension, fission.length, fission.parts, size, fission.wide, fission.halo, cuts
        )
        todo += [(child, number) for child in reversed(fission.children)]
        number += 1


def forest_of(regions: Sequence[Region]) -> tuple[Fission, ...]:
    """The regions back. Raises PlanError when they cannot be read."""
    children: dict[int | None, list[Region]] = {}
    for number, region in enumerate(regions):
        if region.id != number or not (region.parent is None or 0 <= region.parent < number) or region.parts < 2:
            raise PlanError(f"its region {region.id} is no region in parts, or not after the one that contains it")
        children.setdefault(region.parent, []).append(region)
    return _forest(children, None)


def _forest(children: dict[int | None, list[Region]], parent: int | None) -> tuple[Fission, ...]:
    found = []
    for region in children.get(parent, []):
        cuts = dict(map(_cut, region.cuts.split()))
        lengths = {cut.length for cut in cuts.values()}
        if len(cuts) != region.nodes or max(lengths) != region.length or (len(lengths) > 1 and not region.halo):
            raise PlanError(f"its region {region.id} has other nodes or another length than it says")
        inside = _forest(children, region.id)
        shape = (frozenset(cuts), cuts, region.length, region.parts, inside)
        found.append(Fission(*shape, region.dimension, region.wide, region.halo))
    return tuple(found)


def _cut(text: str) -> tuple[NodeId, Cut]:
    try:
        node, _, rest = text.partition(":")
        loop, outer, length = map(int, rest.split("."))
        if int(node) < 0 or loop < 0 or outer < 1 or length < 2:
            raise ValueError
    except ValueError:
        raise PlanError(f"its regions hold {text[:40]!r}, which is no node with a loop") from None
    return NodeId(int(node)), Cut(loop, outer, length)
