"""Joining, repeating and reordering: elements are copied, every tensor once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from magis.ir.args import Args, Kwargs, Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import int_at, ints_at, output_at, overloads, wrapped
from magis.ops.layout import Pair, beside, concat_axis, kept, moved, pieces, resized, with_argument, without
from magis.ops.loop import Axis, Concat, Loop, along
from magis.ops.rule import OpRule, Sample, T, argument

X = T((2, 3, 4))


class BlockDiagonal(OpRule):
    """Matrices joined along both dimensions: each row and column belongs to one of them, so nothing is divided."""

    ops = ("aten.block_diag.default",)

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], ((T((2, 3)), T((1, 2))),))


class Join(OpRule):
    """Tensors joined along a dimension, `cat(tensors, dim)`, or along a new one, `stack(tensors, dim)`. The joined
    dimension is divided in all tensors at once where the shortest measures the others."""

    ops = overloads("cat.default stack.default")

    def joined(self, call: Call) -> Iterator[int]:
        """The numbers of the inputs that are joined, in order. `cat` ignores tensors of shape [0]."""
        tensors, rank = argument(call, 0, "tensors"), len(output_at(call, 0).shape)
        for item in tensors if isinstance(tensors, tuple) else ():
            if isinstance(item, Slot) and (len(call.inputs[item.index].shape) == rank or "stack" in call.op):
                yield item.index

    def loops(self, call: Call) -> Iterator[Loop]:
        shape, order, count = output_at(call, 0).shape, list(self.joined(call)), len(call.inputs)
        if not shape:
            return
        dim = int_at(call, 1, "dim") % len(shape)
        rest = without(len(shape), dim) if "stack" in call.op else beside(len(shape), dim)
        for axis, place in kept(shape, rest):
            yield along(count, dict.fromkeys(order, Axis(place.dim, place.length)), (Concat(axis),))
        if "cat" in call.op:
            filled = [index for index in order if call.inputs[index].shape[dim] > 0]
            found = pieces(dim, [call.inputs[index].shape[dim] for index in filled])
            if found is not None:
                yield along(count, dict(zip(filled, found[1:])), (Concat(found[0]),))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.cat.default", ((X, X), -1))
        yield Sample("aten.cat.default", ((X, T((2, 1, 4)), T((2, 5, 4), strides=(20, 1, 5))), 1))
        yield Sample("aten.cat.default", ((X,),))
        yield Sample("aten.cat.default", ((T((0,)), T((3,), DType.BF16)),))
        yield Sample("aten.cat.default", ((T((5, 6, 3)), T((5, 4, 3)), T((5, 2, 3))), -2))
        yield Sample("aten.cat.default", ((T((0,)), T((3, 4)), T((3, 5))), 1))
        yield Sample("aten.stack.default", ((X, X), 1))
        yield Sample("aten.stack.default", ((T((3, 5)), T((3, 5)), T((3, 5))), -1))
        yield Sample("aten.stack.default", ((T(()), T(())),))


class Rearrange(OpRule):
    """One tensor's elements in another order. Dimensions of which positions change places are not divided."""

    ops = overloads("diag_embed.default flip.default roll.default rot90.default")

    def pairs(self, call: Call) -> Iterable[Pair]:
        """Axes of the input, and where they are in the result."""
        rank = len(call.inputs[0].shape)
        if "diag_embed" in call.op:
            rest = without(rank + 1, int_at(call, 2, "dim1", -2), int_at(call, 3, "dim2", -1))
            return kept(call.inputs[0].shape, ((dim, place) for place, dim in rest))
        if "rot90" in call.op:
            return kept(call.inputs[0].shape, self.rotated(call, rank))
        dims = ints_at(call, 1, "dims") if "flip" in call.op else ints_at(call, 2, "dims") or tuple(range(rank))
        return kept(call.inputs[0].shape, beside(rank, *dims))

    def rotated(self, call: Call, rank: int) -> list[tuple[int, int]]:
        """The dimensions that `rot90(x, k, dims)` does not reverse, and where they are then."""
        turns, (one, other) = int_at(call, 1, "k", 1) % 4, wrapped(ints_at(call, 2, "dims") or (0, 1), rank)
        moved_to = {0: [(one, one), (other, other)], 1: [(one, other)], 3: [(other, one)]}
        return [*beside(rank, one, other), *moved_to.get(turns, [])]

    def loops(self, call: Call) -> Iterable[Loop]:
        return moved(call, self.pairs(call))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.diag_embed.default", (X,))
        yield Sample("aten.diag_embed.default", (T((3, 4, 5)), 1, 0, -2))
        yield Sample("aten.flip.default", (X, (0, 2)))
        yield Sample("aten.flip.default", (T((3, 4, 5)), (-2,)))
        yield Sample("aten.roll.default", (X, (1,), (2,)))
        yield Sample("aten.roll.default", (T((3, 4, 5, 6)), (1, -2), (1, -1)))
        yield Sample("aten.roll.default", (X, (5,)))
        yield Sample("aten.rot90.default", (X, 1, (1, 2)))
        for turns in (1, -1, 2, 4):
            yield Sample("aten.rot90.default", (T((3, 4, 5)), turns))


class Repeat(OpRule):
    """`repeat(x, repeats)`: every dimension of the result is [repeats, the input's]. Repetitions are divided as well:
    all parts read the input whole."""

    ops = ("aten.repeat.default",)

    def loops(self, call: Call) -> Iterator[Loop]:
        shape, repeats = call.inputs[0].shape, ints_at(call, 1, "repeats")
        for place, count in enumerate(repeats):
            dim = place - (len(repeats) - len(shape))
            if count > 1:
                yield Loop((None,), (Concat(Axis(place, count)),))
            if dim >= 0 and shape[dim] > 1 and count > 0:
                yield Loop((Axis(dim, shape[dim]),), (Concat(Axis(place, shape[dim], count)),))

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        if loop.inputs[0] is not None:
            return call.args, call.kwargs
        axis, repeats = concat_axis(loop), list(ints_at(call, 1, "repeats"))
        repeats[axis.dim] = resized(repeats[axis.dim], axis, length)
        return with_argument(call.args, call.kwargs, 1, "repeats", tuple(repeats))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.repeat.default", (X, (2, 1, 1, 3)))
        yield Sample("aten.repeat.default", (T((3,), DType.I64), (1,)))
        yield Sample("aten.repeat.default", (T((3, 5)), (6, 4, 2)))
        yield Sample("aten.repeat.default", (T(()), (3,)))


class RepeatEach(OpRule):
    """`repeat_interleave(repeats)`: how long the result is depends on numbers, so nothing is divided."""

    ops = ("aten.repeat_interleave.Tensor",)

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T((3,), DType.I64, 3),))


class ChannelShuffle(OpRule):
    """`channel_shuffle(x, groups)`: channels [groups, rest] become [rest, groups]; both factors are divided."""

    ops = overloads("channel_shuffle.default native_channel_shuffle.default")

    def loops(self, call: Call) -> Iterator[Loop]:
        shape, groups = call.inputs[0].shape, int_at(call, 1, "groups", 1)
        yield from moved(call, kept(shape, beside(len(shape), 1)))
        rest = shape[1] // groups
        if groups > 1 and rest > 0:
            yield from moved(call, [(Axis(1, groups), Axis(1, groups, rest))])
        if rest > 1:
            yield from moved(call, [(Axis(1, rest, groups), Axis(1, rest))])

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        source, target, groups = loop.inputs[0], concat_axis(loop), int_at(call, 1, "groups", 1)
        if target.dim != 1 or groups == 1 or source is None or source.outer > target.outer:
            return call.args, call.kwargs
        return with_argument(call.args, call.kwargs, 1, "groups", resized(groups, target, length))

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            yield Sample(op, (T((2, 4, 2, 2)), 2))
            yield Sample(op, (T((3, 12, 5, 2)), 4))
            yield Sample(op, (T((3, 4, 2, 5)), 4))
            yield Sample(op, (T((3, 4, 5, 2)), 1))


class PixelShuffle(OpRule):
    """`pixel_shuffle(x, r)` turns [.., C*r*r, H, W] into [.., C, H*r, W*r], `pixel_unshuffle` back. C, H and W are
    divided; r, which is one number for both sides, is not."""

    ops = overloads("pixel_shuffle.default pixel_unshuffle.default")

    def loops(self, call: Call) -> Iterator[Loop]:
        shape, other = call.inputs[0].shape, output_at(call, 0).shape
        lengths = [min(a, b) for a, b in zip(shape, other)]
        return moved(call, kept(lengths, beside(len(lengths))))

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            yield Sample(op, (T((2, 4, 2, 2)), 2))
            yield Sample(op, (T((3, 12, 4, 6)), 2))
        yield Sample("aten.pixel_shuffle.default", (T((18, 4, 5)), 3))
