"""The attention kernels under the fused operators: other layout, and sequences of several lengths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import input_at, int_at, overloads
from magis.ops.attention import Attention, AttentionBackward, AttentionShape
from magis.ops.loop import Loop
from magis.ops.rule import Sample, T, argument


def _joined(call: Call, first: int, starts: int) -> AttentionShape:
    """Sizes where q is [batch, length, heads, width], or holds all sequences one after another as
    [length, heads, width], their starts given: then each counts as the longest."""
    q, k, v = (input_at(call, first + place, "").shape for place in range(3))
    given_starts = argument(call, starts, "")
    if not isinstance(given_starts, Slot):
        return AttentionShape(q[0] * q[2], q[1], k[1], q[-1], v[-1])
    sequences = call.inputs[given_starts.index].shape[0] - 1
    longest = (int_at(call, starts + 2, ""), int_at(call, starts + 3, ""))
    return AttentionShape(sequences * q[-2], *longest, q[-1], v[-1])


class JoinedAttention(Attention):
    """Forward."""

    ops = overloads("_efficient_attention_forward.default _flash_attention_forward.default")
    dropout_places: ClassVar[dict[str, int]] = {"efficient": 8, "flash": 7}

    def loops(self, call: Call) -> Iterable[Loop]:
        return ()

    def shape(self, call: Call) -> AttentionShape:
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
    """Gradients."""

    ops = overloads("_efficient_attention_backward.default _flash_attention_backward.default")
    heads_dim = -2

    def loops(self, call: Call) -> Iterable[Loop]:
        return ()

    def shape(self, call: Call) -> AttentionShape:
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
