"""Figure 5: part of a multilayer perceptron, forward and backward, split along the batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from einsums import Drawing, axis_of, fission, infer
from examples import EXAMPLES, in_order

from magis.fission.dim_graph import dim_graph
from magis.fission.parts import CannotSplitError
from magis.fission.region import between, boundary, check
from magis.fission.tree import Fission, Program
from magis.ir.graph import Graph, NodeId
from magis.ir.structure import predecessors
from magis.lower.lower import lower
from magis.lower.routine import Accumulate, Allocate, Compute, Slice, Write, expand
from magis.ops.loop import Axis, Concat, Reduce

FIGURE = EXAMPLES["fig5_fission"]
BATCH, P, Q = 4, 3, 5


def perceptron() -> Graph:
    build = Drawing(b=BATCH, p=P, q=Q)
    ids: dict[int, NodeId] = {}
    for node in FIGURE["nodes"]:
        number = node["id"]
        inputs = node.get("inputs", [tail for tail, head in FIGURE["edges"] if head == number])
        shape = "".join(node["shape"])
        if number < 3:
            ids[number] = build.input(shape, "parameter" if "weight" in node.get("what", "") else "batch")
            continue
        equation = node.get("einsum", ",".join([shape] * len(inputs)) + f"->{shape}")
        ids[number] = build.op(equation, *(ids[each] for each in inputs))
    readers = [build.op("bp->bp", ids[7]), build.op("bp->", ids[7]), build.op("qp->qp", ids[8])]
    return build.graph(*readers, ids[6])


def along_batch(graph: Graph, nodes: list[int]) -> Fission:
    return fission(graph, [(node, axis) for node, axis in FIGURE["D"]["nodes"] if node in nodes], FIGURE["n"])


def test_region_is_valid() -> None:
    graph = perceptron()
    region = along_batch(graph, FIGURE["S"])
    assert region.region == set(FIGURE["S"])
    check(graph, region)
    border = boundary(graph, region.region)
    assert [value.node for value in border.inputs] == FIGURE["inps"]
    assert [value.node for value in border.outputs] == FIGURE["outs"]


def test_dimension() -> None:
    dims = dim_graph(perceptron())
    (batch,) = [c for c in dims.components if (0, 1) in {axis_of(dims, v) for v in c}]
    drawn = {(node, axis) for node, axis in FIGURE["D"]["nodes"]}
    assert {axis_of(dims, v) for v in batch if v.node < 9} == drawn
    edges = {(axis_of(dims, one), axis_of(dims, other)) for other in batch for one in dims.edges[other]}
    assert {edge for edge in edges if edge[1][0] < 9} == {(tuple(a), tuple(b)) for a, b in FIGURE["D"]["edges"]}


def test_inputs_are_sliced_or_shared_and_outputs_concatenated_or_summed() -> None:
    graph = perceptron()
    region = along_batch(graph, FIGURE["S"])
    loops = {node: region.cuts[node].of(graph.call(graph.nodes[node])) for node in region.region}
    read = {
        (value.node, axis)
        for node in region.region
        for value, axis in zip(graph.nodes[node].inputs, loops[node].inputs)
        if value.node not in region.region
    }
    assert read == {(0, Axis(0, BATCH)), (1, None), (2, Axis(0, BATCH))}
    roles = {node: loops[NodeId(node)].roles[0] for node in FIGURE["outs"]}
    assert roles == {6: Concat(Axis(0, BATCH)), 7: Concat(Axis(0, BATCH)), 8: Reduce("sum")}


def test_expanded() -> None:
    graph = perceptron()
    program = Program(graph, (along_batch(graph, FIGURE["S"]),))
    body = expand(lower(program, tuple(in_order(graph)), infer)).body
    count = Counter(type(each) for each in body)
    computed = Counter(each.node for each in body if isinstance(each, Compute))
    assert computed == {**dict.fromkeys(FIGURE["S"], 2), 9: 1, 10: 1, 11: 1}
    assert (count[Slice], count[Allocate], count[Write], count[Accumulate]) == (
        4,
        2,
        4,
        1,
    )  # the first part begins the sum


def test_smaller_region() -> None:
    graph = perceptron()
    region = along_batch(graph, FIGURE["variants"][0]["S"])
    check(graph, region)
    assert [value.node for value in boundary(graph, region.region).outputs] == [3, 4, 5, 7]


@pytest.mark.parametrize("nodes", [variant["S"] for variant in FIGURE["variants"][1:3]])
def test_neither_convex_nor_connected(nodes: list[int]) -> None:
    graph = perceptron()
    with pytest.raises(CannotSplitError, match="not connected"):
        check(graph, along_batch(graph, nodes))
    assert between(predecessors(graph), frozenset(map(NodeId, nodes))) == ({5} if 7 in nodes else {4})


def test_not_convex() -> None:
    graph = perceptron()
    with pytest.raises(CannotSplitError, match=r"not convex: %5 \(test.einsum\) outside lies on a path"):
        check(graph, along_batch(graph, [3, 4, 8]))


def test_partial_sums_may_leave_the_region_but_not_be_read_inside() -> None:
    graph = perceptron()
    region = fission(graph, [(4, 2), (5, 2), (7, -1)])
    check(graph, region)
    (last,) = [cut.of(graph.call(graph.nodes[n])) for n, cut in region.cuts.items() if n == 7]
    assert last.roles == (Reduce("sum"),)
    reader = fission(graph, [(9, 1)])
    with pytest.raises(CannotSplitError, match=r"not independent: %9 \(test.einsum\) reads the partial result of %7 "):
        check(graph, replace(region, region=region.region | {9}, cuts={**region.cuts, **reader.cuts}))
