"""Writing by index or slice into a copy: the copy is read and written whole, the values once.

In-place forms, which touch only what they write, are with the in-place writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, prod
from typing import Any

from magis.ir.args import Args, Kwargs, Slot, substitute
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import broadcast, flag_at, given, input_at, int_at, number_at, output_at, overloads
from magis.ops.indexing import beside_indices
from magis.ops.layout import (
    beside,
    joint,
    kept,
    piece_pairs,
    resized,
    result_part,
    sliced_args,
    slot,
    window_pairs,
    with_argument,
)
from magis.ops.loop import Axis, Concat, Loop, Reduce
from magis.ops.rule import OpRule, Sample, T, argument, square

X, COLUMN = T((5, 4)), T((3,), DType.I64, 4)


class Scatter(OpRule):
    """Values replace elements: nothing is summed, but where two values meet the last one wins.

    `as_strided_scatter` writes to places of a storage, `masked_scatter` counts the elements before: both, and the
    gradient of the latter, are run whole."""

    ops = overloads("as_strided_scatter.default masked_scatter.default masked_scatter_backward.default")

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.as_strided_scatter.default", (X, T((2, 2)), (2, 2), (4, 1), 1))
        yield Sample("aten.masked_scatter.default", (X, T((5, 4), DType.BOOL), T((20,))))
        yield Sample("aten.masked_scatter_backward.default", (X, T((5, 4), DType.BOOL), (20,)))


class Insert(OpRule):
    """`slice_scatter(x, piece, dim, start, end, step)`, `select_scatter(x, piece, dim, index)` and
    `diagonal_scatter(x, piece, offset, dim1, dim2)`: x with a piece replaced."""

    ops = overloads("diagonal_scatter.default select_scatter.default slice_scatter.default")

    def loops(self, call: Call) -> Iterator[Loop]:
        for axis, piece in piece_pairs(call, 2):
            yield from joint(call, ((slot(call, 0, "self"), axis), (slot(call, 1, "src"), piece)), Concat(axis))

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        return sliced_args(call, 2, call.args, loop, length), call.kwargs

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.diagonal_scatter.default", (X, T((4,)), 0))
        yield Sample("aten.diagonal_scatter.default", (T((5, 3, 4)), T((3, 4)), -1, 0, -1))
        yield Sample("aten.select_scatter.default", (X, T((5,)), 1, 2))
        yield Sample("aten.select_scatter.default", (T((3, 5, 4)), T((3, 4)), -2, -1))
        yield Sample("aten.slice_scatter.default", (X, T((5, 2)), 1, 0, 2))
        yield Sample("aten.slice_scatter.default", (T((3, 12)), T((3, 3)), -1, -6, -3))
        yield Sample("aten.slice_scatter.default", (T((3, 12)), T((3, 4)), 1, 2, None, 3))


class Place(OpRule):
    """Gradients of slices, selections and diagonals: `(grad, sizes, ...)`, zeros but for the part given."""

    ops = overloads("diagonal_backward.default select_backward.default slice_backward.default")

    def loops(self, call: Call) -> Iterator[Loop]:
        for axis, piece in piece_pairs(call, 2):
            yield from joint(call, ((slot(call, 0, "grad_output"), piece),), Concat(axis))

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        args, kwargs = with_argument(call.args, call.kwargs, 1, "input_sizes", result_part(call, loop, length))
        return sliced_args(call, 2, args, loop, length), kwargs

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.diagonal_backward.default", (T((4,)), (5, 4), 0, 0, 1))
        yield Sample("aten.diagonal_backward.default", (T((3, 4)), (5, 3, 4), -1, 0, -1))
        yield Sample("aten.select_backward.default", (T((5,)), (5, 4), 1, -1))
        yield Sample("aten.select_backward.default", (T((3, 4)), (3, 5, 4), -2, 0))
        yield Sample("aten.slice_backward.default", (T((5, 2)), (5, 4), 1, 0, 4, 2))
        yield Sample("aten.slice_backward.default", (T((2, 4), DType.BF16), (5, 4), 0, 3, 9223372036854775807, 1))
        yield Sample("aten.slice_backward.default", (T((5, 3)), (5, 12), -1, 6, 9, 1))
        yield Sample("aten.slice_backward.default", (T((3, 6, 4)), (3, 6, 4), 1, 0, 9223372036854775807, 1))


def beside_dim(call: Call) -> Iterator[Loop]:
    """The loops of `op(x, dim, index, values, ...)` along dimensions other than the indexed one. A `scatter` has an
    index for each value, and touches only the beginning of dimensions in which x is longer."""
    shape, pointwise = output_at(call, 0).shape, "scatter" in call.op
    source, index, values = (
        slot(call, 0, "self"),
        slot(call, 2, "index"),
        slot(call, 3, "src" if pointwise else "source"),
    )
    for axis, _ in kept(shape, beside(len(shape), int_at(call, 1, "dim"))):
        reads: list[tuple[int | None, Axis | None]] = [(source, axis), (index, axis if pointwise else None)]
        reads.append((values, None if values is None or not call.inputs[values].shape else axis))
        sliced = [call.inputs[number].shape for number, along in reads if number is not None and along is not None]
        if all(len(other) == len(shape) and other[axis.dim] == axis.length for other in sliced):
            yield from joint(call, reads, Concat(axis))


class Replace(OpRule):
    """Values replace elements: nothing is summed, but where two values meet the last one wins."""

    ops = overloads("""
        index_copy.default index_fill.int_Scalar index_fill.int_Tensor scatter.src scatter.value
    """)

    def loops(self, call: Call) -> Iterable[Loop]:
        return beside_dim(call)

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.index_copy.default", (X, 0, T((1,), DType.I64, 5), T((1, 4))))
        yield Sample("aten.index_copy.default", (T((3, 5, 6)), -2, T((1,), DType.I64, 5), T((3, 1, 6))))
        yield Sample("aten.index_fill.int_Scalar", (X, 1, COLUMN, 2.0))
        yield Sample("aten.index_fill.int_Tensor", (X, 1, COLUMN, T(())))
        yield Sample("aten.scatter.src", (X, 0, T((1, 3), DType.I64, 5), T((2, 4))))
        yield Sample("aten.scatter.src", (T((3, 5, 6)), 1, T((3, 1, 6), DType.I64, 5), T((3, 2, 6))))
        yield Sample("aten.scatter.value", (X, 1, T((5, 2), DType.I64, 4), 1.5))


class IndexPut(OpRule):
    """`index_put(x, indices, values, accumulate)`; `put` counts places in the flattened x.

    Only dimensions that are not indexed are divided: parts of the values would each be put into all of x."""

    ops = overloads("_unsafe_index_put.default index_put.default put.default")

    def accumulates(self, call: Call) -> bool:
        """Whether values are added instead of replacing."""
        return flag_at(call, 3, "accumulate")

    def loops(self, call: Call) -> Iterable[Loop]:
        return beside_indices(call, 1, slot(call, 2, "values"))

    def terms(self, call: Call, output: int) -> int:
        """At most all values that share an element: one for each index."""
        if not self.accumulates(call):
            return 1
        indices = argument(call, 1, "indices")
        slots = indices if isinstance(indices, tuple) else (indices,)
        shapes = [call.inputs[item.index].shape for item in slots if isinstance(item, Slot)]
        return 1 + prod(broadcast(*shapes))

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        if not self.accumulates(call):
            return None
        x, values = given(call, tensors, 0, "self"), given(call, tensors, 2, "values")
        indices = substitute(argument(call, 1, "indices"), lambda slot: tensors[slot.index])
        name = "put" if "aten.put" in call.op else "index_put"
        run = getattr(torch.ops.aten, name).default
        return run(square(x), indices, square(values), True)

    def samples(self) -> Iterable[Sample]:
        for op in overloads("_unsafe_index_put.default index_put.default"):
            yield Sample(op, (X, (T((3,), DType.I64, 5),), T((3, 4)), True))
            yield Sample(op, (X, (T((2, 1), DType.I64, 5), T((3,), DType.I64, 4)), T((2, 3)), True))
        yield Sample("aten.index_put.default", (X, (None, COLUMN), T((5, 3)), True))
        yield Sample("aten.index_put.default", (T((3, 5, 6)), (None, COLUMN), T((3, 3, 6)), True))
        yield Sample("aten.index_put.default", (T((3, 5, 6)), (None, COLUMN), T((3, 1, 6))))
        yield Sample("aten.index_put.default", (T((4, 5, 6, 3)), (COLUMN, None, COLUMN), T((3, 5, 1)), True))
        yield Sample("aten.index_put.default", (T((3, 5, 4, 6)), (None, T((5, 4), DType.BOOL)), T((6,)), False))
        yield Sample("aten.index_put.default", (X, (T((1,), DType.I64, 5),), T(())))
        yield Sample("aten.index_put.default", (T((3, 4, 5)), (T((3, 4), DType.BOOL),), T(())))
        yield Sample("aten.index_put.default", (T((3, 4, 5)), (None, None, T((5,), DType.BOOL)), T((3, 1, 1))))
        yield Sample("aten.put.default", (X, T((3,), DType.I64, 20), T((3,)), True))


class ScatterAdd(OpRule):
    """`scatter_add(x, dim, index, source)` and `index_add(x, dim, index, source, alpha)`."""

    ops = overloads("index_add.default scatter_add.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        return beside_dim(call)

    def terms(self, call: Call, output: int) -> int:
        shape = input_at(call, 2, "index").shape
        dim = int_at(call, 1, "dim")
        return 1 + (shape[dim if "scatter" in call.op else 0] if shape else 1)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        x, index, source = (given(call, tensors, place, "") for place in (0, 2, 3))
        dim, alpha = int_at(call, 1, "dim"), number_at(call, 9, "alpha")
        if "scatter" in call.op:
            return square(x).scatter_add(dim, index, square(source))
        return square(x).index_add(dim, index, square(source), alpha=alpha * alpha)

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.scatter_add.default", (X, 0, T((4, 3), DType.I64, 5), T((4, 4))))
        yield Sample("aten.scatter_add.default", (X, -1, T((5, 3), DType.I64, 4), T((5, 3))))
        yield Sample("aten.index_add.default", (X, 1, COLUMN, T((5, 3))))
        yield Sample("aten.index_add.default", (X, 0, T((2,), DType.I64, 5), T((2, 4))), (("alpha", -0.5),))


class ScatterReduce(ScatterAdd):
    """Other reductions of the values that meet: their own size is their scale. The largest or smallest of x and all
    values is that of x and the values of each part."""

    ops = overloads("index_reduce.default scatter.reduce scatter.value_reduce scatter_reduce.two")

    def loops(self, call: Call) -> Iterator[Loop]:
        yield from super().loops(call)
        by = {"amax": "max", "amin": "min"}.get(str(argument(call, 4, "reduce")))
        if by is None or not flag_at(call, 9, "include_self", True):
            return
        index, values, dim = input_at(call, 2, "index").shape, input_at(call, 3, "src").shape, int_at(call, 1, "dim")
        if not index or not values or index[place := dim % len(values) if "scatter" in call.op else 0] < 2:
            return
        if index[place] == values[dim % len(values)]:
            along, over = Axis(place, index[place]), Axis(dim % len(values), index[place])
            reads = ((slot(call, 0, "self"), None), (slot(call, 2, "index"), along), (slot(call, 3, "src"), over))
            yield from joint(call, reads, Reduce(by))

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return None

    def samples(self) -> Iterable[Sample]:
        index, source = T((4, 3), DType.I64, 5), T((4, 4))
        yield Sample("aten.index_reduce.default", (X, 0, T((2,), DType.I64, 5), T((2, 4)), "prod"))
        yield Sample("aten.scatter.reduce", (X, 0, index, source), (("reduce", "multiply"),))
        yield Sample("aten.scatter.value_reduce", (X, 0, index, 2.0), (("reduce", "add"),))
        yield Sample("aten.scatter_reduce.two", (X, 0, index, source, "amax"), (("include_self", False),))
        yield Sample("aten.scatter_reduce.two", (X, 0, T((6, 4), DType.I64, 5), T((6, 4)), "amin"))
        yield Sample("aten.index_reduce.default", (T((3, 5, 6)), 1, T((4,), DType.I64, 5), T((3, 4, 6)), "amax"))


class MaskedIndexPut(OpRule):
    """`(x, mask, indices, values)` adds the values where the mask holds."""

    ops = ("aten._unsafe_masked_index_put_accumulate.default",)

    def loops(self, call: Call) -> Iterable[Loop]:
        return beside_indices(call, 2, slot(call, 1, "mask"), slot(call, 3, "values"))

    def terms(self, call: Call, output: int) -> int:
        return 1 + input_at(call, 1, "mask").numel

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        x, mask, values = (given(call, tensors, place, "") for place in (0, 1, 3))
        indices = substitute(argument(call, 2, "indices"), lambda slot: tensors[slot.index])
        run = torch.ops.aten._unsafe_masked_index_put_accumulate.default
        return run(square(x), mask, indices, square(values))

    def samples(self) -> Iterable[Sample]:
        indices = (T((6,), DType.I64, 5), T((6,), DType.I64, 4))
        yield Sample(self.ops[0], (X, T((6,), DType.BOOL), indices, T((6,))))
        image, row, column = T((3, 2, 5, 4)), T((7, 1), DType.I64, 5), T((6,), DType.I64, 4)
        values = T((3, 2, 7, 6))
        yield Sample(self.ops[0], (image, T((7, 6), DType.BOOL), (None, None, row, column), values))


class UnfoldBackward(OpRule):
    """`(grad, sizes, dim, size, step)`, gradient of `unfold`: windows that overlap are summed."""

    ops = ("aten.unfold_backward.default",)

    def loops(self, call: Call) -> Iterator[Loop]:
        shape, windowed = output_at(call, 0).shape, input_at(call, 0, "grad_in").shape
        if not shape:
            return
        dim = int_at(call, 2, "dim") % len(shape)
        pairs = [*kept(shape, beside(len(shape), dim))]
        for axis, piece in [*pairs, *window_pairs(shape[dim], dim, windowed, int_at(call, 4, "step"))]:
            yield from joint(call, ((slot(call, 0, "grad_in"), piece),), Concat(axis))

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        args, kwargs = with_argument(call.args, call.kwargs, 1, "input_sizes", result_part(call, loop, length))
        axis = loop.inputs[0]
        if axis is not None and axis.dim == len(call.inputs[0].shape) - 1:
            size = resized(int_at(call, 3, "size"), axis, length)
            args = (*args[:3], size, size)
        return args, kwargs

    def terms(self, call: Call, output: int) -> int:
        windows = input_at(call, 0, "grad_in").shape[int_at(call, 2, "dim")]
        return min(windows, ceil(int_at(call, 3, "size") / max(int_at(call, 4, "step"), 1)))

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return torch.ops.aten.unfold_backward.default(square(tensors[0]), *call.args[1:])

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T((5, 3, 2)), (5, 4), 1, 2, 1))
        yield Sample(self.ops[0], (T((2, 4, 3)), (5, 4), 0, 3, 2))
        yield Sample(self.ops[0], (T((5, 3, 6, 4)), (5, 12, 6), -2, 4, 4))
