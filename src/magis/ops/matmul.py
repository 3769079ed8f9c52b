"""Matrix products: each is one launch with one product, bytes as in device model v1 (bias included)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from magis.ir.args import Args, Kwargs, Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call, TensorSpec
from magis.ops.arguments import given, input_at, number_at, output_at, overloads
from magis.ops.loop import Concat, Loop, Reduce, aligned, along, whole_dims
from magis.ops.rule import (
    Gemm,
    Kernel,
    OpRule,
    Sample,
    T,
    compute_dtype,
    read_bytes,
    square,
    squared_by_linearity,
    written_bytes,
)

_ADDING = {"aten.mm.default": "aten.addmm_.default", "aten.bmm.default": "aten.baddbmm_.default"}


_PRODUCTS = {
    "aten.addmm.default": "aten.mm.default",
    "aten.baddbmm.default": "aten.bmm.default",
    "aten.addmv.default": "aten.mv.default",
}


def product_loops(a: tuple[int, ...], b: tuple[int, ...]) -> Iterator[Loop]:
    """The loops of a product of two different operands: batch, rows, columns, and the summed dimension."""
    batched = len(a) == 3
    rows, columns = len(a) > 1, len(b) > 1
    rank = batched + rows + columns
    for axis in whole_dims(a, (0,) if batched else ()):
        yield along(2, {0: axis, 1: axis}, [Concat(axis)])
    if rows:
        for axis in whole_dims(a, (len(a) - 2,)):
            yield along(2, {0: axis}, [Concat(replace(axis, dim=rank - 1 - columns))])
    if columns:
        for axis in whole_dims(b, (len(b) - 1,)):
            yield along(2, {1: axis}, [Concat(replace(axis, dim=rank - 1))])
    for axis in whole_dims(a, (len(a) - 1,)):
        yield along(2, {0: axis, 1: replace(axis, dim=len(b) - 1 - columns)}, [Reduce()])


def _product(a: TensorSpec, b: TensorSpec) -> Gemm:
    """The product of two operands of 1 to 3 dimensions: [k] or [m,k] or [batch,m,k], and the same for b."""
    rows = a.shape[-2] if len(a.shape) > 1 else 1
    columns = b.shape[-1] if len(b.shape) > 1 else 1
    batch = a.shape[0] if len(a.shape) == 3 else 1
    return Gemm(batch, rows, columns, a.shape[-1])


def _is(call: Call, name: str) -> bool:
    """Whether it is that operator, in place or not."""
    return call.op.split(".")[1].rstrip("_") == name


class MatrixProduct(OpRule):
    """`a @ b` without broadcasting: mm, bmm, matrix times vector, inner product."""

    ops = overloads("bmm.default dot.default mm.default mv.default vdot.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        if len(call.inputs) == 2:  # a tensor times itself would be sliced along two dimensions
            yield from product_loops(*(spec.shape for spec in call.inputs))

    def gemm(self, call: Call) -> Gemm:
        """Its product."""
        return _product(call.inputs[0], call.inputs[-1])  # one input when both operands are the same tensor

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        nbytes = read_bytes(call) + written_bytes(call)
        return (Kernel(nbytes, (self.gemm(call),), compute_dtype(call)),)

    def adding(self, call: Call) -> tuple[str, Args, Kwargs] | None:
        op = _ADDING.get(call.op)
        return None if op is None else (op, (Slot(len(call.inputs)), *call.args), ())

    def terms(self, call: Call, output: int) -> int:
        return self.gemm(call).k

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        run = getattr(torch, call.op.split(".")[1])
        return squared_by_linearity(torch, call, tensors, run)

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.mm.default", (T((3, 5)), T((5, 4))))
        yield Sample("aten.mm.default", (T((3, 5), strides=(1, 3)), T((5, 4), strides=(1, 5))))
        yield Sample("aten.mm.default", (T((4, 8), DType.BF16), T((8, 2), DType.BF16)))
        yield Sample("aten.mm.default", (T((0, 5)), T((5, 4))))
        yield Sample("aten.bmm.default", (T((2, 3, 5)), T((2, 5, 4))))
        yield Sample("aten.bmm.default", (T((2, 3, 5), strides=(3, 1, 6)), T((2, 5, 4), strides=(0, 4, 1))))
        yield Sample("aten.mv.default", (T((3, 5)), T((5,))))
        yield Sample("aten.dot.default", (T((7,)), T((7,))))
        yield Sample("aten.vdot.default", (T((7,)), T((7,))))


class AddedProduct(MatrixProduct):
    """`beta * bias + alpha * (a @ b)`, the bias broadcast; `addbmm` also sums over the batch."""

    ops = overloads("addbmm.default addmm.default addmv.default addr.default baddbmm.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        name = call.op.split(".")[1]
        if len(call.inputs) != 3 or name not in ("addmm", "baddbmm", "addmv"):
            return
        bias, result = call.inputs[0].shape, output_at(call, 0).shape
        for loop in product_loops(call.inputs[1].shape, call.inputs[2].shape):
            role = loop.roles[0]
            if isinstance(role, Concat):
                added = aligned(bias, len(result), role.axis.dim, role.axis.length)
                yield Loop((added, *loop.inputs), loop.roles)
            elif number_at(call, 3, "beta") == 0:
                yield Loop((None, *loop.inputs), loop.roles)
            elif number_at(call, 3, "beta") == 1 and number_at(call, 4, "alpha") == 1:
                yield Loop((None, *loop.inputs), loop.roles, once=0)

    def without_bias(self, call: Call, loop: Loop) -> tuple[Call, tuple[int, ...]]:
        rank, bias = len(output_at(call, 0).shape), call.inputs[0].shape
        product = replace(call, op=_PRODUCTS[call.op], args=(Slot(0), Slot(1)), kwargs=(), inputs=call.inputs[1:])
        return product, (*(1 for _ in range(rank - len(bias))), *bias)

    def gemm(self, call: Call) -> Gemm:
        a, b = input_at(call, 1, "mat1"), input_at(call, 2, "mat2")
        if _is(call, "addr"):
            return Gemm(1, a.shape[0], b.shape[0], 1)
        gemm = _product(a, b)
        return Gemm(1, gemm.m, gemm.n, gemm.batch * gemm.k) if _is(call, "addbmm") else gemm

    def terms(self, call: Call, output: int) -> int:
        return self.gemm(call).k + (number_at(call, 3, "beta") != 0)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        beta, alpha = number_at(call, 3, "beta"), number_at(call, 4, "alpha")
        bias, a, b = (square(given(call, tensors, place, "")) for place in range(3))
        if _is(call, "addr"):
            return beta * beta * bias + alpha * alpha * torch.outer(a, b)
        product = a @ b
        return beta * beta * bias + alpha * alpha * (product.sum(0) if _is(call, "addbmm") else product)

    def samples(self) -> Iterable[Sample]:
        mats, batches = (T((3, 5)), T((5, 4))), (T((2, 3, 5)), T((2, 5, 4)))
        yield Sample("aten.addmm.default", (T((4,)), *mats))
        yield Sample("aten.addmm.default", (T((3, 4)), *mats), (("beta", 0.5), ("alpha", -2)))
        yield Sample("aten.addmm.default", (T((4,)), *mats), (("beta", 0),))
        yield Sample("aten.addmm.default", (T((4,), DType.BF16), T((3, 8), DType.BF16), T((8, 4), DType.BF16)))
        yield Sample("aten.addmv.default", (T((3,)), T((3, 5)), T((5,))), (("alpha", 3),))
        yield Sample("aten.addr.default", (T((3, 4)), T((3,)), T((4,))), (("alpha", 3),))
        yield Sample("aten.addbmm.default", (T((3, 4)), *batches))
        yield Sample("aten.baddbmm.default", (T((2, 1, 4)), *batches), (("beta", 1), ("alpha", 0.5)))
        yield Sample("aten.baddbmm.default", (T((2, 3, 4)), *batches))
