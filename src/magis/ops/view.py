"""Views: they share their input's storage, launch nothing, write nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from magis.ir.args import Args, Kwargs
from magis.ir.dtype import DType
from magis.ir.graph import Call, contiguous_strides
from magis.ops.arguments import input_at, int_at, ints_at, output_at, overloads, wrapped
from magis.ops.layout import (
    Pair,
    atoms,
    beside,
    concat_axis,
    kept,
    moved,
    pieces,
    resized,
    result_part,
    slice_pairs,
    slice_part,
    slice_range,
    window_pairs,
    with_argument,
    without,
)
from magis.ops.loop import Concat, Loop, elementwise
from magis.ops.rule import Kernel, OpRule, Sample, T

X = T((2, 3, 4))
WIDE = T((3, 4, 6))


class View(OpRule):
    """Every result is a view of the first input. `_unsafe_view` and `unsafe_split` are too when they run,
    though their schemas do not say so.

    `as_strided` reads its input's storage, not its dimensions; a part in which a dimension has one position would
    lose it to `squeeze.default`: neither has loops."""

    ops = overloads("as_strided.default squeeze.default")

    def aliases(self, call: Call) -> tuple[int | None, ...]:
        return tuple(0 for _ in call.outputs)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return ()

    def flops(self, call: Call) -> int:
        return 0

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.as_strided.default", (X, (2, 2), (12, 2), 1))
        yield Sample("aten.squeeze.default", (X,))


class Moved(View):
    """Views of which every axis is an axis of the input."""

    def pairs(self, call: Call) -> Iterable[Pair]:
        """Axes of the input, and where they are in every result."""
        return kept(call.inputs[0].shape, beside(len(call.inputs[0].shape)))

    def loops(self, call: Call) -> Iterable[Loop]:
        return moved(call, self.pairs(call))


class Same(Moved):
    """The same dimensions."""

    ops = overloads("_conj.default _neg_view.default alias.default detach.default lift_fresh.default")

    def samples(self) -> Iterable[Sample]:
        for op in overloads("_neg_view.default alias.default detach.default lift_fresh.default"):
            yield Sample(op, (X,))
        yield Sample("aten._conj.default", (T((2, 3), DType.C64),))


class Reshape(Moved):
    """Row-major elements in another shape: every factor of a dimension that is a factor of a dimension before and
    after."""

    ops = overloads("_unsafe_view.default view.default")
    shape_at = 1

    def pairs(self, call: Call) -> Iterable[Pair]:
        return atoms(call.inputs[0].shape, output_at(call, 0).shape)

    def samples(self) -> Iterable[Sample]:
        for op in overloads("_unsafe_view.default view.default"):
            yield Sample(op, (X, (6, -1)))
            yield Sample(op, (T((2, 3, 4), strides=(0, 4, 1)), (2, 12)))
            yield Sample(op, (T((2, 0, 4)), (0, 8)))
        yield Sample("aten.view.default", (T((3, 5, 12), DType.BF16), (3, 5, 4, -1)))
        yield Sample("aten.view.default", (T((3, 4, 5, 6)), (-1, 10, 3)))
        yield Sample("aten.view.default", (T((4, 6)), (6, 4)))
        yield Sample("aten.view.default", (T((3, 2, 5)), (2, 3, 5)))
        yield Sample("aten.view.default", (T((3, 4, 1, 6)), (1, 12, 6)))
        yield Sample("aten.view.default", (T((4, 3, 6), strides=(6, 24, 1)), (2, 2, 3, 2, 3)))


class ReshapeAlias(Reshape):
    """A reshape that says the strides. Those of a part are known where it is contiguous for sure: along the first
    dimension of a contiguous tensor."""

    ops = ("aten._reshape_alias.default",)

    def pairs(self, call: Call) -> Iterator[Pair]:
        shape = output_at(call, 0).shape
        if not call.inputs[0].is_contiguous or ints_at(call, 2, "stride") != contiguous_strides(shape):
            return
        for source, target in super().pairs(call):
            if source.dim == target.dim == 0 and source.outer == target.outer == 1:
                yield source, target

    def loops(self, call: Call) -> Iterable[Loop]:
        return (Loop(loop.inputs, loop.roles, uniform=False) for loop in super().loops(call))

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        shape = result_part(call, loop, length)
        args, kwargs = with_argument(call.args, call.kwargs, 1, "size", shape)
        return with_argument(args, kwargs, 2, "stride", contiguous_strides(shape))

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (X, (6, 4), (4, 1)))
        yield Sample(self.ops[0], (T((3, 4, 5)), (3, 20), (20, 1)))


class Permute(Moved):
    """Dimensions in another order."""

    ops = overloads("permute.default t.default transpose.int")

    def order(self, call: Call) -> tuple[int, ...]:
        """For every dimension of the result the input's."""
        rank = len(call.inputs[0].shape)
        if call.op == "aten.permute.default":
            return wrapped(ints_at(call, 1, "dims"), rank)
        order = list(range(rank))
        if rank > 1:
            one, other = (0, 1) if call.op == "aten.t.default" else (int_at(call, 1, "dim0"), int_at(call, 2, "dim1"))
            order[one], order[other] = order[other], order[one]
        return tuple(order)

    def pairs(self, call: Call) -> Iterable[Pair]:
        return kept(call.inputs[0].shape, ((dim, place) for place, dim in enumerate(self.order(call))))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.permute.default", (X, (2, 0, 1)))
        yield Sample("aten.permute.default", (T((3, 4, 5, 6)), (0, -1, 1, 2)))
        yield Sample("aten.permute.default", (T(()), ()))
        yield Sample("aten.t.default", (T((2, 3)),))
        yield Sample("aten.t.default", (T((2,)),))
        yield Sample("aten.transpose.int", (X, 0, -1))
        yield Sample("aten.transpose.int", (T((3, 4, 5, 6), DType.F16), -3, 2))


class Expand(View):
    """Dimensions repeated without a copy: every part of a repeated dimension reads the input whole."""

    ops = ("aten.expand.default",)
    shape_at = 1

    def loops(self, call: Call) -> Iterable[Loop]:
        return elementwise((call.inputs[0].shape,), (output_at(call, 0).shape,))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.expand.default", (T((3, 1)), (2, 3, 4)))
        yield Sample("aten.expand.default", (X, (2, -1, 4)), (("implicit", True),))
        yield Sample("aten.expand.default", (T((3, 1, 6)), (5, -1, 4, -1)))
        yield Sample("aten.expand.default", (T(()), (3,)))


class Rank(Moved):
    """Dimensions of length 1 added or taken away."""

    ops = overloads("squeeze.dim squeeze.dims unsqueeze.default")

    def dims(self, call: Call) -> tuple[int, ...]:
        """The dimensions named, those of a squeeze that are longer than 1 (and stay) included."""
        shape = call.inputs[0].shape if "squeeze.dim" in call.op else output_at(call, 0).shape
        return wrapped(ints_at(call, 1, "dim"), len(shape))

    def pairs(self, call: Call) -> Iterator[Pair]:
        shape, dims = call.inputs[0].shape, self.dims(call)
        if call.op == "aten.unsqueeze.default":
            yield from kept(shape, ((place, dim) for dim, place in without(len(shape) + 1, *dims)))
            return
        gone = [dim for dim in dims if shape and shape[dim] == 1]
        for axis, place in kept(shape, without(len(shape), *gone)):
            if axis.dim not in dims or call.op == "aten.squeeze.dims":
                yield axis, place

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        """A part of length 1 keeps its dimension: `squeeze` then names only those that the whole call takes away."""
        if call.op != "aten.squeeze.dims":
            return call.args, call.kwargs
        shape, axis = call.inputs[0].shape, loop.inputs[0]
        gone = tuple(dim for dim in self.dims(call) if axis is None or dim != axis.dim)
        return with_argument(call.args, call.kwargs, 1, "dim", tuple(dim for dim in gone if shape[dim] == 1))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.squeeze.dim", (T((2, 1, 3)), 1))
        yield Sample("aten.squeeze.dim", (T((3, 4, 1, 5)), -3))
        yield Sample("aten.squeeze.dims", (T((1, 2, 1)), (0, 2)))
        yield Sample("aten.squeeze.dims", (T((3, 1, 4, 1, 5)), (-2, 1, 0)))
        yield Sample("aten.unsqueeze.default", (X, -1))
        yield Sample("aten.unsqueeze.default", (T((3, 4, 5)), 1))
        yield Sample("aten.unsqueeze.default", (T((3, 4, 5)), -4))


class Slice(Moved):
    """`slice(x, dim, start, end, step)`."""

    ops = ("aten.slice.Tensor",)

    def taken(self, call: Call) -> tuple[int, int, range]:
        """The dimension, its length, and the positions taken of it."""
        shape = call.inputs[0].shape
        dim = int_at(call, 1, "dim") % len(shape)
        return dim, shape[dim], slice_range(call, shape[dim], 2)

    def pairs(self, call: Call) -> Iterator[Pair]:
        dim, length, taken = self.taken(call)
        shape = call.inputs[0].shape
        yield from kept(shape, beside(len(shape), dim))
        yield from slice_pairs(length, dim, taken)

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        (dim, whole, taken), axis = self.taken(call), loop.inputs[0]
        assert axis is not None
        if axis.dim != dim:
            return call.args, call.kwargs
        return (call.args[0], dim, *slice_part(taken, whole, axis, length)), ()

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.slice.Tensor", (X, 2, 1, 3))
        yield Sample("aten.slice.Tensor", (X, 0, 0, 9223372036854775807))
        yield Sample("aten.slice.Tensor", (X, 1, None, None, 2))
        yield Sample("aten.slice.Tensor", (T((3, 4, 12)), -1, 4, 8))
        yield Sample("aten.slice.Tensor", (T((3, 4, 12)), 2, -6))
        yield Sample("aten.slice.Tensor", (T((3, 4, 12)), 2, -11, -1, 3))
        yield Sample("aten.slice.Tensor", (T((3, 4, 12)), 2, 0, 9223372036854775807, 4))


class Pick(Moved):
    """Dimensions of which one position, or a diagonal, is left."""

    ops = overloads("diagonal.default select.int")

    def pairs(self, call: Call) -> Iterable[Pair]:
        shape = call.inputs[0].shape
        dims: tuple[int, ...] = (int_at(call, 1, "dim"),)
        if call.op == "aten.diagonal.default":
            dims = (int_at(call, 2, "dim1"), int_at(call, 3, "dim2", 1))
        return kept(shape, without(len(shape), *dims))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.diagonal.default", (X, 1, 1, 2))
        yield Sample("aten.diagonal.default", (T((3, 4, 5, 6)), 0, -1, 1))
        yield Sample("aten.diagonal.default", (T((3, 4)),))
        yield Sample("aten.select.int", (X, 1, -1))
        yield Sample("aten.select.int", (T((3, 4, 5)), -3, 0))


class Divide(View):
    """Results side by side in the input: `split(x, size or sizes, dim)`. Pieces that the shortest measures, such as
    the query, key and value of one projection, are all divided at once."""

    ops = overloads("""
        split.Tensor split_with_sizes.default unsafe_split.Tensor unsafe_split_with_sizes.default
    """)

    def loops(self, call: Call) -> Iterator[Loop]:
        shape = call.inputs[0].shape
        dim = int_at(call, 2, "dim") % len(shape)
        yield from moved(call, kept(shape, beside(len(shape), dim)))
        found = pieces(dim, [output_at(call, index).shape[dim] for index in range(len(call.outputs))])
        if found is not None:
            whole, *parts = found
            yield Loop((whole,), tuple(Concat(axis) for axis in parts))

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        dim, axis = int_at(call, 2, "dim") % len(call.inputs[0].shape), loop.inputs[0]
        assert axis is not None
        if axis.dim != dim:
            return call.args, call.kwargs
        sizes = [output_at(call, index).shape[dim] for index in range(len(call.outputs))]
        lengths = tuple(resized(size, concat_axis(loop, index), length) for index, size in enumerate(sizes))
        if call.op.endswith(".Tensor"):
            return with_argument(call.args, call.kwargs, 1, "split_size", lengths[0])
        return with_argument(call.args, call.kwargs, 1, "split_sizes", lengths)

    def samples(self) -> Iterable[Sample]:
        for op in overloads("split.Tensor unsafe_split.Tensor"):
            yield Sample(op, (X, 2, 2))
            yield Sample(op, (X, 5, 1))
            yield Sample(op, (WIDE, 2, -1))
            yield Sample(op, (T((10, 3)), 4))
        for op in overloads("split_with_sizes.default unsafe_split_with_sizes.default"):
            yield Sample(op, (X, (1, 3), -1))
            yield Sample(op, (T((3, 5, 16)), (8, 4, 4), 2))


class Unbind(View):
    """`unbind(x, dim)`: one result for each position of a dimension."""

    ops = ("aten.unbind.int",)

    def loops(self, call: Call) -> Iterable[Loop]:
        shape = call.inputs[0].shape
        return moved(call, kept(shape, without(len(shape), int_at(call, 1, "dim"))))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.unbind.int", (X, 1))
        yield Sample("aten.unbind.int", (T((3, 4, 5)), -1))


class Unfold(Moved):
    """`unfold(x, dim, size, step)`: windows of a dimension, their positions in a new last dimension."""

    ops = ("aten.unfold.default",)

    def pairs(self, call: Call) -> Iterator[Pair]:
        shape = call.inputs[0].shape
        if not shape:
            return
        dim = int_at(call, 1, "dimension") % len(shape)
        yield from kept(shape, beside(len(shape), dim))
        yield from window_pairs(shape[dim], dim, output_at(call, 0).shape, int_at(call, 3, "step"))

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        axis = concat_axis(loop)
        if axis.dim < len(call.inputs[0].shape):
            return call.args, call.kwargs
        size = resized(int_at(call, 2, "size"), axis, length)
        return (*call.args[:2], size, size), call.kwargs

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.unfold.default", (X, 2, 2, 1))
        yield Sample("aten.unfold.default", (T((5, 12, 3)), 1, 4, 4))
        yield Sample("aten.unfold.default", (T((5, 12)), 1, 3, 4))
        yield Sample("aten.unfold.default", (T((5, 7)), -1, 3, 3))


class Reinterpret(Moved):
    """The same bytes as other elements: where these differ in size, several of the last dimension make one, or one
    makes several. Real and imaginary parts, the last dimension of real numbers, belong together."""

    ops = overloads("view.dtype view_as_complex.default view_as_real.default")

    def pairs(self, call: Call) -> Iterable[Pair]:
        source, target = input_at(call, 0, "self").shape, output_at(call, 0).shape
        return kept([min(lengths) for lengths in zip(source, target)], beside(min(len(source), len(target))))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.view.dtype", (X, DType.I32))
        yield Sample("aten.view.dtype", (T((3, 4)), DType.BF16))
        yield Sample("aten.view.dtype", (T((3, 4), DType.I32), DType.I64))
        yield Sample("aten.view_as_complex.default", (T((3, 2)),))
        yield Sample("aten.view_as_complex.default", (T((5, 3, 2)),))
        yield Sample("aten.view_as_real.default", (T((3,), DType.C64),))
