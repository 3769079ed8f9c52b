"""Writing by index or slice into a copy: the copy is read and written whole, the values once.

In-place forms, which touch only what they write, are with the in-place writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, prod
from typing import Any, ClassVar

from magis.ir.args import Slot, substitute
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import broadcast, flag_at, given, input_at, int_at, number_at, overloads
from magis.ops.rule import OpRule, Sample, T, argument, square

X, COLUMN = T((5, 4)), T((3,), DType.I64, 4)


class Scatter(OpRule):
    """Values replace elements: nothing is summed, but where two values meet the last one wins."""

    ops = overloads("""
        as_strided_scatter.default diagonal_scatter.default index_copy.default index_fill.int_Scalar
        index_fill.int_Tensor masked_scatter.default scatter.src scatter.value select_scatter.default
        slice_scatter.default
    """)
    _plain: ClassVar[dict[str, tuple[Any, ...]]] = {
        "as_strided_scatter.default": (X, T((2, 2)), (2, 2), (4, 1), 1),
        "diagonal_scatter.default": (X, T((4,)), 0),
        "index_copy.default": (X, 0, T((1,), DType.I64, 5), T((1, 4))),
        "index_fill.int_Scalar": (X, 1, COLUMN, 2.0),
        "index_fill.int_Tensor": (X, 1, COLUMN, T(())),
        "masked_scatter.default": (X, T((5, 4), DType.BOOL), T((20,))),
        "scatter.src": (X, 0, T((1, 3), DType.I64, 5), T((2, 4))),
        "scatter.value": (X, 1, T((5, 2), DType.I64, 4), 1.5),
        "select_scatter.default": (X, T((5,)), 1, 2),
        "slice_scatter.default": (X, T((5, 2)), 1, 0, 2),
    }

    def samples(self) -> Iterable[Sample]:
        for name, args in self._plain.items():
            yield Sample(f"aten.{name}", args)


class Place(OpRule):
    """Gradients of slices and selections: zeros but for the part given."""

    ops = overloads("""
        diagonal_backward.default masked_scatter_backward.default select_backward.default slice_backward.default
    """)

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.diagonal_backward.default", (T((4,)), (5, 4), 0, 0, 1))
        yield Sample("aten.masked_scatter_backward.default", (X, T((5, 4), DType.BOOL), (20,)))
        yield Sample("aten.select_backward.default", (T((5,)), (5, 4), 1, -1))
        yield Sample("aten.slice_backward.default", (T((5, 2)), (5, 4), 1, 0, 4, 2))
        yield Sample("aten.slice_backward.default", (T((2, 4), DType.BF16), (5, 4), 0, 3, 9223372036854775807, 1))


class IndexPut(OpRule):
    """`index_put(x, indices, values, accumulate)`; `put` counts places in the flattened x."""

    ops = overloads("_unsafe_index_put.default index_put.default put.default")

    def accumulates(self, call: Call) -> bool:
        """Whether values are added instead of replacing."""
        return flag_at(call, 3, "accumulate")

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
        yield Sample("aten.index_put.default", (X, (T((1,), DType.I64, 5),), T(())))
        yield Sample("aten.put.default", (X, T((3,), DType.I64, 20), T((3,)), True))


class ScatterAdd(OpRule):
    """`scatter_add(x, dim, index, source)` and `index_add(x, dim, index, source, alpha)`."""

    ops = overloads("index_add.default scatter_add.default")

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
    """Other reductions of the values that meet: their own size is their scale."""

    ops = overloads("index_reduce.default scatter.reduce scatter.value_reduce scatter_reduce.two")

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return None

    def samples(self) -> Iterable[Sample]:
        index, source = T((4, 3), DType.I64, 5), T((4, 4))
        yield Sample("aten.index_reduce.default", (X, 0, T((2,), DType.I64, 5), T((2, 4)), "prod"))
        yield Sample("aten.scatter.reduce", (X, 0, index, source), (("reduce", "multiply"),))
        yield Sample("aten.scatter.value_reduce", (X, 0, index, 2.0), (("reduce", "add"),))
        yield Sample("aten.scatter_reduce.two", (X, 0, index, source, "amax"), (("include_self", False),))


class MaskedIndexPut(OpRule):
    """`(x, mask, indices, values)` adds the values where the mask holds."""

    ops = ("aten._unsafe_masked_index_put_accumulate.default",)

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


class UnfoldBackward(OpRule):
    """Gradient of `unfold(dim, size, step)`: windows that overlap are summed."""

    ops = ("aten.unfold_backward.default",)

    def terms(self, call: Call, output: int) -> int:
        windows = input_at(call, 0, "grad_in").shape[int_at(call, 2, "dim")]
        return min(windows, ceil(int_at(call, 3, "size") / max(int_at(call, 4, "step"), 1)))

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return torch.ops.aten.unfold_backward.default(square(tensors[0]), *call.args[1:])

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T((5, 3, 2)), (5, 4), 1, 2, 1))
        yield Sample(self.ops[0], (T((2, 4, 3)), (5, 4), 0, 3, 2))
