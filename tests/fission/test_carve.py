"""Views at the border of a region: copied outside, or left there."""

from __future__ import annotations

from einsums import Drawing, fission

from magis.fission.carve import carve
from magis.fission.region import check
from magis.fission.tree import Program
from magis.ir.edit import GraphEdit
from magis.ir.graph import NodeId, Value
from magis.ir.verify import verify
from magis.rules.split import split

B, C = 4, 6


def drawing() -> tuple[Drawing, NodeId]:
    build = Drawing(b=B, c=C, d=C)
    return build, build.op("bc->bc", build.input("bc"))


def test_a_view_that_both_sides_read_gets_a_copy_outside() -> None:
    build, y = drawing()
    one = build.view("bc", y)
    other = build.view("bd", one)
    inside = build.op("bd->bd", other)
    outside = build.op("bd->bd", other, coupled="b")
    graph = build.graph(inside, outside)
    edit = GraphEdit(graph)
    region, copies = carve(edit, graph, fission(graph, [(y, 1), (one, 1), (other, 1), (inside, 1)]))
    found = edit.finish()
    verify(found)
    check(found, region)
    assert region.region == {y, one, other, inside}
    assert set(copies.values()) == {one, other}
    copy_of = {original: copy for copy, original in copies.items()}
    assert found.nodes[outside].inputs == (Value(copy_of[other]),)
    assert found.nodes[copy_of[other]].inputs == (Value(copy_of[one]),)
    assert found.nodes[copy_of[one]].inputs == (Value(y),)
    assert found.nodes[inside].inputs == (Value(other),)


def test_a_view_that_is_only_needed_outside_leaves_the_region() -> None:
    build, y = drawing()
    view = build.view("bd", build.view("bc", y))
    z = build.op("bc->bc", y)
    graph = build.graph(z, view)
    nodes = [(node.id, 1) for node in graph.nodes.values() if not node.is_input]
    edit = GraphEdit(graph)
    region, copies = carve(edit, graph, fission(graph, nodes))
    assert region.region == region.cuts.keys() == {y, z}
    assert copies == {}
    assert edit.finish() == graph


def test_a_view_that_is_handed_back_and_read_inside() -> None:
    build, y = drawing()
    view = build.view("bc", y)
    z = build.op("bc->bc", view)
    graph = build.graph(view, z)
    change = split(Program(graph), fission(graph, [(y, 1), (view, 1), (z, 1)]))
    found = change.program.graph
    verify(found)
    (copy,) = set(found.nodes) - set(graph.nodes)
    assert found.outputs == (Value(copy), Value(z))
    assert found.nodes[z].inputs == (Value(view),)
    assert [each.region for each in change.program.ftree] == [{y, view, z}]
