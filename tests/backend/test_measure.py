from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from magis.aten.convert import literal, overload, spec_of
from magis.backend import measure
from magis.backend.measure import Measurer, environment, measure_call, measured_cost, processor_name
from magis.backend.operands import arguments, extent, index_bound, operand_bytes, operands
from magis.backend.slicing import with_fewer_rows
from magis.cost.calibrate import work
from magis.cost.profile import ProfileCache
from magis.ir.args import Slot, Symbol
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.rule import dense

aten = torch.ops.aten
f = torch.randn


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(function: Any, *args: Any) -> Call:
    """The call of an operator on real tensors, its results included."""
    tensors: list[torch.Tensor] = []

    def template(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return Slot(len(tensors) - 1)
        if isinstance(value, list):
            return tuple(template(item) for item in value)
        return literal(value)

    literals = tuple(template(value) for value in args)
    result = function(*args)
    results = result if isinstance(result, (tuple, list)) else (result,)
    outputs = tuple(spec_of(r) if isinstance(r, torch.Tensor) else None for r in results)
    return Call(str(function), literals, (), tuple(map(spec_of, tensors)), outputs)


def convolution(batch: int) -> Call:
    x, w, b = f(batch, 8, 14, 14), f(16, 8, 3, 3), f(16)
    return made(aten.convolution.default, x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def convolution_backward(batch: int) -> Call:
    g, x, w = f(batch, 16, 14, 14), f(batch, 8, 14, 14), f(16, 8, 3, 3)
    flags = [True, True, True]
    return made(aten.convolution_backward.default, g, x, w, [16], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, flags)


def layer_norm_backward(rows: int) -> Call:
    x, w, b = f(rows, 7, 32), f(32), f(32)
    _, mean, rstd = aten.native_layer_norm.default(x, [32], w, b, 1e-5)
    return made(aten.native_layer_norm_backward.default, x, x, [32], mean, rstd, w, b, [True, True, True])


def attention(batch: int) -> Call:
    q = f(batch, 2, 16, 8)
    return made(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q.clone(), q.clone(), 0.0, False)


def attention_backward(batch: int) -> Call:
    q, k, v = f(batch, 2, 16, 8), f(batch, 2, 16, 8), f(batch, 2, 16, 8)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)
    function = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return made(function, torch.ones_like(out), q, k, v, out, lse, 0.0, False)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


ROWS = 24
CALLS = {
    "mm": lambda n: made(aten.mm.default, f(n, 32), f(32, 24)),
    "mm of a transposed matrix": lambda n: made(aten.mm.default, f(64, n).t(), f(64, 48)),
    "square mm": lambda n: made(aten.mm.default, f(n, n), f(n, n)),
    "bf16 mm": lambda n: made(aten.mm.default, f(n, 32).bfloat16(), f(32, 24).bfloat16()),
    "addmm": lambda n: made(aten.addmm.default, f(24), f(n, 32), f(32, 24)),
    "bmm": lambda n: made(aten.bmm.default, f(n, 4, 8), f(n, 8, 4)),
    "convolution": convolution,
    "convolution backward": convolution_backward,
    "layer norm": lambda n: made(aten.native_layer_norm.default, f(n, 32), [32], f(32), f(32), 1e-5),
    "layer norm backward": layer_norm_backward,
    "batch norm": lambda n: made(aten._native_batch_norm_legit.no_stats, f(n, 6, 4, 4), f(6), f(6), True, 0.1, 1e-5),
    "softmax": lambda n: made(aten._softmax.default, f(n, 5, 16), -1, False),
    "gelu": lambda n: made(aten.gelu.default, f(n, 5)),
    "add with broadcasting": lambda n: made(aten.add.Tensor, f(n, 5, 3), f(5, 3)),
    "where": lambda n: made(aten.where.self, f(n, 5) > 0, f(n, 5), f(n, 5)),
    "sum": lambda n: made(aten.sum.dim_IntList, f(n, 5, 3), [0, 1]),
    "embedding": lambda n: made(aten.embedding.default, f(50, 8), ids(50, n, 6)),
    "embedding backward": lambda n: made(
        aten.embedding_dense_backward.default, f(n, 6, 8), ids(50, n, 6), 50, -1, False
    ),
    "loss": lambda n: made(aten.nll_loss_forward.default, f(n, 9), ids(9, n), None, 1, -100),
    "loss backward": lambda n: made(
        aten.nll_loss_backward.default, f(()), f(n, 9), ids(9, n), None, 1, -100, torch.tensor(float(n))
    ),
    "gather": lambda n: made(aten.gather.default, f(n, 9), 1, ids(9, n, 2)),
    "pooling backward": lambda n: made(
        aten.max_pool2d_with_indices_backward.default,
        f(n, 2, 4, 4),
        f(n, 2, 8, 8),
        [2, 2],
        [2, 2],
        [0, 0],
        [1, 1],
        False,
        ids(64, n, 2, 4, 4),
    ),
    "attention": attention,
    "attention backward": attention_backward,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_on_made_up_operands(name: str) -> None:
    found = measure_call(CALLS[name](ROWS))
    assert found is not None, name
    assert 0 < found.latency_s < 1
    assert found.spread_s >= 0
    assert found.runs == measure.RUNS
    assert not found.scaled
    assert 0 <= found.workspace_bytes < 10_000_000


@pytest.mark.parametrize("name", CALLS)
def test_a_slice_of_a_call_is_the_call_on_fewer_rows(name: str) -> None:
    whole = CALLS[name](ROWS)
    part = with_fewer_rows(whole, 0.35)
    if name == "embedding backward":  # the gradient of the table keeps its size, and is most of the work
        assert part is not None and work(part).size < work(whole).size  # type: ignore[union-attr]
        return
    assert part is not None, name
    if name != "square mm":
        expected = CALLS[name](8)
        assert (part.op, part.args, part.kwargs) == (expected.op, expected.args, expected.kwargs)
        assert [(s.shape, s.strides, s.dtype) for s in part.inputs] == [
            (s.shape, s.strides, s.dtype) for s in expected.inputs
        ]
        assert [s and s.shape for s in part.outputs] == [s and s.shape for s in expected.outputs]
    assert measure_call(part) is not None
    small, large = work(part), work(whole)
    assert small is not None and large is not None
    assert 0.2 < small.size / large.size < 0.8


@pytest.mark.parametrize(
    "call",
    [
        made(aten.gelu.default, f(1, 5)),
        made(aten.sum.default, f(())),
        Call("aten.full.default", ((8, 3), 1.0), (), (), (dense((8, 3)),)),
        Call("aten.no_such_operator.default", (Slot(0),), (), (dense((8, 3)),), (dense((8, 3)),)),
        Call("aten.view.default", (Slot(0), (24,)), (), (dense((8, 3)),), (dense((24,)),)),
    ],
    ids=lambda call: call.op,
)
def test_a_call_that_has_no_slice(call: Call) -> None:
    assert with_fewer_rows(call, 0.5) is None


def test_operands_have_the_layout_and_valid_values() -> None:
    strided = replace(dense((4, 3)), strides=(1, 5), offset=19)
    call = Call(
        "aten.mul.Tensor", (Slot(0), Slot(1)), (), (strided, replace(strided, strides=(0, 1))), (dense((4, 3)),)
    )
    first, expanded = operands(call)
    assert (first.shape, first.stride(), first.storage_offset()) == ((4, 3), (1, 5), 3)
    assert (expanded.stride(), extent(call.inputs[1])) == ((0, 1), 3)
    assert operand_bytes(call) == 4 * (14 + 3 + 12)
    assert float(first.abs().max()) <= 1
    assert torch.equal(first, operands(call)[0])
    state = torch.get_rng_state()
    operands(call)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [t for t in DType if not t.value.startswith("f8")], ids=lambda t: t.value)
def test_operands_of_every_type(dtype: DType) -> None:
    spec = dense((1030, 1025), dtype)
    (tensor,) = operands(Call("aten.clone.default", (Slot(0),), (), (spec,), (spec,)))
    assert spec_of(tensor) == spec
    if dtype.is_floating:
        assert float(tensor.double().std()) == pytest.approx(3**-0.5, rel=0.02)
        assert torch.equal(tensor.view(-1)[1 << 20 :], tensor.view(-1)[: tensor.numel() - (1 << 20)])


def test_the_bounds_of_indices() -> None:
    bounds = {name: call(ROWS) for name, call in CALLS.items()}
    assert index_bound(bounds["embedding"], 1) == 50
    assert index_bound(bounds["embedding backward"], 1) == 50
    assert index_bound(bounds["loss"], 1) == index_bound(bounds["loss backward"], 2) == 9
    assert index_bound(bounds["gather"], 1) == 9
    assert index_bound(bounds["pooling backward"], 2) == 64
    assert index_bound(bounds["where"], 0) == 2
    index = made(aten.index.Tensor, f(7, 5, 3), [None, ids(5, 4)])
    assert index_bound(index, 1) == 5
    unknown = Call("aten.searchsorted.Tensor", (Slot(0),), (), (dense((3,), DType.I64),), (None,))
    assert index_bound(unknown, 0) == 1


def test_literals_become_what_pytorch_takes() -> None:
    spec = dense((2,))
    kwargs = (("dtype", DType.BF16), ("device", Symbol("device", "cpu")))
    args, named = arguments(Call("aten.any", (Slot(0), (1, None)), kwargs, (spec,), (None,)), [torch.ones(2)])
    assert torch.equal(args[0], torch.ones(2))
    assert args[1] == [1, None]
    assert named == {"dtype": torch.bfloat16, "device": torch.device("cpu")}


@pytest.mark.parametrize(
    "call",
    [
        Call("aten.no_such_operator.default", (Slot(0),), (), (dense((3,)),), (dense((3,)),)),
        Call("swap.store", (Slot(0),), (), (dense((3,)),), (dense((3,)),)),
        Call("aten.mm.default", (Slot(0), Slot(1)), (), (dense((3, 4)), dense((3, 4))), (dense((3, 4)),)),
    ],
    ids=lambda call: call.op,
)
def test_a_call_that_cannot_run_is_no_error(call: Call) -> None:
    assert measure_call(call) is None


def test_measuring_leaves_the_random_generator_as_it_was() -> None:
    dropout = made(aten.native_dropout.default, f(100), 0.5, True)
    state = torch.get_rng_state()
    assert measure_call(dropout) is not None
    assert torch.equal(state, torch.get_rng_state())


def test_a_write_in_place_stays_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(measure, "operands", lambda *given: seen.extend(operands(*given)) or seen[:])
    spec = dense((10,))
    out = replace(spec, alias_of=0, writes=True, storage_bytes=0)
    found = measure_call(Call("aten.add_.Tensor", (Slot(0), Slot(1)), (("alpha", -0.01),), (spec, spec), (out,)))
    assert found is not None and found.workspace_bytes == 0
    assert all(torch.isfinite(tensor).all() for tensor in seen)


@pytest.mark.parametrize("older", [True, False], ids=["older profiler", "torch.profiler"])
def test_workspace_is_the_peak_beyond_the_results(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not older:
        monkeypatch.setattr(measure, "_allocations", lambda run: None)
    every_other = made(aten.mm.default, f(300, 128)[:, ::2], f(64, 10))  # copied first: BLAS cannot skip columns
    copied = measure_call(every_other)
    assert copied is not None and copied.workspace_bytes == pytest.approx(300 * 64 * 4, abs=256)
    plain = measure_call(made(aten.gelu.default, f(1000)))
    assert plain is not None and plain.workspace_bytes <= 256


def test_what_a_measurement_depends_on() -> None:
    here = environment()
    assert (here.device, here.threads, here.torch) == ("cpu", 1, torch.__version__)
    assert here.processor == processor_name() != ""
    torch.set_num_threads(2)
    assert environment() == replace(here, threads=2)


def test_costs_of_this_machine_from_end_to_end(tmp_path: Path) -> None:
    calls = [CALLS["mm"](64), CALLS["gelu"](64), CALLS["layer norm"](64)]
    path = tmp_path / "costs.sqlite"
    costs = measured_cost(cache=ProfileCache(path))
    assert costs.prepare(calls).calls == {"measured": 3}
    again = measured_cost(cache=ProfileCache(path))
    assert [again.latency_s(c) for c in calls] == [costs.latency_s(c) for c in calls]
    assert again.table_hash() == costs.table_hash()
    assert again.coverage([CALLS["mm"](32)]).calls == {"interpolated": 1}


def test_a_measurer_knows_its_calls() -> None:
    measurer = Measurer()
    call = CALLS["mm"](24)
    assert measurer.operand_bytes(call) == 4 * (24 * 32 + 32 * 24 + 24 * 24)
    part = measurer.with_fewer_rows(call, 0.5)
    assert part is not None and part.outputs[0] is not None and part.outputs[0].shape == (8, 24)
    assert overload(part.op) is aten.mm.default


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_call_on_a_cuda_device() -> None:
    found = measure_call(CALLS["mm"](256), "cuda")
    assert found is not None and found.latency_s > 0
    assert environment("cuda").processor != processor_name()
