"""Order: data, writes after reads, draws in eager's sequence."""

from __future__ import annotations

import pytest
from graphs import Builder, graphs, trained
from hypothesis import given, settings
from hypothesis import strategies as st

from magis.errors import InvalidGraphError
from magis.ir.args import Slot, Symbol, renumbered, slots, substitute
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, NodeId, Value, contiguous_strides
from magis.ir.structure import order_violation, predecessors, readers_before_write, topological_order

N = [NodeId(i) for i in range(12)]


def test_a_write_follows_every_reader_of_what_it_overwrites() -> None:
    before = predecessors(trained())
    assert before[N[5]] == (0, 2, 3, 4)  # the view and the product that reads through it
    assert before[N[3]] == (1, 2)


def test_readers_of_a_copied_view_come_before_the_write_too() -> None:
    graph = trained()
    edit = GraphEdit(graph)
    copy = edit.copy(N[2], "recomputed from")
    late = edit.add("aten.exp.default", [Value(copy)], [graph.nodes[N[4]].outputs[0]], (Slot(0),))
    assert predecessors(edit.finish())[N[5]] == (0, 2, 3, 4, copy, late)


def test_each_write_follows_the_readers_of_its_version() -> None:
    build = Builder()
    w, x = build.input("w", "parameter"), build.input()
    early = build.op("exp", w)
    once = build.write(w, x)
    between = build.op("neg", once)
    twice = build.write(once, between)
    late = build.op("sin", twice)
    graph = build.graph(early, late)
    assert readers_before_write(graph) == {once.node: (early.node,), twice.node: (between.node,)}
    assert topological_order(graph) == tuple(graph.nodes)
    assert order_violation(graph, (0, 1, 3, 2, 4, 5, 6)) is not None  # type: ignore[arg-type]


def test_without_writes_nothing_is_added() -> None:
    build = Builder()
    x = build.input()
    assert readers_before_write(build.graph(build.op("exp", x))) == {}


def test_draws_follow_each_other_and_copies_follow_the_first() -> None:
    build = Builder()
    x = build.input()
    second = build.op("rand", x, stream=5)
    first = build.op("rand", x, stream=2)
    again = build.op("rand", x, stream=5)
    before = predecessors(build.graph(second, first, again))
    assert before[second.node] == (x.node, first.node)
    assert before[first.node] == (x.node,)
    assert before[again.node] == (x.node, second.node)


def test_preferences_decide_among_ready_nodes() -> None:
    build = Builder()
    x = build.input()
    a, b = build.op("exp", x), build.op("neg", x)
    graph = build.graph(build.op("mul", a, b))
    assert topological_order(graph) == (0, 1, 2, 3)
    assert topological_order(graph, {N[2]: -1}) == (0, 2, 1, 3)
    with pytest.raises(InvalidGraphError, match="acyclic"):
        edit = GraphEdit(graph)
        edit.redirect(N[1], Value(N[0]), Value(N[3]))
        topological_order(edit.finish())


@settings(deadline=None, max_examples=60)
@given(graphs(), st.randoms(use_true_random=False))
def test_orders_are_valid_whatever_is_preferred(graph: Graph, chosen: object) -> None:
    rank = {node: chosen.randrange(50) for node in graph.nodes}  # type: ignore[attr-defined]
    try:
        order = topological_order(graph, rank)
    except InvalidGraphError:
        return  # random writes and draws may wait for each other
    assert order_violation(graph, order) is None


@pytest.mark.parametrize(
    ("order", "word"),
    [
        ((0, 1, 2, 3, 4, 5, 5), "twice"),
        ((0, 1, 2, 3, 4), "%5"),
        ((0, 1, 2, 3, 4, 9), "not in both"),
        ((1, 0, 3, 2, 4, 5), "%3"),
    ],
)
def test_violations_are_described(order: tuple[int, ...], word: str) -> None:
    assert word in str(order_violation(trained(), order))  # type: ignore[arg-type]


def test_users_and_inputs() -> None:
    graph = trained()
    assert graph.users[N[0]] == (2, 5)
    assert [node.name for node in graph.inputs] == ["w", "x"]
    assert [node.kind for node in graph.inputs] == ["parameter", "batch"]
    assert graph.nodes[N[3]].name == graph.nodes[N[3]].kind == ""
    call = graph.call(graph.nodes[N[5]])
    assert (len(call.inputs), call.outputs[0].writes) == (2, True)  # type: ignore[union-attr]


def test_a_node_may_have_a_smaller_number_than_its_producer() -> None:
    graph = trained()
    edit = GraphEdit(graph)
    copy = edit.copy(N[2], "copy of")
    edit.redirect(N[3], Value(N[2]), Value(copy))
    edited = edit.finish()
    ids = [node.id for node in edited.nodes_in_order()]
    assert ids.index(copy) < ids.index(N[3])
    assert edited.root(Value(copy)) == Value(N[0])


def test_templates() -> None:
    args = ((Slot(1), None), 2, Slot(0))
    kwargs = (("out", Slot(1)), ("device", Symbol("device", "cpu")))
    assert list(slots(args, kwargs)) == [1, 0, 1]
    assert substitute(args, lambda slot: slot.index * 10) == ((10, None), 2, 0)
    assert renumbered(args, {0: 5, 1: 7}) == ((Slot(7), None), 2, Slot(5))


def test_strides_of_empty_and_scalar_shapes() -> None:
    assert contiguous_strides(()) == ()
    assert contiguous_strides((2, 0, 3)) == (3, 3, 1)
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
