"""The generated text: readable, and free of words of the plan."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
import torch

from builder import record
from magis.backend.codegen import generate
from magis.backend.printing import Printer
from magis.errors import PlanError
from magis.ir.args import Slot, Symbol
from magis.ir.dtype import DType
from magis.ir.graph import Call, NodeId, Origin
from magis.lower.routine import Compute, Free, Loop, Routine
from magis.ops.rule import dense
from routines import mlp_by_batch, tiles

F4 = dense((4,))


def one(call: Call, origin: Origin = Origin(), name: str = "one", input_name: str = "x") -> Routine:
    body = (Compute(NodeId(1), call, (0,), (1,), origin),)
    return Routine(name, (0,), (F4,), (0,), body, (1,), ("y",), {}, (input_name,))


def exp(*args: Any, **kwargs: Any) -> Call:
    return Call("aten.exp.default", args, tuple(kwargs.items()), (F4,), (F4,))


def test_a_small_step_reads_well() -> None:
    def code(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        values, _ = (x @ w).max(1)
        return values.relu()

    routine = record(code, [torch.randn(2, 3), torch.randn(3, 4)], module="encoder.layer.0.dense").routine()
    assert generate(routine).text == (
        "# recorded | 2 inputs\n"
        "def step(inputs):\n"
        "    (in0_0, in1_1) = inputs\n"
        "    inputs.clear()\n"
        "    # encoder.layer.0.dense\n"
        "    layer_0_dense_2 = mm(in0_0, in1_1)\n"
        "    layer_0_dense_3, _ = max(layer_0_dense_2, 1)\n"
        "    del layer_0_dense_2, _\n"
        "    layer_0_dense_5 = relu(layer_0_dense_3)\n"
        "    del layer_0_dense_3\n"
        "    return (layer_0_dense_5,)\n"
    )


def test_loops_read_well() -> None:
    text = generate(tiles()[0]).text
    assert "    for part in range(2):\n        in0_4 = in0_0.narrow(0, part * 2, 2)\n" in text
    assert "        # columns\n        for part2 in range(3):\n" in text
    assert "            whole_5.narrow(1, part2 * 2, 2).copy_(mm_8)\n" in text
    uneven = generate(mlp_by_batch(10, 3, 1)[0]).text
    assert "total_4 = torch.full([], 0, dtype=torch.float32, device=cpu)" in uneven
    assert "in0_0.narrow(0, 9 + part * 1, 1)" in uneven


def test_an_empty_loop_is_python() -> None:
    ast.parse(generate(Routine("empty", (), (), (), (Loop(3, (Loop(2, ()),)),), (), (), {})).text)


def test_long_lists_are_broken_into_lines() -> None:
    inputs = [torch.randn(1) for _ in range(40)]
    text = generate(record(lambda *xs: xs, inputs).routine()).text
    ast.parse(text)
    assert max(map(len, text.splitlines())) <= 116


def test_operators_of_one_name_are_told_apart() -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        y = (x + x).add(x).mul(2.0)
        return torch.ops.aten.add.Scalar(y, 3).sum() + y.sum(0).sum()

    text = generate(record(code, [torch.randn(2, 2)]).routine()).text
    assert "= add(in0_0, in0_0)" in text
    assert "add_Scalar(" in text
    assert "= sum(" in text and "= sum_dim_IntList(" in text


def test_in_place_writes_are_statements() -> None:
    def code(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        w.add_(g, alpha=-0.5)
        return g.sum()

    assert (
        "\n    add_(in0_0, in1_1, alpha=-0.5)\n"
        in generate(record(code, [torch.ones(2), torch.ones(2)]).routine()).text
    )


EVIL = '"\n    import os; os.abort()\n#\x0c\r\u2028'


def test_no_words_of_the_plan_become_code() -> None:
    routine = one(exp(), Origin(EVIL, EVIL, EVIL), EVIL, EVIL)
    text = generate(replace(routine, body=(Loop(1, (), EVIL), *routine.body))).text
    tree = ast.parse(text)
    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))
    assert all(line.isprintable() for line in text.split("\n"))


def test_strings_are_literals() -> None:
    found = Printer().literal((EVIL, "it's"), [])
    assert ast.literal_eval(found) == [EVIL, "it's"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (0.1, "0.1"),
        (float("inf"), "inf"),
        (-float("inf"), "-inf"),
        (float("nan"), "nan"),
        (complex(1, -2), "complex(1.0, -2.0)"),
        (complex(float("inf"), 0), "complex(inf, 0.0)"),
        ((1, (2, None), ()), "[1, [2, None], []]"),
        (DType.BF16, "torch.bfloat16"),
        (Symbol("memory_format", "channels_last"), "torch.channels_last"),
        (Symbol("layout", "strided"), "torch.strided"),
        (Symbol("device", "cuda:1"), "cuda_1"),
        (Symbol("device", "cpu"), "cpu"),
    ],
)
def test_literals_evaluate_to_what_they_stand_for(value: Any, text: str) -> None:
    from magis.aten.convert import python_literal

    printer = Printer()
    assert printer.literal(value, []) == text
    made = eval(text, dict(printer.names))
    expected = python_literal(value)
    assert type(made) is type(expected)
    assert made == expected or made != made


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (replace(exp(), op="aten.no_such_thing.default"), "no operator"),
        (replace(exp(), op="os.abort.default"), "no operator"),
        (replace(exp(), op="aten.exp.__class__"), "not an operator"),
        (exp(**{"x=1); import os; (y": 1}), "takes no argument named"),
        (exp(Symbol("device", "abacus")), "no device"),
        (exp(Symbol("memory_format", "load")), "no memory_format"),
        (exp(Symbol("layout", "os.abort()")), "no layout"),
        (exp(object()), "no literal form"),
    ],
)
def test_what_pytorch_does_not_have_is_refused(call: Call, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        generate(one(call))


def test_lines_know_their_nodes() -> None:
    source = generate(one(exp(), Origin("block", "net.py:3")))
    ((line, (node, origin)),) = source.nodes.items()
    assert source.text.splitlines()[line - 1].strip() == "block_1 = exp()"
    assert (node, origin.line) == (1, "net.py:3")


def test_a_result_dropped_by_its_own_call_needs_no_name() -> None:
    routine = replace(one(exp()), outputs=(), body=(one(exp()).body[0], Free((1,))))
    assert "\n    exp()\n    return ()\n" in generate(routine).text


def test_what_a_kernel_returns_unasked_is_dropped_at_once() -> None:
    """Convolution's backward pass may hand back a weight gradient when only the bias gradient was asked for."""
    image, weight = dense((2, 3, 8, 8)), dense((4, 3, 3, 3))
    gradient, bias = dense((2, 4, 6, 6)), dense((4,))
    args = (Slot(0), Slot(1), Slot(2), (4,), (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (False, False, True))
    call = Call("aten.convolution_backward.default", args, (), (gradient, image, weight), (None, None, bias))
    body = (Compute(NodeId(3), call, (0, 1, 2), (None, None, 3), Origin()),)
    specs = (gradient, image, weight)
    routine = Routine("bias", (0, 1, 2), specs, (0, 1, 2), body, (3,), ("bias",), {}, ("g", "x", "w"))
    lines = generate(routine).text.splitlines()
    place = next(i for i, line in enumerate(lines) if "convolution_backward(" in line)
    assert lines[place].strip().startswith("_, _, ")
    assert lines[place + 1].strip() == "del _"
