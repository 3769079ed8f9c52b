"""Reading by index: rows touched are counted, not the whole table (device model v1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import flag_at, input_at, int_at, overloads
from magis.ops.rule import Kernel, OpRule, Sample, T, compute_dtype, read_bytes, square, stored_bytes, written_bytes

X, ROWS = T((5, 4)), T((2, 3), DType.I64, 5)


class Gather(OpRule):
    """Results are elements of the table, which is the first argument: reads as many as it writes."""

    ops = overloads("""
        _unsafe_index.Tensor _unsafe_masked_index.default embedding.default gather.default index.Tensor
        index_select.default masked_select.default take.default
    """)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        table = stored_bytes(input_at(call, 0, "self"))
        indices = read_bytes(call) - table
        written = written_bytes(call)
        return (Kernel(min(table, written) + indices + written, dtype=compute_dtype(call)),)

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.embedding.default", (X, ROWS))
        yield Sample("aten.embedding.default", (T((5, 4), DType.BF16), ROWS, 0))
        yield Sample("aten.gather.default", (X, 0, T((2, 4), DType.I64, 5)))
        yield Sample("aten.gather.default", (X, -1, T((5, 1), DType.I64, 4)))
        for op in overloads("_unsafe_index.Tensor index.Tensor"):
            yield Sample(op, (X, (T((6,), DType.I64, 5),)))
            yield Sample(op, (X, (None, T((3,), DType.I64, 4))))
            yield Sample(op, (T((2, 5, 4)), (None, T((2, 1), DType.I64, 5), T((3,), DType.I64, 4))))
        mask = T((6,), DType.BOOL)
        yield Sample("aten._unsafe_masked_index.default", (X, mask, (T((6,), DType.I64, 5), T((6,), DType.I64, 4)), 0))
        yield Sample("aten.index_select.default", (X, 1, T((3,), DType.I64, 4)))
        yield Sample("aten.masked_select.default", (X, T((5, 4), DType.BOOL)))
        yield Sample("aten.take.default", (X, T((3,), DType.I64, 20)))


class EmbeddingBackward(OpRule):
    """`(grad, indices, rows, padding, scale by frequency)`: gradients of equal indices are summed in one row."""

    ops = ("aten.embedding_dense_backward.default",)

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


class Search(OpRule):
    """Places of values in a sorted sequence, counts of values, tests of membership: results are integers."""

    ops = overloads("""
        bincount.default bucketize.Scalar bucketize.Tensor histc.default isin.Tensor_Scalar isin.Tensor_Tensor
        nonzero.default searchsorted.Tensor
    """)
    _plain: ClassVar[dict[str, tuple[Any, ...]]] = {
        "bincount.default": (T((6,), DType.I64, 4),),
        "bucketize.Scalar": (0.5, T((4,))),
        "bucketize.Tensor": (X, T((4,))),
        "histc.default": (X, 4, -1, 1),
        "isin.Tensor_Scalar": (T((6,), DType.I64, 4), 2),
        "isin.Tensor_Tensor": (T((6,), DType.I64, 4), T((2,), DType.I64, 4)),
        "nonzero.default": (X,),
        "searchsorted.Tensor": (T((4,)), X),
    }

    def samples(self) -> Iterable[Sample]:
        for name, args in self._plain.items():
            yield Sample(f"aten.{name}", args)
