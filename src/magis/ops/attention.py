"""Fused attention: its matrix products in one launch, bytes of q, k, v and results only (device model v1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import flag_at, given, input_at, int_at, number_at, output_at, overloads
from magis.ops.rule import Gemm, Kernel, OpRule, Sample, T, argument, square, stored_bytes


@dataclass(frozen=True, slots=True)
class _Shape:
    """Lengths of queries and keys, widths of keys and values, for each of `heads` independent products."""

    heads: int
    queries: int
    keys: int
    width: int
    value_width: int

    @property
    def forward(self) -> tuple[Gemm, ...]:
        """Scores, and the values weighted by them."""
        return (
            Gemm(self.heads, self.queries, self.keys, self.width),
            Gemm(self.heads, self.queries, self.value_width, self.keys),
        )

    @property
    def backward(self) -> tuple[Gemm, ...]:
        """Scores again, then the gradients of values, scores, queries and keys."""
        return (
            Gemm(self.heads, self.queries, self.keys, self.width),
            Gemm(self.heads, self.keys, self.value_width, self.queries),
            Gemm(self.heads, self.queries, self.keys, self.value_width),
            Gemm(self.heads, self.queries, self.width, self.keys),
            Gemm(self.heads, self.keys, self.width, self.queries),
        )


class Attention(OpRule):
    """`(q, k, v, ...)` as [batch, heads, length, width]; `dropout` is where its probability stands."""

    ops = overloads("""
        _scaled_dot_product_cudnn_attention.default _scaled_dot_product_efficient_attention.default
        _scaled_dot_product_flash_attention.default _scaled_dot_product_flash_attention_for_cpu.default
        _scaled_dot_product_fused_attention_overrideable.default
    """)
    first: ClassVar[int] = 0  # where q stands
    _dropout: ClassVar[dict[str, int]] = {"cudnn": 5, "efficient": 5, "flash": 3, "overrideable": 4}

    def dropout(self, call: Call) -> float:
        """The probability with which weights are dropped."""
        place = next(place for kind, place in self._dropout.items() if kind in call.op)
        return number_at(call, place, "dropout_p", 0.0)

    def draws(self, call: Call) -> bool:
        return self.dropout(call) > 0

    def shape(self, call: Call) -> _Shape:
        """Its sizes; queries may have more heads than keys."""
        q, k, v = (input_at(call, self.first + place, "").shape for place in range(3))
        return _Shape(q[0] * q[1], q[2], k[2], q[-1], v[-1])

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        q, k, v = (input_at(call, self.first + place, "") for place in range(3))
        nbytes = sum(map(stored_bytes, (q, k, v))) + output_at(call, 0).nbytes
        return (Kernel(nbytes, self.shape(call).forward, q.dtype, fused=True),)

    def terms(self, call: Call, output: int) -> int:
        return self.shape(call).keys if output < 2 else 1

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        if output or not call.op.endswith("_for_cpu.default") or self.draws(call):
            return None
        q, k, v = (given(call, tensors, place, "") for place in range(3))
        return square(torch.softmax(_scores(torch, call, tensors, q, k, 4), -1)) @ square(v)

    def samples(self) -> Iterable[Sample]:
        op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
        q, k, half = T((2, 3, 4, 8)), T((2, 3, 5, 8)), T((2, 3, 4, 8), DType.BF16)
        yield Sample(op, (q, k, k))
        yield Sample(op, (q, q, q, 0.0, True))
        yield Sample(op, (q, k, k), (("attn_mask", T((2, 1, 4, 5))), ("scale", 0.5)))
        yield Sample(op, (half, half, half))
        strided = T((2, 3, 4, 8), strides=(96, 8, 24, 1))
        yield Sample(op, (strided, strided, strided))
        yield Sample("aten._scaled_dot_product_flash_attention.default", (half, half, half, 0.0, True))
        yield Sample("aten._scaled_dot_product_efficient_attention.default", (q, q, q, None, True))
        yield Sample("aten._scaled_dot_product_cudnn_attention.default", (half, half, half, None, True))
        yield Sample("aten._scaled_dot_product_fused_attention_overrideable.default", (q, q, q))


def _scores(torch: Any, call: Call, tensors: Sequence[Any], q: Any, k: Any, causal: int) -> Any:
    """Scaled scores, minus infinity where the mask forbids; `causal` is where that flag stands."""
    scores = q @ k.mT * number_at(call, 99, "scale", 1 / sqrt(q.shape[-1]))
    if flag_at(call, causal, "is_causal"):
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    mask = given(call, tensors, 99, "attn_mask")
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


class AttentionBackward(Attention):
    """`(grad, q, k, v, ...)` gives the gradients of q, k and v, and of the bias where one is asked for."""

    ops = overloads("""
        _scaled_dot_product_cudnn_attention_backward.default
        _scaled_dot_product_efficient_attention_backward.default
        _scaled_dot_product_flash_attention_backward.default
        _scaled_dot_product_flash_attention_for_cpu_backward.default
        _scaled_dot_product_fused_attention_overrideable_backward.default
    """)
    first = 1

    def draws(self, call: Call) -> bool:
        return False

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        q, k, v = (input_at(call, self.first + place, "") for place in range(3))
        grad = stored_bytes(input_at(call, 0, "grad_out"))
        gradients = sum(spec.nbytes for spec in call.outputs if spec is not None)
        nbytes = sum(map(stored_bytes, (q, k, v))) + 2 * grad + gradients  # the forward's result is as large
        return (Kernel(nbytes, self.shape(call).backward, q.dtype, fused=True),)

    def terms(self, call: Call, output: int) -> int:
        shape = self.shape(call)
        if output == 2:
            return shape.queries
        return (shape.keys if output == 0 else shape.queries) + 2 * shape.value_width

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        """The gradient of a score is `p * (grad . v - grad . out)`, expanded into the terms of both products."""
        if not call.op.endswith("_for_cpu_backward.default"):
            return None
        grad, q, k, v, out, sums = (given(call, tensors, place, "") for place in range(6))
        weights = square((_scores(torch, call, tensors, q, k, 7) - sums.unsqueeze(-1)).exp())
        if output == 2:
            return weights.mT @ square(grad)
        inner = square(grad) @ square(v).mT + (square(grad) * square(out)).sum(-1, keepdim=True)
        scores = weights * inner * number_at(call, 99, "scale", 1 / sqrt(q.shape[-1])) ** 2
        return scores @ square(k) if output == 0 else scores.mT @ square(q)

    def samples(self) -> Iterable[Sample]:
        op = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
        q, k, sums = T((2, 3, 4, 8)), T((2, 3, 5, 8)), T((2, 3, 4))
        yield Sample(op, (q, q, k, k, q, sums, 0.0, False))
        yield Sample(op, (q, q, q, q, q, sums, 0.0, True))
        yield Sample(op, (q, q, k, k, q, sums, 0.0, False), (("attn_mask", T((2, 3, 4, 5))), ("scale", 0.5)))
        seed, half, ints = T((), DType.I64), T((2, 3, 4, 8), DType.BF16), T((3,), DType.I32)
        yield Sample(
            "aten._scaled_dot_product_flash_attention_backward.default",
            (half, half, half, half, half, sums, ints, ints, 4, 4, 0.0, False, seed, seed),
        )
        yield Sample(
            "aten._scaled_dot_product_efficient_attention_backward.default",
            (q, q, q, q, T((2, 3, 4, 4)), q, sums, seed, seed, 0.0, (True, True, True, True)),
        )
        yield Sample(
            "aten._scaled_dot_product_cudnn_attention_backward.default",
            (
                half,
                half,
                half,
                half,
                half,
                sums,
                seed,
                seed,
                T((2, 3, 4, 4), DType.BF16),
                ints,
                ints,
                4,
                4,
                0.0,
                False,
            ),
        )


def _joined(call: Call, first: int, starts: int) -> _Shape:
    """Sizes where q is [batch, length, heads, width], or holds all sequences one after another as
    [length, heads, width], their starts given: then each counts as the longest."""
    q, k, v = (input_at(call, first + place, "").shape for place in range(3))
    given_starts = argument(call, starts, "")
    if not isinstance(given_starts, Slot):
        return _Shape(q[0] * q[2], q[1], k[1], q[-1], v[-1])
    sequences = call.inputs[given_starts.index].shape[0] - 1
    longest = (int_at(call, starts + 2, ""), int_at(call, starts + 3, ""))
    return _Shape(sequences * q[-2], *longest, q[-1], v[-1])


class JoinedAttention(Attention):
    """The kernels under the operators above: other layout, sequences of several lengths."""

    ops = overloads("_efficient_attention_forward.default _flash_attention_forward.default")
    _dropout: ClassVar[dict[str, int]] = {"efficient": 8, "flash": 7}

    def shape(self, call: Call) -> _Shape:
        return _joined(call, 0, 4 if "efficient" in call.op else 3)

    def samples(self) -> Iterable[Sample]:
        half, starts = T((2, 4, 3, 8), DType.BF16), T((3,), DType.I32)
        op = "aten._flash_attention_forward.default"
        yield Sample(op, (half, half, half, None, None, 4, 4, 0.0, False, False))
        packed = T((8, 3, 8), DType.BF16)
        yield Sample(op, (packed, packed, packed, starts, starts, 4, 4, 0.0, True, False))
        op = "aten._efficient_attention_forward.default"
        yield Sample(op, (half, half, half, None, None, None, None, None, 0.0, 0, True))


class JoinedAttentionBackward(AttentionBackward):
    """Their gradients."""

    ops = overloads("_efficient_attention_backward.default _flash_attention_backward.default")

    def shape(self, call: Call) -> _Shape:
        return _joined(call, 1, 6)

    def samples(self) -> Iterable[Sample]:
        half, sums, seed = T((2, 4, 3, 8), DType.BF16), T((2, 3, 4)), T((), DType.I64)
        same = (half, half, half, half)
        yield Sample(
            "aten._flash_attention_backward.default",
            (*same, half, sums, None, None, 4, 4, 0.0, False, seed, seed),
        )
        yield Sample(
            "aten._efficient_attention_backward.default",
            (*same, None, half, None, None, 4, 4, sums, 0.0, seed, seed, 0, False),
        )
