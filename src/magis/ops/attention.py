"""Fused attention: its matrix products in one launch, bytes of q, k, v and results only (device model v1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import flag_at, given, input_at, number_at, output_at, overloads
from magis.ops.attention_loops import attention_loops
from magis.ops.loop import Loop
from magis.ops.rule import Gemm, Kernel, OpRule, Sample, T, square, stored_bytes


@dataclass(frozen=True, slots=True)
class AttentionShape:
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
    dropout_places: ClassVar[dict[str, int]] = {"cudnn": 5, "efficient": 5, "flash": 3, "overrideable": 4}

    def dropout(self, call: Call) -> float:
        """The probability with which weights are dropped."""
        place = next(place for kind, place in self.dropout_places.items() if kind in call.op)
        return number_at(call, place, "dropout_p", 0.0)

    def draws(self, call: Call) -> bool:
        return self.dropout(call) > 0

    def loops(self, call: Call) -> Iterable[Loop]:
        return () if self.dropout(call) else attention_loops(call, self.first, "cpu" in call.op)

    def shape(self, call: Call) -> AttentionShape:
        """Its sizes; queries may have more heads than keys."""
        q, k, v = (input_at(call, self.first + place, "").shape for place in range(3))
        return AttentionShape(q[0] * q[1], q[2], k[2], q[-1], v[-1])

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
        k, v = _for_each_query_head(k, q), _for_each_query_head(v, q)
        return square(torch.softmax(_scores(torch, call, tensors, q, k, 4), -1)) @ square(v)

    def samples(self) -> Iterable[Sample]:
        op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
        q, k, half = T((2, 3, 4, 8)), T((2, 3, 5, 8)), T((2, 3, 4, 8), DType.BF16)
        yield Sample(op, (q, k, k))
        yield Sample(op, (q, q, q, 0.0, True))
        yield Sample(op, (q, k, k), (("attn_mask", T((2, 1, 4, 5))), ("scale", 0.5)))
        yield Sample(op, (half, half, half))
        yield Sample(op, (T((2, 4, 4, 8)), T((2, 2, 5, 8)), T((2, 2, 5, 8))))
        strided = T((2, 3, 4, 8), strides=(96, 8, 24, 1))
        yield Sample(op, (strided, strided, strided))
        yield Sample("aten._scaled_dot_product_flash_attention.default", (half, half, half, 0.0, True))
        yield Sample("aten._scaled_dot_product_efficient_attention.default", (q, q, q, None, True))
        yield Sample("aten._scaled_dot_product_cudnn_attention.default", (half, half, half, None, True))
        yield Sample("aten._scaled_dot_product_fused_attention_overrideable.default", (q, q, q))


def _for_each_query_head(x: Any, q: Any) -> Any:
    """Keys or values, repeated where several heads of queries share one."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] != q.shape[1] else x


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
    heads_dim: ClassVar[int] = -3

    def draws(self, call: Call) -> bool:
        return False

    def loops(self, call: Call) -> Iterable[Loop]:
        place = {"cudnn": 13, "efficient": 9, "for_cpu": 6, "overrideable": 12}
        dropout = next((at for kind, at in place.items() if kind in call.op), 10)
        return () if number_at(call, dropout, "dropout_p", 0.0) else attention_loops(call, 1, "cpu" in call.op)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        q, k, v = (input_at(call, self.first + place, "") for place in range(3))
        grad = stored_bytes(input_at(call, 0, "grad_out"))
        gradients = sum(spec.nbytes for spec in call.outputs if spec is not None)
        nbytes = sum(map(stored_bytes, (q, k, v))) + 2 * grad + gradients  # the forward's result is as large
        return (Kernel(nbytes, self.shape(call).backward, q.dtype, fused=True),)

    def terms(self, call: Call, output: int) -> int:
        shape = self.shape(call)
        if output == 0:
            return shape.keys + 2 * shape.value_width
        summed = shape.queries * self.shared_by(call)
        return summed if output == 2 else summed + 2 * shape.value_width

    def shared_by(self, call: Call) -> int:
        """How many heads of queries share a head of keys."""
        q, k = (input_at(call, self.first + place, "").shape for place in range(2))
        return q[self.heads_dim] // max(k[self.heads_dim], 1)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        """The gradient of a score is `p * (grad . v - grad . out)`, expanded into the terms of both products."""
        if not call.op.endswith("_for_cpu_backward.default"):
            return None
        grad, q, keys, values, out, sums = (given(call, tensors, place, "") for place in range(6))
        k, v = _for_each_query_head(keys, q), _for_each_query_head(values, q)
        weights = square((_scores(torch, call, tensors, q, k, 7) - sums.unsqueeze(-1)).exp())
        if output == 2:
            return self._for_each_key_head(weights.mT @ square(grad), keys)
        inner = square(grad) @ square(v).mT + (square(grad) * square(out)).sum(-1, keepdim=True)
        scores = weights * inner * number_at(call, 99, "scale", 1 / sqrt(q.shape[-1])) ** 2
        return scores @ square(k) if output == 0 else self._for_each_key_head(scores.mT @ square(q), keys)

    def _for_each_key_head(self, squares: Any, keys: Any) -> Any:
        """Summed over the heads of queries that share a head of keys."""
        return squares.unflatten(1, (keys.shape[1], -1)).sum(2)

    def samples(self) -> Iterable[Sample]:
        op = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
        q, k, sums = T((2, 3, 4, 8)), T((2, 3, 5, 8)), T((2, 3, 4))
        yield Sample(op, (q, q, k, k, q, sums, 0.0, False))
        yield Sample(op, (q, q, q, q, q, sums, 0.0, True))
        yield Sample(op, (q, q, k, k, q, sums, 0.0, False), (("attn_mask", T((2, 3, 4, 5))), ("scale", 0.5)))
        q, k = T((2, 4, 3, 8)), T((2, 2, 5, 8))
        yield Sample(op, (q, q, k, k, q, T((2, 4, 3)), 0.0, False))
        q = T((2, 3, 4, 8))
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
