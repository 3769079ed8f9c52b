"""F-Trans as rules: run a region in parts, in another number of parts, or whole again (paper sections 4.2, 5.2).

    before   h = f(x);  y = g(h)
    after    for each part: y[part] = g(f(x[part]))

Trades time (smaller operators, written and summed pieces) for the bytes of all that stays inside the region.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from magis.fission.carve import carve
from magis.fission.dim_graph import DimGraph, Vertex, dim_graph, window_graph
from magis.fission.dimensions import component_names
from magis.fission.parts import CannotSplitError, Infer, no_infer
from magis.fission.pieces import Pieces
from magis.fission.region import check
from magis.fission.tree import Cut, Fission, Program
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, NodeId
from magis.rules.base import Change, Latency, Site, changed
from magis.schedule.incremental import Scheduled

_WIDE, _HALO = 1, 2


def split_site(fission: Fission, graph: Graph) -> Site:
    """The site that makes a region of these nodes and loops: parts; 1 if sums of half-precision parts are kept in
    float32, plus 2 if it has a halo; a node and the number of its loop in the D-Graph (whose component has the other
    nodes' loops); all nodes.

    Raises CannotSplitError when the D-Graph has no such loop."""
    seed = _seed(fission, _dims(graph, fission.halo))
    flags = _WIDE * fission.wide + _HALO * fission.halo
    return (fission.parts, flags, seed.node, seed.number, *sorted(fission.region))


def _dims(graph: Graph, halo: bool) -> DimGraph:
    return window_graph(graph) if halo else dim_graph(graph)


def _seed(fission: Fission, dims: DimGraph) -> Vertex:
    for node in sorted(fission.region):
        for number, refined in enumerate(dims.loops[node]):
            if refined.cut == fission.cuts[node]:
                return Vertex(node, number)
    raise CannotSplitError("none of the region's loops is in the D-Graph")


def fitting(program: Program, fission: Fission) -> list[Fission]:
    """The convex pieces of a region that lie wholly inside, or wholly around, each region that runs in parts already;
    the region itself if it does."""
    overlapping: list[frozenset[NodeId]] = [
        other.region
        for root in program.enabled
        for other in root.walk()
        if fission.region & other.region and not (other.region < fission.region or fission.region < other.region)
    ]
    if not overlapping:
        return [fission]
    dims = _dims(program.graph, fission.halo)
    component = dims.strict_component(_seed(fission, dims))
    _, _, smallest = min((len(region), min(region), region) for region in overlapping)
    inside = fission.region & smallest
    pieces = Pieces(dims).of(component, inside, fission.dimension)
    return [replace(piece, parts=fission.parts, wide=fission.wide) for piece in pieces]


class Split:
    """Site: see `split_site`."""

    name: ClassVar[str] = "split"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """None: the moves of the F-Tree propose them."""
        return iter(())

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Makes the region, inside the smallest region that contains it. None when it may not be split."""
        try:
            return split(program, fission_at(program.graph, site))
        except CannotSplitError:
            return None


def fission_at(graph: Graph, site: Site) -> Fission:
    """The region of a site. Raises CannotSplitError when the graph has none there."""
    if len(site) < 5:
        raise CannotSplitError("no region is given")
    parts, flags, seed, number, *nodes = site
    halo = bool(flags & _HALO)
    dims = _dims(graph, halo)
    vertex = Vertex(NodeId(seed), number)
    component = dims.strict_component(vertex)
    cuts: dict[NodeId, Cut] = {}
    wanted = {NodeId(n) for n in nodes}
    for each in component:
        if each.node in wanted and not graph.nodes[each.node].is_input:
            cuts[each.node] = dims.loop(each).cut
    if cuts.keys() != wanted or not cuts:
        raise CannotSplitError("not independent: not all of these nodes have a loop along that dimension")
    length = max(cut.length for cut in cuts.values())
    name = component_names(dims).get(vertex, "")
    return Fission(frozenset(wanted), cuts, length, parts, (), name, bool(flags & _WIDE), halo)


def split(program: Program, fission: Fission) -> Change:
    """The program with a region more. Raises CannotSplitError naming the condition that does not hold."""
    edit = GraphEdit(program.graph)
    carved, copies = carve(edit, program.graph, fission)
    if not carved.region:
        raise CannotSplitError("the region is nothing but views")
    change = changed(program, edit, copies)
    graph, forest = change.program.graph, change.program.ftree
    check(graph, carved)
    return replace(change, program=Program(graph, inserted(forest, carved)), copies={})


def inserted(forest: tuple[Fission, ...], new: Fission) -> tuple[Fission, ...]:
    """The forest with a region more. Raises CannotSplitError when it overlaps another without containment."""
    for other in (each for root in forest for each in root.walk() if each.parts > 1):
        overlap = new.region & other.region
        if overlap and not new.region < other.region and not other.region < new.region:
            raise CannotSplitError(f"overlaps a region that runs in parts already (%{min(overlap)} is in both)")
    for i, fission in enumerate(forest):
        if new.region < fission.region:
            child = replace(fission, children=inserted(fission.children, new))
            return (*forest[:i], child, *forest[i + 1 :])
    inside = tuple(f for f in forest if f.region < new.region)
    outside = tuple(f for f in forest if not f.region <= new.region)
    return (*outside, replace(new, children=(*new.children, *inside)))


class Parts:
    """Site: the least node of a region, how many nodes it has, and in how many parts it is to run; 1: whole."""

    name: ClassVar[str] = "parts"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """None: the moves of the F-Tree propose them."""
        return iter(())

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Changes the number of parts. None when there is no such region."""
        if len(site) != 3:
            return None
        forest, found = _resized(program.ftree, *site)
        return Change(Program(program.graph, forest), frozenset(), frozenset()) if found else None


def _resized(forest: tuple[Fission, ...], least: int, size: int, parts: int) -> tuple[tuple[Fission, ...], bool]:
    changed: list[Fission] = []
    found = False
    for fission in forest:
        children, inside = _resized(fission.children, least, size, parts)
        found |= inside
        this = not inside and min(fission.region) == least and len(fission.region) == size
        found |= this
        if this and parts == 1:
            changed += children
        else:
            changed.append(replace(fission, children=children, parts=parts if this else fission.parts))
    return tuple(changed), found
