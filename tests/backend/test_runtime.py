"""Generated code runs as eager does: same bits, same generator, no tensor kept alive, errors that say where."""

from __future__ import annotations

import gc
import linecache
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from builder import Recorded, record
from magis.backend.meters import storage_peak
from magis.backend.runtime import compile_routine
from magis.errors import InvalidGraphError, UsageError
from magis.fission.tree import Program
from magis.ir.edit import GraphEdit
from magis.ir.graph import NodeId, Value
from magis.ir.structure import topological_order
from magis.lower.lower import lower
from magis.lower.routine import Free, Piece, Routine, expand
from magis.sim.simulate import simulate
from magis.sim.timeline import no_latency
from routines import LOOPS, RoutineBuilder


def run(routine: Routine, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return compile_routine(routine)(list(inputs))


def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


def measured(routine: Routine, inputs: list[torch.Tensor]) -> int:
    step = compile_routine(routine)
    with torch.no_grad():
        return storage_peak(lambda: step(list(inputs)), inputs).step_peak_bytes


def predicted(routine: Routine) -> int:
    return simulate(routine, no_latency).step_peak_bytes


def mlp(w: torch.Tensor, b: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss = F.gelu(F.linear(x, w, b)).matmul(v).square().mean()
    grads = torch.autograd.grad(loss, (w, b, v))
    return loss.detach(), *grads


def attention(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = F.linear(x, w).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    loss = F.layer_norm(mixed, (8,), g).sum()
    return loss.detach(), *torch.autograd.grad(loss, (w, g))


def convolution(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = F.max_pool2d(F.conv2d(x, w, padding=1).relu(), 2)
    loss = F.interpolate(y, scale_factor=2.0).square().mean()
    return loss.detach(), *torch.autograd.grad(loss, (w,))


def classification(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss = F.cross_entropy(x @ w, y)
    return loss.detach(), *torch.autograd.grad(loss, (w,))


def update(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    loss = (x @ w).sin().sum()
    (gradient,) = torch.autograd.grad(loss, (w,))
    with torch.no_grad():
        w.add_(gradient, alpha=-0.01)
    return loss.detach()


def odd_results(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    (only,) = x.split([6])
    first, _, third = x.chunk(3, 1)
    whole, _ = x.max(0)
    nothing = x[:0].exp()
    largest = torch.topk(x, 2)[1]
    return only.exp(), first + third, whole, nothing, largest, torch.cat([x, x], 1), x[[1, 0], :]


def literals(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inf = torch.full((2,), float("inf"))
    minus = torch.full_like(x, -float("inf"), dtype=torch.float64, memory_format=torch.contiguous_format)
    nan = torch.full((), float("nan"), device="cpu", layout=torch.strided)
    turned = torch.full((2,), complex(1, -2)) * complex(float("inf"), 0.5)
    return inf, minus, nan.isnan(), turned.isinf(), F.gelu(x, approximate="tanh"), x.to(torch.bfloat16), x.sum(1, True)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "mlp": (mlp, lambda: [leaf(8, 6), leaf(8), leaf(8, 2), torch.randn(4, 6)]),
    "attention": (attention, lambda: [torch.randn(2, 5, 8), leaf(24, 8), leaf(8)]),
    "convolution": (convolution, lambda: [torch.randn(2, 3, 8, 8), leaf(4, 3, 3, 3)]),
    "channels last": (
        convolution,
        lambda: [torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), leaf(4, 3, 3, 3)],
    ),
    "classification": (classification, lambda: [torch.randn(6, 5), leaf(5, 3), torch.tensor([0, 2, 1, 1, -100, 0])]),
    "update": (update, lambda: [leaf(4, 3), torch.randn(5, 4)]),
    "odd results": (odd_results, lambda: [torch.randn(6, 6)]),
    "literals": (literals, lambda: [torch.randn(3, 2)]),
}


def recorded(name: str) -> Recorded:
    torch.manual_seed(0)
    code, inputs = CASES[name]
    return record(code, inputs())


@pytest.mark.parametrize("name", CASES)
def test_results_equal_eager_bitwise(name: str) -> None:
    code, _ = CASES[name]
    taken = recorded(name)
    eager_inputs = taken.fresh_inputs()
    ours_inputs = taken.fresh_inputs()
    for tensor in (*eager_inputs, *ours_inputs):
        tensor.requires_grad_(tensor.dtype.is_floating_point)
    expected = code(*eager_inputs[: len(CASES[name][1]())])
    ours = run(taken.routine(), ours_inputs)
    assert same(ours, expected if isinstance(expected, tuple) else (expected,))
    assert same(tuple(ours_inputs), tuple(eager_inputs))  # updates included


@pytest.mark.parametrize("name", CASES)
def test_predicted_peak_is_the_measured_one(name: str) -> None:
    taken = recorded(name)
    assert measured(taken.routine(), taken.fresh_inputs()) == predicted(taken.routine())


@pytest.mark.parametrize("name", LOOPS)
def test_loops_compute_the_whole(name: str) -> None:
    routine, inputs, whole = LOOPS[name]()
    torch.manual_seed(7)
    expected = whole(*inputs)
    state = torch.default_generator.get_state()
    torch.manual_seed(7)
    ours = run(routine, inputs)
    assert torch.equal(torch.default_generator.get_state(), state)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    torch.manual_seed(7)
    assert same(ours, run(expand(routine), inputs))


@pytest.mark.parametrize("name", LOOPS)
def test_loops_predict_the_measured_peak(name: str) -> None:
    routine, inputs, _ = LOOPS[name]()
    assert measured(routine, inputs) == predicted(routine) == measured(expand(routine), inputs)


def dropped_twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, _ = torch.native_dropout(x, 0.5, True)
    second, _ = torch.native_dropout(x, 0.5, True)
    return first.exp(), second.exp(), first.neg(), torch.bernoulli(x.sigmoid())


def test_a_recomputed_draw_gives_the_same_numbers() -> None:
    taken = record(dropped_twice, [torch.randn(64)])
    edit = GraphEdit(taken.graph)
    copies = [edit.copy(NodeId(1), "again") for _ in range(2)]
    edit.redirect(NodeId(5), Value(NodeId(1)), Value(copies[0]))
    edit.set_outputs([*taken.graph.outputs, Value(copies[1], 1)], [*taken.graph.output_names, "mask"])
    graph = edit.finish()
    late = dict.fromkeys(copies, 100)
    routine = lower(Program(graph), topological_order(graph, late))
    torch.manual_seed(5)
    expected = dropped_twice(*taken.inputs)
    after_eager = torch.rand(3)
    torch.manual_seed(5)
    *ours, mask = run(routine, taken.inputs)
    assert torch.equal(torch.rand(3), after_eager)
    assert same(tuple(ours), expected)
    assert torch.equal(mask, expected[0] != 1)
    source = compile_routine(routine).source
    assert source.count("random_state(cpu)") == 3  # one record, two replays
    assert source.index("del draw0") > source.rindex("set_random_state(cpu, current)")


def test_a_state_recorded_before_a_loop_is_kept_until_after_it() -> None:
    build = RoutineBuilder()
    x = build.input(torch.ones(16))
    build.draw = (4, True, False)
    first = build.op("aten.native_dropout.default", x, 0.5, True)[0]
    out = build.allocate((3, 16))
    build.draw = (5, False, False)
    build.op("aten.native_dropout.default", x, 0.5, True)
    with build.loop(3):
        build.draw = (4, False, True)
        again = build.op("aten.native_dropout.default", x, 0.5, True)[0]
        row = build.op("aten.unsqueeze.default", again, 0)
        build.write(out, row, Piece(0, 1))
    routine = build.routine(first, out)
    once, rows = run(routine, [torch.ones(16)])
    assert all(torch.equal(once, row) for row in rows)
    assert compile_routine(routine).source.rstrip().splitlines()[-2] == "    del draw4"


def test_the_callers_list_is_emptied_and_nothing_is_kept() -> None:
    taken = recorded("mlp")
    step = compile_routine(taken.routine())
    tensors = taken.fresh_inputs()
    gone = weakref.ref(tensors[3])
    with torch.no_grad():
        results = step(tensors)
    assert tensors == []
    del results
    gc.collect()
    assert gone() is None


def test_wrong_number_of_inputs_is_refused() -> None:
    step = compile_routine(recorded("mlp").routine())
    with pytest.raises(UsageError, match="takes 4 tensors, not 1"):
        step([torch.zeros(1)])


def test_malformed_routine_is_refused() -> None:
    routine = recorded("mlp").routine()
    twice = Routine(**{**routine.__dict__, "body": (*routine.body, Free((99,)))})
    with pytest.raises(InvalidGraphError, match="register 99"):
        compile_routine(twice)


def test_errors_name_the_module_and_show_the_generated_line() -> None:
    taken = record(lambda x, y: (x @ y).exp(), [torch.randn(2, 3), torch.randn(3, 2)], module="encoder.layer.0.out")
    step = compile_routine(taken.routine())
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        step([torch.randn(2, 3), torch.randn(2, 3)])
    (note,) = caught.value.__notes__
    assert note.startswith("in node %2 of encoder.layer.0.out, <magis recorded ")
    shown = "".join(traceback.format_exception(caught.value))
    assert "layer_0_out_2 = mm(in0_0, in1_1)" in shown


def test_generated_lines_go_with_the_step() -> None:
    step = compile_routine(recorded("mlp").routine())
    filename = step.filename
    assert linecache.getline(filename, 2) == "def step(inputs):\n"
    del step
    gc.collect()
    assert filename not in linecache.cache
