"""Reading by index: rows touched are counted, not the whole table (device model v1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from magis.ir.args import Args, Kwargs, Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import flag_at, input_at, int_at, number_at, output_at, overloads
from magis.ops.indexing import Indexing
from magis.ops.layout import beside, joint, kept, slot
from magis.ops.loop import Axis, Concat, Loop, Reduce, aligned, whole_dims
from magis.ops.rule import Kernel, OpRule, Sample, T, compute_dtype, read_bytes, square, stored_bytes, written_bytes

X, ROWS = T((5, 4)), T((2, 3), DType.I64, 5)


class Gather(OpRule):
    """Results are elements of the table, which is the first argument: reads as many as it writes. How many
    `masked_select` gives depends on the mask: it has no loops."""

    ops = overloads("masked_select.default")

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        table = stored_bytes(input_at(call, 0, "self"))
        indices = read_bytes(call) - table
        written = written_bytes(call)
        return (Kernel(min(table, written) + indices + written, dtype=compute_dtype(call)),)

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.masked_select.default", (X, T((5, 4), DType.BOOL)))


class Lookup(Gather):
    """`embedding(table, indices)` takes rows, `take(x, index)` elements of the flattened x: every index by itself.
    The width of rows is divided as well."""

    ops = overloads("embedding.default take.default")

    def loops(self, call: Call) -> Iterator[Loop]:
        table, index = slot(call, 0, "self"), slot(call, 1, "indices")
        for axis in whole_dims(input_at(call, 1, "indices").shape, range(len(input_at(call, 1, "indices").shape))):
            yield from joint(call, ((table, None), (index, axis)), Concat(axis))
        if "embedding" in call.op:
            for axis in whole_dims(output_at(call, 0).shape, (len(output_at(call, 0).shape) - 1,)):
                yield from joint(call, ((table, Axis(1, axis.length)), (index, None)), Concat(axis))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.embedding.default", (X, ROWS))
        yield Sample("aten.embedding.default", (T((5, 4), DType.BF16), ROWS, 0))
        yield Sample("aten.embedding.default", (T((7, 6)), T((3, 5), DType.I32, 7)))
        yield Sample("aten.take.default", (X, T((3,), DType.I64, 20)))
        yield Sample("aten.take.default", (X, T((3, 6), DType.I64, 20)))


class GatherAlong(Gather):
    """`gather(x, dim, index)` and `index_select(x, dim, index)`: indices are divided where they count along `dim`, x
    (and the index of a gather) along the other dimensions. Of a dimension of x that is longer than the index's,
    only the beginning is read."""

    ops = overloads("gather.default index_select.default")

    def loops(self, call: Call) -> Iterator[Loop]:
        shape, source, index = output_at(call, 0).shape, slot(call, 0, "self"), slot(call, 2, "index")
        if not shape:
            return
        dim, selects = int_at(call, 1, "dim") % len(shape), "index_select" in call.op
        for axis in whole_dims(shape, range(len(shape))):
            if axis.dim == dim:
                place = Axis(0, axis.length) if selects else axis
                yield from joint(call, ((source, None), (index, place)), Concat(axis))
            elif input_at(call, 0, "self").shape[axis.dim] == axis.length:
                yield from joint(call, ((source, axis), (index, None if selects else axis)), Concat(axis))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.gather.default", (X, 0, T((2, 4), DType.I64, 5)))
        yield Sample("aten.gather.default", (X, -1, T((5, 1), DType.I64, 4)))
        yield Sample("aten.gather.default", (T((6, 5, 4)), 1, T((6, 3, 2), DType.I64, 5)))
        yield Sample("aten.gather.default", (T(()), 0, T((3,), DType.I64, 1)))
        yield Sample("aten.index_select.default", (X, 1, T((3,), DType.I64, 4)))
        yield Sample("aten.index_select.default", (T((3, 6, 5)), -3, T((4,), DType.I64, 3)))
        yield Sample("aten.index_select.default", (X, 0, T((), DType.I64, 4)))


class Index(Gather):
    """`index(x, indices)`, one tensor of indices or None for each dimension of x, and `_unsafe_masked_index(x, mask,
    indices, fill)`."""

    ops = overloads("_unsafe_index.Tensor _unsafe_masked_index.default index.Tensor")

    def loops(self, call: Call) -> Iterator[Loop]:
        mask = slot(call, 1, "mask") if "masked" in call.op else None
        found = Indexing.of(call, 1 if mask is None else 2)
        result = output_at(call, 0).shape
        if found is None or not found.fits(result):
            return
        for axis in found.axes():
            reads = list(found.reads(axis))
            if mask is not None:
                reads.append((mask, aligned(call.inputs[mask].shape, len(result), axis.dim, axis.length)))
            yield from joint(call, reads, Concat(axis))

    def samples(self) -> Iterable[Sample]:
        rows, columns = T((6,), DType.I64, 5), T((6,), DType.I64, 4)
        for op in overloads("_unsafe_index.Tensor index.Tensor"):
            yield Sample(op, (X, (rows,)))
            yield Sample(op, (X, (None, T((3,), DType.I64, 4))))
            yield Sample(op, (T((2, 5, 4)), (None, T((2, 1), DType.I64, 5), T((3,), DType.I64, 4))))
            yield Sample(op, (T((3, 5, 7, 4)), (None, rows, None, columns)))
            yield Sample(op, (T((3, 5, 4, 7)), (None, T((), DType.I64, 5), T((6, 2), DType.I64, 4))))
        yield Sample("aten.index.Tensor", (T((3, 5, 4, 6)), (None, T((5, 4), DType.BOOL))))
        yield Sample("aten.index.Tensor", (T((3, 5, 4)), (T((1,), DType.I64, 3), None, T((4,), DType.BOOL))))
        yield Sample("aten.index.Tensor", (T((6, 5, 4)), (T((3,), DType.I64, 6), None, T((1,), DType.I64, 4))))
        mask = T((6,), DType.BOOL)
        yield Sample("aten._unsafe_masked_index.default", (X, mask, (rows, columns), 0))
        image, row, column = T((3, 2, 5, 4)), T((7, 1), DType.I64, 5), T((6,), DType.I64, 4)
        mask = T((7, 6), DType.BOOL)
        yield Sample("aten._unsafe_masked_index.default", (image, mask, (None, None, row, column), 0.5))


class EmbeddingBackward(OpRule):
    """`(grad, indices, rows, padding, scale by frequency)`: gradients of equal indices are summed in one row. Parts
    of the indices give partial sums, unless these are scaled by how often an index occurs among all."""

    ops = ("aten.embedding_dense_backward.default",)

    def loops(self, call: Call) -> Iterator[Loop]:
        indices, grad = input_at(call, 1, "indices").shape, input_at(call, 0, "grad_output").shape
        places = slot(call, 0, "grad_output"), slot(call, 1, "indices")
        if not flag_at(call, 4, "scale_grad_by_freq"):
            for axis in whole_dims(indices, range(len(indices))):
                yield from joint(call, zip(places, (axis, axis)), Reduce("sum"))
        for axis in whole_dims(grad, (len(grad) - 1,)):
            yield from joint(call, zip(places, (axis, None)), Concat(Axis(1, axis.length)))

    def adding(self, call: Call) -> tuple[str, Args, Kwargs] | None:
        """Rows added to a table where they belong; in half precision that would round after every row."""
        (grad, indices), padding = call.args[:2], int_at(call, 3, "padding_idx", -1)
        exact = input_at(call, 0, "grad_output").dtype in (DType.F32, DType.F64)
        if not exact or padding >= 0 or flag_at(call, 4, "scale_grad_by_freq"):
            return None
        return "aten.index_put_.default", (Slot(len(call.inputs)), (indices,), grad, True), ()

    def terms(self, call: Call, output: int) -> int:
        return input_at(call, 1, "indices").numel

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        grad, indices = tensors[0], tensors[1].reshape(-1)
        rows = int_at(call, 2, "num_weights")
        squares = square(grad).reshape(indices.numel(), -1)
        kept = indices != int_at(call, 3, "padding_idx", -1)
        total = squares.new_zeros(rows, squares.shape[1]).index_add(0, indices[kept], squares[kept])
        if not flag_at(call, 4, "scale_grad_by_freq"):
            return total
        return total / torch.bincount(indices, minlength=rows).clamp(min=1).square().unsqueeze(1)

    def samples(self) -> Iterable[Sample]:
        grad = T((2, 3, 4))
        yield Sample(self.ops[0], (grad, ROWS, 5, -1, False))
        yield Sample(self.ops[0], (grad, ROWS, 5, 1, False))
        yield Sample(self.ops[0], (grad, ROWS, 5, -1, True))
        yield Sample(self.ops[0], (T((2, 3, 4), DType.BF16), ROWS, 5, -1, False))
        yield Sample(self.ops[0], (T((6, 3, 4)), T((6, 3), DType.I64, 5), 5, 2, False))


class Search(OpRule):
    """Counts of values and places of nonzeros: as many results as the numbers decide, or each from all of them."""

    ops = overloads("bincount.default histc.default nonzero.default")
    _plain: ClassVar[dict[str, tuple[Any, ...]]] = {
        "bincount.default": (T((6,), DType.I64, 4),),
        "histc.default": (X, 4, -1, 1),
        "nonzero.default": (X,),
    }

    def loops(self, call: Call) -> Iterator[Loop]:
        """A histogram between given bounds is the sum of the parts' histograms."""
        if "histc" in call.op and number_at(call, 2, "min", 0) < number_at(call, 3, "max", 0):
            shape = call.inputs[0].shape
            for axis, _ in kept(shape, beside(len(shape))):
                yield Loop((axis,), (Reduce("sum"),))

    def samples(self) -> Iterable[Sample]:
        for name, args in self._plain.items():
            yield Sample(f"aten.{name}", args)
        yield Sample("aten.histc.default", (X, 4))


class Locate(OpRule):
    """Places of values in a sorted sequence, and tests of membership: every value by itself, against the whole
    sequence or set. The rows of several sequences are divided together with the rows of values."""

    ops = overloads("""
        bucketize.Scalar bucketize.Tensor isin.Tensor_Scalar isin.Tensor_Tensor searchsorted.Tensor
    """)

    def loops(self, call: Call) -> Iterator[Loop]:
        result, searched = output_at(call, 0).shape, "searchsorted" in call.op
        values = slot(call, 1 if searched else 0, "self")
        among = slot(call, 0, "sorted_sequence") if searched else slot(call, 1, "")
        rows = len(call.inputs[among].shape) - 1 if searched and among is not None else 0
        for axis in whole_dims(result, range(len(result)) if values is not None else ()):
            row = axis if axis.dim < rows else None
            yield from joint(call, ((values, axis), (among, row), (slot(call, 9, "sorter"), row)), Concat(axis))
        if call.op == "aten.isin.Tensor_Tensor" and among is not None:
            for axis in whole_dims(call.inputs[among].shape, range(len(call.inputs[among].shape))):
                role = Reduce("min" if flag_at(call, 9, "invert") else "max")
                yield from joint(call, ((values, None), (among, axis)), role)

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.bucketize.Scalar", (0.5, T((4,))))
        yield Sample("aten.bucketize.Tensor", (X, T((3,))))
        numbers = T((6,), DType.I64, 4)
        yield Sample("aten.isin.Tensor_Scalar", (numbers, 2))
        yield Sample("aten.isin.Tensor_Tensor", (numbers, T((2,), DType.I64, 4)))
        yield Sample("aten.isin.Tensor_Tensor", (T((5, 3), DType.I64, 9), T((4,), DType.I64, 9)), (("invert", True),))
        yield Sample("aten.searchsorted.Tensor", (T((4,)), X))
        yield Sample("aten.searchsorted.Tensor", (T((5, 3)), X))
        yield Sample("aten.searchsorted.Tensor", (T((5, 3)), X), (("sorter", T((5, 3), DType.I64, 3)),))
