"""Matrix products: each is one launch with one product, bytes as in device model v1 (bias included)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from magis.ir.args import Args, Kwargs, Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call, TensorSpec
from magis.ops.arguments import given, input_at, number_at, output_at, overloads
from magis.ops.loop import Axis, Concat, Loop, Reduce, Role, aligned
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
"""The products to which these add a bias."""

_MM, _BMM, _MV, _DOT = ("mk", "kn", "mn"), ("zmk", "zkn", "zmn"), ("mk", "k", "m"), ("k", "k", "")
_INDICES = {
    "addbmm": ("zmk", "zkn", "mn"),
    "addmm": _MM,
    "addmv": _MV,
    "addr": ("m", "n", "mn"),
    "baddbmm": _BMM,
    "bmm": _BMM,
    "dot": _DOT,
    "mm": _MM,
    "mv": _MV,
    "vdot": _DOT,
}
"""The operands' and the result's dimensions; what the result lacks is summed."""


def product_loops(call: Call) -> Iterator[Loop]:
    """The loops of a product, and of a bias that is broadcast to it: batch, rows, columns, and what is summed.

    Parts of a sum add the bias once, unless they leave it out: a weighted one, or one next to a weighted product, is
    added by no operator. There is no loop where one tensor stands at two places and would be sliced in two ways."""
    *indices, result = _INDICES[call.op.split(".")[1]]
    slots = [value.index for value in call.args if isinstance(value, Slot)]
    biases, operands = slots[:-2], slots[-2:]
    beta, alpha = number_at(call, 3, "beta"), number_at(call, 4, "alpha")
    added = call.op in _PRODUCTS and beta == 1 and alpha == 1
    for letter in "zmnk":
        axes = [_axis(call.inputs[slot].shape, names, letter) for slot, names in zip(operands, indices)]
        length = max(axis.length for axis in axes if axis is not None) if any(axes) else 0
        if length <= 1:
            continue
        if letter in result:
            dim, rank = result.index(letter), len(result)
            sliced = [aligned(call.inputs[slot].shape, rank, dim, length) for slot in biases]
            yield from _agreeing(call, zip(slots, sliced + axes), Concat(Axis(dim, length)))
        elif not biases or beta == 0 or added:
            once = biases[0] if biases and beta != 0 else None
            yield from _agreeing(call, zip(slots, [*(None for _ in biases), *axes]), Reduce(), once)


def _axis(shape: tuple[int, ...], names: str, letter: str) -> Axis | None:
    """The dimension of that name, if the tensor has it."""
    return Axis(names.index(letter), shape[names.index(letter)]) if letter in names else None


def _agreeing(
    call: Call, axes: Iterable[tuple[int, Axis | None]], role: Role, once: int | None = None
) -> Iterator[Loop]:
    """The loop with these axes of the inputs, unless two of one input differ."""
    found: dict[int, Axis | None] = {}
    for slot, axis in axes:
        if found.setdefault(slot, axis) != axis:
            return
    yield Loop(tuple(found[slot] for slot in range(len(call.inputs))), (role,), once=once)


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
        yield from product_loops(call)

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
        yield Sample("aten.mm.default", (T((6, 9)), T((9, 10), strides=(1, 9))))
        yield Sample("aten.bmm.default", (T((2, 3, 5)), T((2, 5, 4))))
        yield Sample("aten.bmm.default", (T((2, 3, 5), strides=(3, 1, 6)), T((2, 5, 4), strides=(0, 4, 1))))
        yield Sample("aten.bmm.default", (T((6, 4, 9)), T((6, 9, 10), strides=(9, 1, 54))))
        yield Sample("aten.mv.default", (T((3, 5)), T((5,))))
        yield Sample("aten.dot.default", (T((7,)), T((7,))))
        yield Sample("aten.vdot.default", (T((7,)), T((7,))))


class AddedProduct(MatrixProduct):
    """`beta * bias + alpha * (a @ b)`, the bias broadcast; `addbmm` also sums over the batch."""

    ops = overloads("addbmm.default addmm.default addmv.default addr.default baddbmm.default")

    def without_bias(self, call: Call, loop: Loop) -> tuple[Call, tuple[int, ...]]:
        assert isinstance(call.args[0], Slot)
        bias, rank = call.args[0].index, len(output_at(call, 0).shape)
        args = tuple(Slot(s.index - (s.index > bias)) for s in call.args[1:3] if isinstance(s, Slot))
        inputs = (*call.inputs[:bias], *call.inputs[bias + 1 :])
        product = replace(call, op=_PRODUCTS[call.op], args=args, kwargs=(), inputs=inputs)
        shape = call.inputs[bias].shape
        return product, (*(1 for _ in range(rank - len(shape))), *shape)

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
        yield Sample("aten.addmm.default", (T((6, 1)), T((6, 9)), T((9, 10), strides=(1, 9))))
        yield Sample("aten.addmm.default", (T(()), T((6, 9)), T((9, 10))))
        yield Sample("aten.addmv.default", (T((3,)), T((3, 5)), T((5,))), (("alpha", 3),))
        yield Sample("aten.addmv.default", (T((1,)), T((6, 9)), T((9,))))
        yield Sample("aten.addr.default", (T((3, 4)), T((3,)), T((4,))), (("alpha", 3),))
        yield Sample("aten.addbmm.default", (T((3, 4)), *batches))
        yield Sample("aten.addbmm.default", (T((4,)), *batches), (("beta", 0), ("alpha", 0.5)))
        yield Sample("aten.baddbmm.default", (T((2, 1, 4)), *batches), (("beta", 1), ("alpha", 0.5)))
        yield Sample("aten.baddbmm.default", (T((2, 3, 4)), *batches))
        yield Sample("aten.baddbmm.default", (T((4, 1)), T((6, 4, 9)), T((6, 9, 10))))
