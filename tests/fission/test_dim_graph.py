"""Loops run over factors of dimensions: the common refinement of all shapes that a tensor is seen in."""

from __future__ import annotations

import torch
from einsums import Drawing, vertex_of

from builder import record
from magis.fission.dim_graph import DimGraph, Vertex, dim_graph, window_graph
from magis.ops.loop import Axis, Concat

B, T, HEADS, SIZE = 2, 3, 5, 7


def axes(dims: DimGraph, component: tuple[Vertex, ...]) -> dict[int, Axis]:
    """For each node, along which axis of its result it is split; nodes that occur twice are an error."""
    found = {v.node: r.axis for v in component for r in dims.loop(v).loop.roles if isinstance(r, Concat)}
    assert len(found) == len(component)
    return found  # type: ignore[return-value]


def component_of(dims: DimGraph, node: int, axis: Axis) -> dict[int, Axis]:
    """The dimension that runs through an axis of a node's result."""
    (found,) = [c for c in dims.components if axes(dims, c).get(node) == axis]
    return axes(dims, found)


def test_heads_are_a_factor_of_the_hidden_dimension() -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        return x.exp().view(B, T, HEADS, SIZE).transpose(1, 2).neg()

    dims = dim_graph(record(code, [torch.rand(B, T, HEADS * SIZE)]).graph)
    whole = Axis(2, HEADS)
    assert component_of(dims, 1, whole) == {0: whole, 1: whole, 2: whole, 3: Axis(1, HEADS), 4: Axis(1, HEADS)}
    inner = Axis(2, SIZE, HEADS)
    assert component_of(dims, 1, inner) == {0: inner, 1: inner, 2: Axis(3, SIZE), 3: Axis(3, SIZE), 4: Axis(3, SIZE)}
    assert Axis(2, HEADS * SIZE) not in [axis for c in dims.components for axis in axes(dims, c).values()]


def test_rows_are_batch_times_sequence() -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        return x.exp().view(B * T, HEADS).neg().view(B, T, HEADS).abs()

    dims = dim_graph(record(code, [torch.rand(B, T, HEADS)]).graph)
    batch = {node: Axis(0, B) for node in range(6)}
    assert component_of(dims, 3, Axis(0, B)) == batch
    sequence = {node: Axis(0, T, B) if node in (2, 3) else Axis(1, T) for node in range(6)}
    assert component_of(dims, 3, Axis(0, T, B)) == sequence
    assert window_graph(dims.graph).loops[3] != dims.loops[3]  # there, a dimension is whole or not at all


def test_coprime_views_stay_opaque() -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        return x.exp().view(B, 3, 2).neg()

    graph = record(code, [torch.rand(B, 2, 3)]).graph
    dims = dim_graph(graph)
    assert [each.loop.roles for each in dims.loops[2]] == [(Concat(Axis(0, B)),)]  # type: ignore[index]
    assert component_of(dims, 1, Axis(1, 2)) == {0: Axis(1, 2), 1: Axis(1, 2)}
    assert component_of(dims, 3, Axis(1, 3)) == {3: Axis(1, 3)}


def test_a_view_far_away_divides_a_loop() -> None:
    build = Drawing(b=12, c=2, r=4, s=3)
    x = build.input("bc")
    y = build.op("bc->bc", x)
    z = build.op("bc,bc->b", y, x)
    build.view("rsc", build.op("bc->bc", x))
    dims = dim_graph(build.graph(z))
    assert [(each.cut.outer, each.cut.length) for each in dims.loops[y] if each.cut.loop == 0] == [(1, 4), (4, 3)]
    assert len(dims.loops[z]) == 3  # both factors of b, and c summed


def test_strict_components_hold_a_node_once() -> None:
    build = Drawing(t=4, s=4, c=3)
    x = build.input("tc")
    q, k = build.op("tc->tc", x), build.op("sc->sc", x)
    scores = build.op("tc,sc->ts", q, k)
    dims = dim_graph(build.graph(scores))
    rows, columns = vertex_of(dims, scores, 1), vertex_of(dims, scores, 2)
    assert any(rows in c and columns in c for c in dims.components)
    assert {v.node for v in dims.strict_component(rows)} == {q, scores}
    assert {v.node for v in dims.strict_component(columns)} == {k, scores}
    assert dims.strict_component(Vertex(scores, 9)) == ()


def test_writes_and_draws_have_no_loops() -> None:
    build = Drawing(b=4)
    x = build.input("b")
    drawn = build.op("b->b", x, stream=0)
    written = build.view("b", build.op("b->b", drawn), writes=True)
    dims = dim_graph(build.graph(written))
    assert dims.loops[drawn] == dims.loops[written] == []
