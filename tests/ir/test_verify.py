"""Each invariant is violated once, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from graphs import Builder, dense, trained, view

from magis.errors import InvalidGraphError
from magis.ir.args import Slot
from magis.ir.graph import Graph, Node, NodeId, Schedule, Value
from magis.ir.verify import INVARIANTS, verify


def changed(graph: Graph, node: int, **fields: object) -> Graph:
    """The graph with fields of one node replaced, past every check of an edit."""
    nodes = dict(graph.nodes)
    nodes[NodeId(node)] = replace(nodes[NodeId(node)], **fields)  # type: ignore[arg-type]
    return replace(graph, nodes=nodes)


def two_writers() -> Graph:
    build = Builder()
    w, x = build.input("w", "parameter"), build.input()
    build.write(w, x)
    build.write(w, x)
    return build.graph(x)


def writes_own_result() -> Graph:
    build = Builder()
    x = build.input()
    y = build.op("exp", x)
    build.write(y, x)
    return build.graph(x)


def two_calls_of_a_draw() -> Graph:
    build = Builder()
    x = build.input()
    build.op("bernoulli", x, stream=0)
    build.op("rand_like", x, stream=0)
    return build.graph(x)


VIOLATIONS: dict[str, tuple[str, Callable[[], Graph]]] = {
    "reads nothing": ("known values", lambda: changed(trained(), 3, inputs=(Value(NodeId(2), 1), Value(NodeId(1))))),
    "reads a removed node": ("known values", lambda: changed(trained(), 3, inputs=(Value(NodeId(9)),))),
    "reads what is no tensor": ("known values", lambda: changed(trained(), 2, outputs=(None,))),
    "returns nothing": ("known values", lambda: replace(trained(), outputs=(Value(NodeId(9)),))),
    "reads itself": (
        "acyclic",
        lambda: changed(trained(), 3, inputs=(Value(NodeId(4)), Value(NodeId(1)))),
    ),
    "slot left out": ("numbered slots", lambda: changed(trained(), 3, args=(Slot(0),))),
    "slots out of order": ("numbered slots", lambda: changed(trained(), 3, args=(Slot(1), Slot(0)))),
    "tensor listed twice": (
        "numbered slots",
        lambda: changed(trained(), 3, inputs=(Value(NodeId(1)), Value(NodeId(1)))),
    ),
    "input without a name": ("described inputs", lambda: changed(trained(), 1, args=("batch",))),
    "input of no kind": ("described inputs", lambda: changed(trained(), 1, args=("thing", "x"))),
    "write of nothing": ("views own nothing", lambda: changed(trained(), 4, outputs=(replace(dense(4), writes=True),))),
    "shares what it has not": ("views own nothing", lambda: changed(trained(), 2, outputs=(view(4, of=1),))),
    "view with bytes": (
        "views own nothing",
        lambda: changed(trained(), 2, outputs=(replace(view(4), storage_bytes=4),)),
    ),
    "beyond its storage": ("inside storage", lambda: changed(trained(), 2, outputs=(replace(view(4), offset=1),))),
    "larger than its storage": (
        "inside storage",
        lambda: changed(trained(), 4, outputs=(replace(dense(4), storage_bytes=8),)),
    ),
    "writes its own result": ("writes residents only", writes_own_result),
    "two writers": ("one writer a version", two_writers),
    "two calls of a draw": ("one call a draw", two_calls_of_a_draw),
    "outputs without names": ("named outputs", lambda: replace(trained(), output_names=())),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_violation_is_named(case: str) -> None:
    invariant, graph = VIOLATIONS[case]
    with pytest.raises(InvalidGraphError) as caught:
        verify(graph())
    assert caught.value.invariant == invariant


def test_every_invariant_is_violated_once() -> None:
    assert {invariant for invariant, _ in VIOLATIONS.values()} == set(INVARIANTS)


def test_a_good_graph_passes() -> None:
    graph = trained()
    verify(graph)
    verify(graph, tuple(graph.nodes))


@pytest.mark.parametrize(
    ("order", "invariant"),
    [
        ((0, 1, 2, 3, 4), "ordered"),
        ((0, 1, 2, 3, 4, 4), "ordered"),
        ((0, 1, 3, 2, 4, 5), "ordered"),
        ((0, 1, 2, 3, 5, 4), "ordered"),
        ((0, 1, 2, 5, 3, 4), "no read after write"),
    ],
)
def test_a_bad_order_is_named(order: Schedule, invariant: str) -> None:
    with pytest.raises(InvalidGraphError) as caught:
        verify(trained(), order)
    assert caught.value.invariant == invariant


def test_a_read_after_the_write_is_named() -> None:
    build = Builder()
    w, x = build.input("w", "parameter"), build.input()
    seen = build.op("exp", w)
    build.write(w, x)
    graph = build.graph(seen)
    verify(graph, (0, 1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(InvalidGraphError, match="no read after write"):
        verify(graph, (0, 1, 3, 2))  # type: ignore[arg-type]


def test_a_cycle_through_a_write_is_found() -> None:
    build = Builder()
    w, x = build.input("w", "parameter"), build.input()
    new = build.write(w, x)
    reader = build.op("mul", w, new)  # reads the weight before and after: it must precede what it follows
    with pytest.raises(InvalidGraphError, match="acyclic"):
        verify(build.graph(reader))


def test_writes_in_turn_are_versions() -> None:
    build = Builder()
    w, x = build.input("w", "parameter"), build.input()
    once = build.write(w, x)
    twice = build.write(once, x)
    graph = build.graph(twice)
    verify(graph)
    assert [graph.version(v) for v in (w, once, twice)] == [0, 1, 2]
    assert graph.root(twice) == w


def test_empty_tensors_are_inside_any_storage() -> None:
    build = Builder()
    x = build.input()
    y = build.op("slice", x, spec=replace(view(0), offset=4))
    verify(build.graph(y))
    assert isinstance(build.graph(y).nodes[y.node], Node)
