"""Joining, repeating and reordering: elements are copied, every tensor once."""

from __future__ import annotations

from collections.abc import Iterable

from magis.ir.dtype import DType
from magis.ops.arguments import overloads
from magis.ops.rule import OpRule, Sample, T

X = T((2, 3, 4))


class Concat(OpRule):
    """Tensors joined along a dimension."""

    ops = overloads("block_diag.default cat.default stack.default")

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.block_diag.default", ((T((2, 3)), T((1, 2))),))
        yield Sample("aten.cat.default", ((X, X), -1))
        yield Sample("aten.cat.default", ((X, T((2, 1, 4)), T((2, 5, 4), strides=(20, 1, 5))), 1))
        yield Sample("aten.cat.default", ((X,),))
        yield Sample("aten.cat.default", ((T((0,)), T((3,), DType.BF16)),))
        yield Sample("aten.stack.default", ((X, X), 1))


class Rearrange(OpRule):
    """One tensor's elements in another order, some of them several times."""

    ops = overloads("""
        channel_shuffle.default diag_embed.default flip.default native_channel_shuffle.default
        pixel_shuffle.default pixel_unshuffle.default repeat.default repeat_interleave.Tensor roll.default
        rot90.default
    """)

    def samples(self) -> Iterable[Sample]:
        image = T((2, 4, 2, 2))
        for op in overloads("channel_shuffle.default native_channel_shuffle.default"):
            yield Sample(op, (image, 2))
        yield Sample("aten.diag_embed.default", (X,))
        yield Sample("aten.flip.default", (X, (0, 2)))
        yield Sample("aten.pixel_shuffle.default", (image, 2))
        yield Sample("aten.pixel_unshuffle.default", (image, 2))
        yield Sample("aten.repeat.default", (X, (2, 1, 1, 3)))
        yield Sample("aten.repeat.default", (T((3,), DType.I64), (1,)))
        yield Sample("aten.repeat_interleave.Tensor", (T((3,), DType.I64, 3),))
        yield Sample("aten.roll.default", (X, (1,), (2,)))
        yield Sample("aten.rot90.default", (X, 1, (1, 2)))
