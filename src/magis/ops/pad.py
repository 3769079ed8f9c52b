"""Padding at the borders, and its gradients: one launch, every tensor once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from magis.ir.args import Args, Kwargs
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import input_at, ints_at, overloads
from magis.ops.layout import beside, concat_axis, kept, moved, pieces, resized, with_argument
from magis.ops.loop import Concat, Loop
from magis.ops.rule import Kernel, OpRule, Sample, T, one_launch, square

LINE, IMAGE, VOLUME = T((2, 3, 4)), T((2, 3, 4, 5)), T((1, 2, 3, 3, 4))


def borders(call: Call, padding: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """For each dimension that is padded (or cropped): how much before and after it. The last dimension comes first in
    the list."""
    rank = len(call.inputs[0].shape)
    found = {rank - 1 - place: pair for place, pair in enumerate(zip(padding[::2], padding[1::2]))}
    return {dim: pair for dim, pair in found.items() if pair != (0, 0)}


class ConstantPad(OpRule):
    """`constant_pad_nd(x, padding, value)`. A dimension of which x's length and the borders' are multiples of the
    shortest of them is divided in all of these at once."""

    ops = ("aten.constant_pad_nd.default",)

    def loops(self, call: Call) -> Iterator[Loop]:
        shape, padded = call.inputs[0].shape, borders(call, ints_at(call, 1, "pad"))
        yield from moved(call, kept(shape, beside(len(shape), *padded)))
        for dim, (before, after) in padded.items():
            found = pieces(dim, [shape[dim], *(length for length in (before, after) if length)])
            if found is not None:
                yield Loop((found[1],), (Concat(found[0]),))

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        axis, padding = concat_axis(loop), list(ints_at(call, 1, "pad"))
        first = 2 * (len(call.inputs[0].shape) - 1 - axis.dim)
        padding[first : first + 2] = [resized(border, axis, length) for border in padding[first : first + 2]]
        return with_argument(call.args, call.kwargs, 1, "pad", tuple(padding))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.constant_pad_nd.default", (IMAGE, (1, 2, 0, 3), 0.5))
        yield Sample("aten.constant_pad_nd.default", (IMAGE, (0, -1, -1, 0)))
        yield Sample("aten.constant_pad_nd.default", (T((2, 3), DType.BF16), (0, 0)))
        yield Sample("aten.constant_pad_nd.default", (T((3, 5, 4)), (0, 0, 10, 5)))
        yield Sample("aten.constant_pad_nd.default", (T((5, 4, 6)), (0, 6, 2, 0), 1.5))


class Pad(OpRule):
    """Elements copied, borders filled with the mirrored inside, or the outermost element. Dimensions without borders
    are divided."""

    ops = overloads("""
        reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default
        replication_pad1d.default replication_pad2d.default replication_pad3d.default
    """)

    def loops(self, call: Call) -> Iterable[Loop]:
        shape = call.inputs[0].shape
        return moved(call, kept(shape, beside(len(shape), *borders(call, ints_at(call, 1, "padding")))))

    def samples(self) -> Iterable[Sample]:
        for kind in ("reflection", "replication"):
            yield Sample(f"aten.{kind}_pad1d.default", (LINE, (1, 2)))
            yield Sample(f"aten.{kind}_pad2d.default", (IMAGE, (1, 2, 0, 3)))
            yield Sample(f"aten.{kind}_pad2d.default", (T((6, 5, 4)), (0, 0, 1, 2)))
            yield Sample(f"aten.{kind}_pad3d.default", (VOLUME, (1, 2, 0, 1, 2, 1)))


class PadBackward(OpRule):
    """`(grad, x, padding)`: every border element is added to the element that it copied."""

    ops = overloads("""
        reflection_pad1d_backward.default reflection_pad2d_backward.default reflection_pad3d_backward.default
        replication_pad1d_backward.default replication_pad2d_backward.default replication_pad3d_backward.default
    """)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return one_launch(call, input_at(call, 1, "self"))

    def loops(self, call: Call) -> Iterator[Loop]:
        shape = call.inputs[0].shape
        for axis, _ in kept(shape, beside(len(shape), *borders(call, ints_at(call, 2, "padding")))):
            yield Loop(tuple(axis for _ in call.inputs), (Concat(axis),))

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
            yield Sample(f"aten.{kind}_pad2d_backward.default", (T((6, 8, 4)), T((6, 5, 4)), (0, 0, 1, 2)))
            yield Sample(f"aten.{kind}_pad3d_backward.default", (T((1, 2, 6, 4, 7)), VOLUME, (1, 2, 0, 1, 2, 1)))
        yield Sample("aten.replication_pad2d_backward.default", (T((2, 3, 5, 6)), IMAGE, (0, 1, 0, 1)))
