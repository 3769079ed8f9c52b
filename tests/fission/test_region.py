"""Which regions are refused, and that the refusal names the condition and the node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from einsums import EINSUM, Drawing, fission

from magis.fission.parts import CannotSplitError
from magis.fission.region import check, is_allocatable
from magis.fission.tree import Cut, Fission, sections
from magis.ir.args import Slot
from magis.ir.graph import Graph, NodeId, Value
from magis.ops.loop import Axis, Concat, Loop, Lost

B, C = 4, 6


def region(*cuts: tuple[NodeId, Cut]) -> Fission:
    return Fission(frozenset(node for node, _ in cuts), dict(cuts), B, 2)


def cut(loop: int, length: int = B) -> Cut:
    """Of a test operator, in the order of its letters."""
    return Cut(loop, 1, length)


def refused(graph: Graph, found: Fission, why: str) -> None:
    with pytest.raises(CannotSplitError, match=why):
        check(graph, found)


def drawing() -> tuple[Drawing, NodeId]:
    build = Drawing(b=B, c=C, d=B)
    return build, build.input("bc")


def test_chain_is_valid() -> None:
    build, x = drawing()
    y = build.op("bc->bc", x)
    z = build.op("bc->b", y)
    check(build.graph(z), region((y, cut(0)), (z, cut(0))))


def test_inputs_and_unknown_nodes() -> None:
    build, x = drawing()
    graph = build.graph(build.op("bc->bc", x))
    refused(graph, region((x, Cut(-1, 1, B))), "%0 is no operator of the graph")
    refused(graph, region((NodeId(9), cut(0))), "%9 is no operator of the graph")


def test_writes_and_draws() -> None:
    build, x = drawing()
    drawn = build.op("bc->bc", x, stream=0)
    written = build.view("bc", drawn, writes=True)
    graph = build.graph(written)
    refused(graph, region((drawn, cut(0))), rf"%1 \({EINSUM}\) draws random numbers")
    refused(graph, region((written, cut(0))), r"%2 \(aten.relu_.default\) writes in place")


def test_nodes_without_a_loop() -> None:
    build, x = drawing()
    y = build.op("bc->bc", x)
    z = build.op("bc->bc", y, coupled="c")
    graph = build.graph(z)
    missing = region((y, cut(0)))
    refused(graph, replace(missing, region=frozenset((y, z))), r"not independent: no loop is given for %2 ")
    refused(graph, region((y, cut(1, C)), (z, cut(1, C))), r"not independent: %2 \(test.einsum\) has no such loop")


def test_not_connected() -> None:
    build, x = drawing()
    y, z = build.op("bc->bc", x), build.op("bc->bc", x)
    refused(build.graph(y, z), region((y, cut(0)), (z, cut(0))), "not connected")


def test_not_convex() -> None:
    build, x = drawing()
    y = build.op("bc->bc", x)
    between = build.op("bc->bc", build.op("bc->bc", y))
    z = build.op("bc,bc->bc", y, between)
    refused(build.graph(z), region((y, cut(0)), (z, cut(0))), r"not convex: %2 \(test.einsum\) outside lies on a path")


def test_reads_a_partial_result() -> None:
    build, x = drawing()
    y = build.op("bc->c", x)
    z = build.op("c,bc->bc", y, x)
    graph = build.graph(z)
    refused(graph, region((y, cut(1)), (z, cut(0))), r"not independent: %2 \(.*\) reads the partial result of %1 \(")
    check(graph, region((y, cut(1))))  # a sum may leave


def test_reads_it_whole() -> None:
    build, x = drawing()
    y = build.op("bc->bc", x)
    z = build.op("dc,bc->bd", x, y)
    refused(build.graph(z), region((y, cut(0)), (z, cut(1))), r"%2 \(test.einsum\) reads %1 \(test.einsum\) whole")


def test_reads_it_along_another_dimension() -> None:
    build, x = drawing()
    y = build.op("bc,dc->bd", x, build.input("dc"))
    z = build.op("bd->bd", y)
    refused(build.graph(z), region((y, cut(0)), (z, cut(1))), r"%3 \(.*\) reads %2 \(.*\) along another dimension")


def test_lost_results(monkeypatch: pytest.MonkeyPatch) -> None:
    build, x = drawing()
    y = build.op("bc->bc", x)
    z = build.op("bc->bc", y)
    graph = build.graph(z)
    lost = Loop((Axis(0, B),), (Lost(),))
    original = Cut.of
    monkeypatch.setattr(Cut, "of", lambda self, call: lost if self.loop == 7 else original(self, call))
    refused(graph, region((y, cut(7)), (z, cut(0))), r"%2 \(.*\) reads what parts of %1 \(.*\) do not give")
    refused(graph, region((z, cut(7))), r"parts of %2 \(test.einsum\) do not give what is read outside")


def test_views_and_tensors_with_gaps_do_not_leave() -> None:
    build, x = drawing()
    y = build.op("bc->bc", x)
    view = build.view("bc", y)
    spec = replace(build.spec("bc"), strides=(2 * C, 1), storage_bytes=2 * B * C)
    gaps = build.edit.add(EINSUM, [Value(view)], [spec], ("bc->bc", "", Slot(0)))
    graph = build.graph(view, gaps)
    refused(graph, fission(graph, [(y, 1), (view, 1)]), r"%2 \(aten.view.default\) is a view that is read outside")
    refused(graph, region((gaps, cut(0))), r"%3 \(test.einsum\) gives a tensor with gaps")


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "answer"),
    [
        ((4, 6), (6, 1), 0, True),
        ((4, 6), (1, 4), 0, True),
        ((4, 1, 6), (6, 99, 1), 0, True),
        ((4, 6), (6, 1), 3, False),
        ((4, 6), (0, 1), 0, False),
        ((4, 6), (12, 1), 0, False),
        ((), (), 0, True),
        ((0, 6), (12, 1), 0, True),
    ],
)
def test_is_allocatable(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, answer: bool) -> None:
    spec = replace(Drawing(b=1).spec("b"), shape=shape, strides=strides, offset=offset)
    assert is_allocatable(spec) == answer


def test_sections() -> None:
    assert sections(10, 4) == ((2, 3), (2, 2))
    assert sections(8, 4) == ((4, 2),)
    assert sections(3, 3) == ((3, 1),)
    assert sections(5, 1) == ((1, 5),)


def test_a_refined_loop_is_the_factor() -> None:
    build, x = drawing()
    y = build.op("bc->bc", x)
    graph = build.graph(y)
    assert Cut(1, 2, 3).of(graph.call(graph.nodes[y])).roles == (Concat(Axis(1, 3, 2)),)
