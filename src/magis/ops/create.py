"""Tensors from nothing: written once, nothing read; `empty` does not even launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from magis.ir.args import Args, Kwargs, Symbol
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import output_at, overloads
from magis.ops.layout import result_part, with_argument
from magis.ops.loop import Loop, elementwise
from magis.ops.rule import Kernel, OpRule, Sample, T, written_bytes

X, CPU = T((3, 4)), ("device", Symbol("device", "cpu"))


SIZE_AT = {
    **dict.fromkeys(("empty", "empty_permuted", "full", "ones", "zeros"), 0),
    **dict.fromkeys(("new_empty", "new_full", "new_ones", "new_zeros"), 1),
}
"""Operators that are told a size, at which position."""

LIKE = ("empty_like", "fill", "full_like", "ones_like", "zero", "zeros_like")
"""Operators that make a tensor of their input's shape."""


class Alike(OpRule):
    """Tensors all of whose elements are alike, whatever their place: every dimension is divided. Where the size is
    an argument no input is sliced. Ranges, indices and diagonals depend on places: they are made whole; so is what
    is told its strides."""

    def loops(self, call: Call) -> Iterable[Loop]:
        name, shape = call.op.split(".")[1], output_at(call, 0).shape
        if name in LIKE:
            return elementwise((spec.shape for spec in call.inputs), (shape,))
        if name in SIZE_AT:
            return (Loop(tuple(None for _ in call.inputs), loop.roles) for loop in elementwise((), (shape,)))
        return ()

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        place = SIZE_AT.get(call.op.split(".")[1])
        if place is None:
            return call.args, call.kwargs
        return with_argument(call.args, call.kwargs, place, "size", result_part(call, loop, length))


class Create(Alike):
    """Constants and ranges, also in the shape of a tensor whose elements are not read."""

    ops = overloads("""
        arange.default arange.start arange.start_step eye.default eye.m fill.Scalar full.default full_like.default
        linspace.default new_full.default new_ones.default new_zeros.default ones.default ones_like.default
        scalar_tensor.default tril_indices.default triu_indices.default zero.default zeros.default
        zeros_like.default
    """)
    _plain: ClassVar[dict[str, tuple[Any, ...]]] = {
        "arange.default": (5,),
        "arange.start": (1, 5),
        "arange.start_step": (1, 9, 2),
        "eye.default": (3,),
        "eye.m": (3, 4),
        "fill.Scalar": (X, 2.0),
        "full.default": ((3, 4), 1.5),
        "full_like.default": (X, 1.5),
        "linspace.default": (0, 1, 5),
        "new_full.default": (X, (2, 2), 1.5),
        "new_ones.default": (X, (2, 2)),
        "new_zeros.default": (X, (2, 0)),
        "ones.default": ((3, 4),),
        "ones_like.default": (T((3, 4), strides=(1, 3)),),
        "scalar_tensor.default": (2.5,),
        "tril_indices.default": (3, 4),
        "triu_indices.default": (3, 4, 1),
        "zero.default": (X,),
        "zeros.default": ((3, 4),),
        "zeros_like.default": (X,),
    }

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return (Kernel(written_bytes(call)),)

    def samples(self) -> Iterable[Sample]:
        for name, args in self._plain.items():
            yield Sample(f"aten.{name}", args)
        yield Sample("aten.arange.default", (5,), (("dtype", DType.I64), CPU, ("pin_memory", False)))
        yield Sample("aten.full.default", ((), 1.0), (("dtype", DType.BF16), CPU))
        yield Sample("aten.new_zeros.default", (X, (5, 1, 6)), (("dtype", DType.F16),))
        yield Sample("aten.zeros_like.default", (T((3, 4), DType.I64),), (("dtype", DType.F32),))


class Empty(Alike):
    """Memory that holds anything: no launch. Repeating it gives other contents, equally good."""

    ops = overloads("""
        empty.memory_format empty_like.default empty_permuted.default empty_strided.default new_empty.default
        new_empty_strided.default
    """)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return ()

    def flops(self, call: Call) -> int:
        return 0

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.empty.memory_format", ((3, 4),), (("dtype", DType.BF16), CPU))
        yield Sample("aten.empty_like.default", (X,))
        yield Sample("aten.empty_permuted.default", ((3, 4), (1, 0)))
        yield Sample("aten.empty_strided.default", ((3, 4), (1, 3)))
        yield Sample("aten.new_empty.default", (X, (2, 2)))
        yield Sample("aten.new_empty_strided.default", (X, (2, 2), (1, 2)))


class Fill(OpRule):
    """Constants that come from a tensor: both tensors once."""

    ops = overloads("fill.Tensor lift_fresh_copy.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        return elementwise((spec.shape for spec in call.inputs), (output_at(call, 0).shape,))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.fill.Tensor", (X, T(())))
        yield Sample("aten.lift_fresh_copy.default", (T((), DType.I64, 5),))
        yield Sample("aten.lift_fresh_copy.default", (T((3, 5)),))
