"""What is printed reads back the same; what cannot be read is named by its line."""

from __future__ import annotations

import pytest
from graphs import Builder, graphs, trained
from hypothesis import given, settings

from magis.errors import PlanError
from magis.ir.args import Slot
from magis.ir.fingerprint import digest
from magis.ir.graph import Graph, Origin
from magis.ir.text import parse_graph, print_graph


@settings(deadline=None, max_examples=200)
@given(graphs())
def test_round_trip(graph: Graph) -> None:
    text = print_graph(graph)
    again = parse_graph(text)
    assert again == graph
    assert print_graph(again, origins=False) == print_graph(graph, origins=False)
    assert digest(again) == digest(graph)


def test_origins_come_back() -> None:
    build = Builder()
    x = build.input()
    build.op("exp", x, origin=Origin("encoder.0", "net.py:3", "backward"))
    (node,) = [node for node in parse_graph(print_graph(build.graph(x))).nodes.values() if not node.is_input]
    assert node.origin == Origin("encoder.0", "net.py:3", "backward")


def test_origins_stay_on_their_line() -> None:
    build = Builder()
    x = build.input()
    y = build.op("exp", x, origin=Origin("two\nlines # | x", "net.py\r:3"))
    graph = build.graph(y)
    assert len(print_graph(graph).splitlines()) == 5
    assert parse_graph(print_graph(graph)) == graph


def test_notes_are_printed_and_ignored() -> None:
    graph = trained()
    text = print_graph(graph, notes={3: "16 KiB, live 2..6"})  # type: ignore[dict-item]
    assert "16 KiB, live 2..6" in text.splitlines()[4]
    assert parse_graph(text) == graph


def test_the_look_of_it() -> None:
    assert print_graph(trained()) == (
        'graph "graph" {\n'
        '  %0 = input("parameter", "w") : f32[4]\n'
        '  %1 = input("batch", "x") : f32[4]\n'
        "  %2 = aten.view.default(%0) : f32[4]&0\n"
        "  %3 = aten.mul.default(%2, %1) : f32[4]\n"
        "  %4 = aten.neg.default(%3) : f32[4]\n"
        "  %5 = aten.copy_.default(%0, %4) : f32[4]&0!\n"
        '  return "out0"=%3\n'
        "}\n"
    )


def test_a_nan_comes_back() -> None:
    build = Builder()
    x = build.input()
    y = build.edit.add("aten.full.default", (), [None], (float("nan"), complex(0, float("nan"))))
    args = parse_graph(print_graph(build.graph(x))).nodes[y].args
    assert repr(args) == "(nan, complex(0, nan))" or repr(args) == "(nan, nanj)"


LINES = print_graph(trained()).splitlines()


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (1, "graph trained {"),
        (3, '  %1 = input("batch, "x") : f32[4]'),
        (4, "  %2 = aten.view.default(%0 : f32[4]&0"),
        (4, "  %2 = aten.view.default(%0) : q7[4]"),
        (4, "  %2 = aten.view.default(%0) : f32[4"),
        (4, "  %2 = aten.view.default(%0)"),
        (4, "  %2 = aten.view.default(%0, @) : f32[4]"),
        (4, "  %2 = aten.view.default(%0 7) : f32[4]"),
        (4, "  %2 = aten.view.default(%0, (1, 2) : f32[4]"),
        (4, "  %2 = aten.view.default(%0, unknown) : f32[4]"),
        (4, "  %2 = aten.view.default(%0, complex(1, x)) : f32[4]"),
        (4, "  %2 = aten.view.default(%0, complex(1)) : f32[4]"),
        (4, "something else"),
        (8, '  return "out0"=3'),
        (8, '  return "out0"=%3, rubbish'),
    ],
)
def test_errors_name_their_line(number: int, line: str) -> None:
    text = "\n".join([*LINES[: number - 1], line, *LINES[number:]])
    with pytest.raises(PlanError, match=rf"^line {number} of the program cannot be read"):
        parse_graph(text)


@pytest.mark.parametrize("text", ["", "\n", "\n".join(LINES[:-1]), 'graph "x" {'])
def test_cut_off_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="cut off"):
        parse_graph(text)


def test_a_node_defined_twice_is_refused() -> None:
    text = "\n".join([*LINES[:4], LINES[3], *LINES[4:]])
    with pytest.raises(PlanError, match=r"^line 5 .*%2"):
        parse_graph(text)


def test_a_tensor_taken_twice_has_one_slot() -> None:
    build = Builder()
    x = build.input()
    y = build.edit.add("aten.mul.Tensor", (x, x), [None], (Slot(0), Slot(1)))
    node = parse_graph(print_graph(build.graph(x))).nodes[y]
    assert (node.inputs, node.args) == ((x,), (Slot(0), Slot(0)))
