"""Launches, bytes and products of operators whose cost the device model fixes, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from magis.ir.args import Arg, Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call, TensorSpec
from magis.ops.registry import rule_for, rules
from magis.ops.rule import Gemm, dense

F32, BF16, I64 = DType.F32, DType.BF16, DType.I64


def t(*shape: int, dtype: DType = F32) -> TensorSpec:
    return dense(shape, dtype)


def call(op: str, args: tuple[Any, ...], *outputs: TensorSpec | None, **kwargs: Any) -> Call:
    """A call with types where its tensors go."""
    inputs: list[TensorSpec] = []

    def template(value: Any) -> Arg:
        if isinstance(value, TensorSpec):
            inputs.append(value)
            return Slot(len(inputs) - 1)
        return tuple(map(template, value)) if isinstance(value, tuple) else value

    written = tuple(template(value) for value in args)
    return Call(f"aten.{op}", written, tuple(kwargs.items()), tuple(inputs), outputs)


def kernel(made: Call) -> tuple[int, tuple[Gemm, ...]]:
    """Bytes and products of its only launch."""
    (only,) = rule_for(made.op).kernels(made)
    return only.nbytes, only.gemms


def test_product_with_bias() -> None:
    made = call("addmm.default", (t(7), t(3, 5), t(5, 7)), t(3, 7))
    assert kernel(made) == (4 * (7 + 15 + 35 + 21), (Gemm(1, 3, 7, 5),))
    assert rule_for(made.op).terms(made, 0) == 6


def test_batched_product_in_half_precision() -> None:
    made = call("bmm.default", (t(2, 3, 5, dtype=BF16), t(2, 5, 7, dtype=BF16)), t(2, 3, 7, dtype=BF16))
    assert kernel(made) == (2 * (30 + 70 + 42), (Gemm(2, 3, 7, 5),))
    assert rule_for(made.op).kernels(made)[0].dtype is BF16


def test_square_of_one_tensor() -> None:
    made = Call("aten.mm.default", (Slot(0), Slot(0)), (), (t(4, 4),), (t(4, 4),))
    assert kernel(made) == (4 * (16 + 16), (Gemm(1, 4, 4, 4),))


def test_views_are_free() -> None:
    sliced = call("slice.Tensor", (t(8, 8), 0, 0, 2), t(2, 8))
    assert rule_for(sliced.op).kernels(sliced) == ()
    assert rule_for(sliced.op).flops(sliced) == 0


def test_an_expanded_tensor_counts_what_exists() -> None:
    row = TensorSpec((3, 4), (0, 1), F32, 16)
    assert kernel(call("add.Tensor", (t(3, 4), row), t(3, 4))) == (4 * (12 + 4 + 12), ())


def test_in_place_add_counts_three_operands() -> None:
    written = TensorSpec((3, 4), (4, 1), F32, 0, alias_of=0, writes=True)
    made = call("add_.Tensor", (t(3, 4), t(3, 4)), written, alpha=-0.01)
    assert kernel(made) == (4 * 36, ())
    assert not rule_for(made.op).recomputable


def test_copy_does_not_read_its_target() -> None:
    written = TensorSpec((3, 4), (4, 1), F32, 0, alias_of=0, writes=True)
    assert kernel(call("copy_.default", (t(3, 4), t(3, 4)), written)) == (4 * 24, ())


def test_embedding_reads_the_rows_it_touches() -> None:
    made = call("embedding.default", (t(1000, 8), t(5, dtype=I64)), t(5, 8))
    assert kernel(made) == (4 * (40 + 40) + 8 * 5, ())


def test_convolution() -> None:
    conv = (None, (2, 2), (1, 1), (1, 1), False, (0, 0), 2)
    made = call("convolution.default", (t(3, 4, 8, 8), t(6, 2, 3, 3), *conv), t(3, 6, 4, 4))
    assert kernel(made) == (4 * (768 + 108 + 288), (Gemm(2, 3 * 16, 3, 2 * 9),))
    assert rule_for(made.op).terms(made, 0) == 18


def test_transposed_convolution_is_an_input_gradient() -> None:
    conv = (None, (2, 2), (0, 0), (1, 1), True, (0, 0), 1)
    made = call("convolution.default", (t(3, 4, 5, 5), t(4, 6, 2, 2), *conv), t(3, 6, 10, 10))
    assert kernel(made)[1] == (Gemm(1, 3 * 100, 6, 4 * 4),)


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, False), (True, False, True)])
def test_convolution_gradients_are_a_launch_each(mask: tuple[bool, ...]) -> None:
    conv = ((6,), (2, 2), (1, 1), (1, 1), False, (0, 0), 1)
    image, weight, result = t(3, 4, 8, 8), t(6, 4, 3, 3), t(3, 6, 4, 4)
    outputs = [spec if asked else None for spec, asked in zip((image, weight, t(6)), mask)]
    made = call("convolution_backward.default", (result, image, weight, *conv, mask), *outputs)
    expected = (
        (4 * (288 + 216 + 768), (Gemm(1, 3 * 64, 4, 6 * 9),)),
        (4 * (288 + 768 + 216), (Gemm(1, 4 * 9, 6, 3 * 16),)),
        (4 * (288 + 6), ()),
    )
    found = [(kernel.nbytes, kernel.gemms) for kernel in rule_for(made.op).kernels(made)]
    assert found == [one for one, asked in zip(expected, mask) if asked]
    assert rule_for(made.op).terms(made, 1) == 3 * 16


def test_fused_attention_counts_no_scores() -> None:
    q, k, mask = t(2, 3, 8, 4), t(2, 3, 16, 4), t(2, 1, 8, 16)
    made = call(
        "_scaled_dot_product_flash_attention_for_cpu.default", (q, k, k, 0.0, False), q, t(2, 3, 8), attn_mask=mask
    )
    (only,) = rule_for(made.op).kernels(made)
    assert (only.nbytes, only.fused) == (4 * (192 + 384 + 384 + 192), True)
    assert only.gemms == (Gemm(6, 8, 16, 4), Gemm(6, 8, 4, 16))


def test_attention_gradient_has_five_products() -> None:
    q, k = t(2, 3, 8, 4), t(2, 3, 16, 4)
    made = call(
        "_scaled_dot_product_flash_attention_for_cpu_backward.default",
        (q, q, k, k, q, t(2, 3, 8), 0.0, False),
        *(q, k, k),
    )
    (only,) = rule_for(made.op).kernels(made)
    assert (len(only.gemms), only.flops) == (5, 5 * 2 * 6 * 8 * 16 * 4)
    assert only.nbytes == 4 * (192 * 4 + 384 * 4)


def test_layer_norm_gradient_is_one_launch() -> None:
    x, row, stats = t(2, 8, 16), t(16), t(2, 8, 1)
    mask = (True, True, True)
    made = call("native_layer_norm_backward.default", (x, x, (16,), stats, stats, row, row, mask), x, row, row)
    rule = rule_for(made.op)
    assert len(rule.kernels(made)) == 1
    assert [rule.terms(made, i) for i in range(3)] == [33, 16, 16]


def test_loss_gradient_does_not_read_the_scores() -> None:
    made = call("nll_loss_backward.default", (t(), t(8, 100), t(8, dtype=I64), None, 1, -100, t()), t(8, 100))
    assert kernel(made)[0] == 4 * (1 + 1 + 800) + 8 * 8


def test_pooling_gradient_does_not_read_the_image() -> None:
    args = (t(1, 2, 4, 4), t(1, 2, 8, 8), (2, 2), (2, 2), 0, False, True, None)
    assert kernel(call("avg_pool2d_backward.default", args, t(1, 2, 8, 8)))[0] == 4 * (32 + 128)


def test_constants_are_only_written() -> None:
    assert kernel(call("full.default", ((3, 4), 1.0), t(3, 4))) == (48, ())
    assert kernel(call("zeros_like.default", (t(3, 4),), t(3, 4))) == (48, ())
    empty = call("empty.memory_format", ((3, 4),), t(3, 4))
    assert rule_for(empty.op).kernels(empty) == ()


def test_dropout_draws_only_in_training() -> None:
    for train in (True, False):
        made = call("native_dropout.default", (t(3, 4), 0.1, train), t(3, 4), t(3, 4, dtype=DType.BOOL))
        assert rule_for(made.op).draws(made) == train
    q = t(2, 3, 8, 4)
    for p in (0.0, 0.1):
        made = call("_scaled_dot_product_flash_attention.default", (q, q, q, p, False), q, t(2, 3, 8))
        assert rule_for(made.op).draws(made) == (p > 0)


def test_reduced_loss_keeps_the_storage_of_its_elements() -> None:
    made = call("mse_loss.default", (t(8, 4), t(8, 4)), t())
    assert rule_for(made.op).storage_bytes(made, 0) == 4 * 32


def test_unknown_operator() -> None:
    made = call("no_such.default", (t(3, 4),), t(3, 4))
    rule = rule_for(made.op)
    assert (rule.known, rule.recomputable, kernel(made)) == (False, False, (96, ()))


def test_every_rule_names_its_overload_in_full() -> None:
    assert all(op.startswith("swap.") or (op.startswith("aten.") and op.count(".") == 2) for op in rules())
    assert list(rules()) == sorted(rules())
