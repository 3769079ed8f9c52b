"""Figure 4: the D-Graph of attention, and its dimensions."""

from __future__ import annotations

from typing import Any

import pytest
from einsums import Drawing, axis_of, vertex_of
from examples import EXAMPLES

from magis.fission.dim_graph import DimGraph, Vertex, dim_graph
from magis.fission.pieces import Pieces
from magis.fission.region import check
from magis.ir.graph import NodeId

FIGURE = EXAMPLES["fig4_dgraph"]
LENGTHS = {"N": 2, "T": 3, "C": 5, "H": 7, "h": 11}
COUPLED = ("v8", 4)
"""Softmax couples this dimension: the operator has no loop along it, where the paper has a vertex without edges."""


def attention() -> DimGraph:
    build = Drawing(n=2, t=3, s=3, c=5, H=7, h=11)
    ids: list[NodeId] = []
    for node in FIGURE["nodes"]:
        inputs = [ids[int(name[1:])] for name in node["inputs"]]
        if node["op"] == "input":
            ids.append(build.input("".join({"N": "n", "T": "t", "C": "c"}.get(d, d) for d in node["shape"])))
        elif "softmax" in node["op"]:
            ids.append(build.op("nHts->nHts", *inputs, coupled="s"))
        else:
            ids.append(build.op(node["einsum"], *inputs))
    graph = build.graph(ids[-1])
    for node, made in zip(FIGURE["nodes"], graph.nodes.values()):
        assert made.outputs[0] is not None
        assert made.outputs[0].shape == tuple(LENGTHS[d] for d in node["shape"])
    return dim_graph(graph)


def paper(dims: DimGraph, vertex: Vertex) -> tuple[str, int]:
    node, axis = axis_of(dims, vertex)
    return f"v{node}", axis


def expected(vertices: list[Any]) -> set[tuple[str, int]]:
    return {(name, axis) for name, axis in vertices} - {COUPLED}


def test_edges() -> None:
    dims = attention()
    found = {(paper(dims, one), paper(dims, other)) for other, ones in dims.edges.items() for one in ones}
    drawn = {(tuple(one), tuple(other)) for one, other in FIGURE["dgraph_edges"]}
    assert found == {edge for edge in drawn if COUPLED not in edge}
    assert COUPLED not in {paper(dims, vertex) for vertex in dims.vertices}


def test_components_are_the_dimensions_of_the_graph() -> None:
    dims = attention()
    found = {frozenset(paper(dims, v) for v in component) for component in dims.components}
    drawn = {**FIGURE["components"], **FIGURE["components_not_drawn"]}
    assert found == {frozenset(expected(vertices)) for vertices in drawn.values()}


def test_strict_components_keep_query_rows_apart() -> None:
    dims = attention()
    computed = [[v for v in c if not dims.graph.nodes[v.node].is_input] for c in dims.strict_components]
    found = {frozenset(paper(dims, v) for v in component) for component in computed if component}
    assert found == {frozenset(expected(each)) for each in FIGURE["strict_components"]["components"]}


@pytest.mark.parametrize(
    ("node", "axis", "region"), [(12, 1, {4, 5, 6, 7, 8, 9, 11, 12}), (12, 2, {4, 7, 8, 9, 11, 12})]
)
def test_batch_and_query_rows_may_be_split(node: int, axis: int, region: set[int]) -> None:
    dims = attention()
    component = dims.strict_component(vertex_of(dims, node, axis))
    (found,) = Pieces(dims).of(component)
    assert found.region == region
    check(dims.graph, found)


def test_query_rows_and_key_columns_together_may_not() -> None:
    dims = attention()
    (sequence,) = [c for c in dims.components if vertex_of(dims, 7, 4) in c]
    assert vertex_of(dims, 7, 3) in sequence
    regions = Pieces(dims).of(sequence)
    assert regions
    assert not any(found.region & {7, 9} for found in regions)
