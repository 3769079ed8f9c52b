"""Reductions over dimensions, and running sums along one: one launch, every tensor once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import flag_at, input_at, ints_at, number_at, output_at, overloads, wrapped
from magis.ops.loop import Axis, Concat, Loop, Reduce
from magis.ops.rule import Kernel, OpRule, Sample, T, compute_dtype, square

X = T((4, 3, 6))

_NORMS = {float("inf"): ("max",), float("-inf"): ("min",), 0.0: ("sum",), 1.0: ("sum",)}
_EXTREMES = {
    "amax.default": ("max",),
    "amin.default": ("min",),
    "aminmax.default": ("min", "max"),
    "max.default": ("max",),
    "min.default": ("min",),
}
_LONG = 100_000


def reduced(call: Call, dims: tuple[int, ...], *by: str) -> Iterator[Loop]:
    """The loops of an operator that works along some dimensions of its only tensor: the others stay, with or without
    places for these; along these, the results' parts are combined `by` sum, average, max or min, or not at all."""
    shape = input_at(call, 0, "self").shape
    ranks = {len(spec.shape) for spec in call.outputs if spec is not None}
    if len(ranks) != 1 or len(call.inputs) != 1:
        return
    stays = ranks.pop() == len(shape)
    place = 0
    for dim, length in enumerate(shape):
        if dim not in dims and length > 1:
            kept = Concat(Axis(dim if stays else place, length))
            yield Loop((Axis(dim, length),), tuple(None if spec is None else kept for spec in call.outputs))
        elif dim in dims and length > 1 and by:
            yield Loop((Axis(dim, length),), tuple(Reduce(each) for each in by))
        place += dim not in dims


class Reduction(OpRule):
    """`op(x, dims, keepdim)`, over all of x when the dimensions are left out; what is summed is nonlinear in x,
    so that a result's own size is its scale."""

    ops = overloads("""
        count_nonzero.default count_nonzero.dim_IntList linalg_vector_norm.default logsumexp.default norm.Scalar
        norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype prod.default prod.dim_int
    """)

    def dims(self, call: Call) -> tuple[int, ...]:
        """The dimensions that disappear, counted from the start."""
        rank = len(input_at(call, 0, "self").shape)
        late = "norm" in call.op
        given = () if call.op.endswith((".Scalar", ".ScalarOpt_dtype")) else ints_at(call, 1 + late, "dim")
        return wrapped(given, rank) or tuple(range(rank))

    def loops(self, call: Call) -> Iterable[Loop]:
        yield from reduced(call, self.dims(call), *self.by(call))

    def by(self, call: Call) -> tuple[str, ...]:
        """How results for parts of what is reduced make the whole; empty when they do not."""
        if "count_nonzero" in call.op:
            return ("sum",)
        return _NORMS.get(number_at(call, 1, "ord", 2.0), ()) if "norm" in call.op else ()

    def terms(self, call: Call, output: int) -> int:
        shape = input_at(call, 0, "self").shape
        return prod(shape[dim] for dim in self.dims(call))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.count_nonzero.default", (X,))
        yield Sample("aten.count_nonzero.dim_IntList", (X, (0, 1)))
        yield Sample("aten.linalg_vector_norm.default", (X, 2, (1,), True))
        for order in (0, 1, float("inf"), float("-inf")):
            yield Sample("aten.linalg_vector_norm.default", (X, order, (0, -1)))
        yield Sample("aten.logsumexp.default", (X, (-1,), True))
        yield Sample("aten.logsumexp.default", (X, (0, 2)))
        yield Sample("aten.norm.Scalar", (X, 2))
        yield Sample("aten.norm.ScalarOpt_dim", (X, 2, (0, 2)))
        yield Sample("aten.norm.ScalarOpt_dim_dtype", (X, 2, (0, 2), False), (("dtype", DType.F64),))
        yield Sample("aten.norm.ScalarOpt_dtype", (X, 2), (("dtype", DType.F64),))
        yield Sample("aten.prod.default", (X,))
        yield Sample("aten.prod.dim_int", (X, 1))


class Sum(Reduction):
    """Sums, and means: the sum's terms divided by their number."""

    ops = overloads("mean.default mean.dim nansum.default sum.default sum.dim_IntList")

    def by(self, call: Call) -> tuple[str, ...]:
        return ("average" if "mean" in call.op else "sum",)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        squares = square(tensors[0])
        total = (squares.nan_to_num(0.0) if "nansum" in call.op else squares).sum(
            self.dims(call), keepdim=flag_at(call, 2, "keepdim")
        )
        count = max(self.terms(call, output), 1)
        return total / (count * count) if "mean" in call.op else total

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            if op.endswith("default") and "nansum" not in op:
                yield Sample(op, (X,))
                yield Sample(op, (T((3, 4), DType.BF16),), (("dtype", DType.F32),))
                continue
            yield Sample(op, (X, (0,)))
            yield Sample(op, (X, (0, -1), True))
            yield Sample(op, (T((3, 4), strides=(1, 3)), (1,)))
            yield Sample(op, (T((3, 4), strides=(0, 1)), (0,)))
            yield Sample(op, (T((3, 4), DType.BF16), (0,)))
        yield Sample("aten.nansum.default", (X,))
        yield Sample("aten.sum.default", (T((3, 4), DType.BOOL),))
        yield Sample("aten.sum.dim_IntList", (X, ()))
        yield Sample("aten.sum.dim_IntList", (T((0, 4)), (0,)))
        yield Sample("aten.mean.dim", (X, None), (("dtype", DType.F64),))


class Trace(OpRule):
    """The sum of a matrix's diagonal, of which alone it reads."""

    ops = ("aten.trace.default",)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return (Kernel((self.terms(call, 0) + 1) * call.inputs[0].dtype.nbytes, dtype=compute_dtype(call)),)

    def terms(self, call: Call, output: int) -> int:
        return min(call.inputs[0].shape)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return torch.trace(square(tensors[0]))

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T((3, 5)),))


class Variance(Reduction):
    """Variances and deviations, also with the mean. A variance sums (x - mean)^2 / (count - correction)."""

    ops = overloads("std.correction std_mean.correction var.correction var_mean.correction")

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        dims, keep, count = self.dims(call), flag_at(call, 9, "keepdim"), self.terms(call, output)
        if output == 1:
            return square(tensors[0]).sum(dims, keepdim=keep) / (count * count)
        if "std" in call.op:
            return None
        centred = square(tensors[0] - tensors[0].mean(dims, keepdim=True))
        divisor = max(count - number_at(call, 9, "correction", 1.0), 0.0)
        return (centred * centred).sum(dims, keepdim=keep) / (divisor * divisor)

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            yield Sample(op, (X, (0, 2)), (("correction", 0), ("keepdim", True)))
            yield Sample(op, (X, (-1,)))
            yield Sample(op, (X, (1,)), (("correction", 2),))
            yield Sample(op, (X,), (("correction", 1),))


class Selection(OpRule):
    """Results that are elements of the input, their places, or a test of all: exact, nothing is summed."""

    ops = overloads("""
        all.default all.dim all.dims amax.default amin.default aminmax.default any.default any.dim any.dims
        argmax.default argmin.default kthvalue.default max.default max.dim median.default median.dim min.default
        min.dim mode.default nanmedian.default nanmedian.dim sort.default sort.stable topk.default
    """)

    def loops(self, call: Call) -> Iterable[Loop]:
        if call.op == "aten.topk.default" and not self._alike(call):
            return
        yield from reduced(call, self.dims(call), *self.by(call))

    def _alike(self, call: Call) -> bool:
        """Whether equal elements come in one order, however many slices there are. CUDA sorts long ones when they are
        few, and selects otherwise."""
        shape = input_at(call, 0, "self").shape
        return all(shape[dim] < _LONG for dim in self.dims(call) if shape)

    def dims(self, call: Call) -> tuple[int, ...]:
        """The dimensions along which elements are compared, counted from the start."""
        name, rank = call.op.split(".")[1], len(input_at(call, 0, "self").shape)
        last = () if name not in ("kthvalue", "mode", "sort", "topk") else (-1,)
        given = ints_at(call, 2 if name in ("kthvalue", "topk") else 1, "dim")
        return wrapped(given or last, rank) or tuple(range(rank))

    def by(self, call: Call) -> tuple[str, ...]:
        """How results for parts of what is compared make the whole; empty when they do not. Maxima start at minus
        infinity, which whole numbers lack; the place of a maximum depends on where a part stands."""
        if not output_at(call, 0).dtype.is_floating:
            return ()
        return _EXTREMES.get(call.op.removeprefix("aten."), ())

    def samples(self) -> Iterable[Sample]:
        for op in overloads("all.default any.default max.default median.default min.default nanmedian.default"):
            yield Sample(op, (X,))
        for op in overloads("all.dim any.dim max.dim median.dim min.dim nanmedian.dim"):
            yield Sample(op, (X, 1, True))
        for op in overloads("all.dims any.dims amax.default amin.default"):
            yield Sample(op, (X, (0, 2)))
            yield Sample(op, (X, (-2,), True))
        for op in overloads("argmax.default argmin.default mode.default sort.default"):
            yield Sample(op, (X, -1))
            yield Sample(op, (X, 1))
        yield Sample("aten.aminmax.default", (X,), (("dim", 1),))
        yield Sample("aten.any.default", (T((3, 4), DType.BOOL),))
        yield Sample("aten.kthvalue.default", (X, 2, 1))
        yield Sample("aten.sort.stable", (X,), (("stable", True), ("dim", 0), ("descending", True)))
        yield Sample("aten.topk.default", (X, 2))
        yield Sample("aten.topk.default", (X, 2, 0, False))


class Scan(OpRule):
    """Running products and maxima along one dimension."""

    ops = overloads("cummax.default cummin.default cumprod.default logcumsumexp.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        yield from reduced(call, wrapped(ints_at(call, 1, "dim"), len(input_at(call, 0, "self").shape)))

    def length(self, call: Call) -> int:
        """Elements along the scanned dimension."""
        shape = input_at(call, 0, "self").shape
        return shape[wrapped(ints_at(call, 1, "dim"), len(shape))[0]] if shape else 1

    def terms(self, call: Call, output: int) -> int:
        return 1 if "cumm" in call.op else self.length(call)

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            yield Sample(op, (X, 1))
            yield Sample(op, (T((4, 3), strides=(1, 4)), -1))


class RunningSum(Scan):
    """Each result is the sum of the elements up to it."""

    ops = ("aten.cumsum.default",)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return torch.cumsum(square(tensors[0]), ints_at(call, 1, "dim")[0])

    def samples(self) -> Iterable[Sample]:
        yield from super().samples()
        yield Sample("aten.cumsum.default", (T((3, 4), DType.I64, 5), -1))
        yield Sample("aten.cumsum.default", (T((3, 4), DType.BOOL), 0), (("dtype", DType.I32),))
