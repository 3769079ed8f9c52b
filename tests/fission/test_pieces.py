"""The convex, connected regions that one dimension gives."""

from __future__ import annotations

from einsums import Drawing, vertex_of

from magis.fission.dim_graph import dim_graph
from magis.fission.pieces import Pieces
from magis.fission.region import check
from magis.fission.tree import Fission
from magis.ir.graph import Graph, NodeId

B, C = 8, 4


def along_batch(graph: Graph, node: NodeId) -> list[Fission]:
    """The pieces of the dimension that is the first of a node's result, each checked."""
    dims = dim_graph(graph)
    (component,) = [c for c in dims.components if vertex_of(dims, node, 1) in c]
    found = Pieces(dims).of(component, dimension="batch")
    for fission in found:
        check(graph, fission)
        assert (fission.length, fission.dimension, fission.parts) == (B, "batch", 1)
    return found


def regions(graph: Graph, node: NodeId) -> list[set[NodeId]]:
    return [set(fission.region) for fission in along_batch(graph, node)]


def chain(build: Drawing, start: NodeId, count: int) -> list[NodeId]:
    found = [start]
    for _ in range(count):
        found.append(build.op("bc->bc", found[-1]))
    return found[1:]


def test_a_long_skip_around_a_node_that_cannot_be_split() -> None:
    build = Drawing(b=B, c=C)
    x = build.input("bc")
    before = chain(build, x, 4)
    coupled = build.op("bc->bc", before[-1], coupled="b")
    after = chain(build, coupled, 3)
    joined = build.op("bc,bc->bc", after[-1], before[0])
    found = regions(build.graph(joined), joined)
    assert found == [{*after, joined}, set(before)] or found == [set(before), {*after, joined}]


def test_branches_beside_the_gap_stay_in_the_upper_piece() -> None:
    build = Drawing(b=B, c=C)
    x = build.input("bc")
    before = chain(build, x, 3)
    beside = chain(build, before[0], 2)
    after = chain(build, build.op("bc->bc", before[-1], coupled="b"), 2)
    joined = build.op("bc,bc->bc", after[-1], beside[-1])
    assert regions(build.graph(joined), joined) == [{*before, *beside}, {*after, joined}]


def test_what_little_leads_to_a_partial_result_is_hoisted() -> None:
    build = Drawing(b=B, c=C, w=2 * C)
    labels, x = build.input("b"), build.input("bw")
    mask = build.op("b->b", labels)
    count = build.op("b->", mask)
    wide = build.op("bw->bw", x)
    masked = build.op("bw,b->bw", wide, mask)
    more = build.op("bw->bw", masked)
    scaled = build.op("bw,->bw", more, count)
    assert regions(build.graph(scaled), scaled) == [{wide, masked, more, scaled}]


def test_else_what_reads_the_partial_result_stays_outside() -> None:
    build = Drawing(b=B, c=C)
    x = build.input("bc")
    first, second = chain(build, x, 2)
    mean = build.op("bc->c", second)
    third = build.op("bc,c->bc", second, mean)
    last = build.op("bc->bc", third)
    assert regions(build.graph(last), last) == [{first, second, mean}, {last}]


def test_a_small_cone_towards_the_gap_is_hoisted() -> None:
    build = Drawing(b=B, c=4 * C, o=2)
    x, small = build.input("bc"), build.input("bo")
    little = build.op("bo->bo", small)
    coupled = build.op("bo->bo", little, coupled="b")
    wide = chain(build, x, 3)
    first = build.op("bc,bo->bc", wide[-1], little)
    last = build.op("bc,bo->bc", first, coupled)
    assert regions(build.graph(last), last) == [{*wide, first, last}]


def test_last_views_and_nodes_that_occur_twice_stay_outside() -> None:
    build = Drawing(b=B, d=B, c=C)
    x = build.input("bc")
    (y,) = chain(build, x, 1)
    twice = build.op("bc,dc->bd", y, x)
    view = build.view("bc", build.view("bc", y))
    assert regions(build.graph(twice, view), y) == [{y}]


def test_within() -> None:
    build = Drawing(b=B, c=C)
    nodes = chain(build, build.input("bc"), 5)
    dims = dim_graph(build.graph(nodes[-1]))
    component = dims.strict_component(vertex_of(dims, nodes[0], 1))
    found = Pieces(dims).of(component, [*nodes[:2], *nodes[3:]])
    assert [set(each.region) for each in found] == [set(nodes[:2]), set(nodes[3:])]
