"""Padding at the borders, and its gradients: one launch, every tensor once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import input_at, ints_at, overloads
from magis.ops.rule import Kernel, OpRule, Sample, T, one_launch, square

LINE, IMAGE, VOLUME = T((2, 3, 4)), T((2, 3, 4, 5)), T((1, 2, 3, 3, 4))


class Pad(OpRule):
    """Elements copied, borders filled with a constant, the mirrored inside, or the outermost element."""

    ops = overloads("""
        constant_pad_nd.default reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default
        replication_pad1d.default replication_pad2d.default replication_pad3d.default
    """)

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.constant_pad_nd.default", (IMAGE, (1, 2, 0, 3), 0.5))
        yield Sample("aten.constant_pad_nd.default", (IMAGE, (0, -1, -1, 0)))
        yield Sample("aten.constant_pad_nd.default", (T((2, 3), DType.BF16), (0, 0)))
        for kind in ("reflection", "replication"):
            yield Sample(f"aten.{kind}_pad1d.default", (LINE, (1, 2)))
            yield Sample(f"aten.{kind}_pad2d.default", (IMAGE, (1, 2, 0, 3)))
            yield Sample(f"aten.{kind}_pad3d.default", (VOLUME, (1, 2, 0, 1, 2, 1)))


class PadBackward(OpRule):
    """`(grad, x, padding)`: every border element is added to the element that it copied."""

    ops = overloads("""
        reflection_pad1d_backward.default reflection_pad2d_backward.default reflection_pad3d_backward.default
        replication_pad1d_backward.default replication_pad2d_backward.default replication_pad3d_backward.default
    """)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return one_launch(call, input_at(call, 1, "self"))

    def terms(self, call: Call, output: int) -> int:
        padding = ints_at(call, 2, "padding")
        sides = list(zip(padding[::2], padding[1::2]))
        if "reflection" in call.op:
            return prod(1 + (left > 0) + (right > 0) for left, right in sides)
        return prod(1 + max(left, right, 0) for left, right in sides)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        run = getattr(torch.ops.aten, call.op.split(".")[1]).default
        return run(square(tensors[0]), square(tensors[-1]), *call.args[2:])

    def samples(self) -> Iterable[Sample]:
        for kind in ("reflection", "replication"):
            yield Sample(f"aten.{kind}_pad1d_backward.default", (T((2, 3, 7)), LINE, (1, 2)))
            yield Sample(f"aten.{kind}_pad2d_backward.default", (T((2, 3, 7, 8)), IMAGE, (1, 2, 0, 3)))
            yield Sample(f"aten.{kind}_pad3d_backward.default", (T((1, 2, 6, 4, 7)), VOLUME, (1, 2, 0, 1, 2, 1)))
        yield Sample("aten.replication_pad2d_backward.default", (T((2, 3, 5, 6)), IMAGE, (0, 1, 0, 1)))
