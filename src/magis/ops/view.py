"""Views: they share their input's storage, launch nothing, write nothing."""

from __future__ import annotations

from collections.abc import Iterable

from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import overloads
from magis.ops.rule import Kernel, OpRule, Sample, T

X = T((2, 3, 4))


class View(OpRule):
    """Every result is a view of the first input. `_unsafe_view` and `unsafe_split` are too when they run,
    though their schemas do not say so."""

    ops = overloads("""
        _conj.default _neg_view.default _reshape_alias.default _unsafe_view.default alias.default as_strided.default
        detach.default diagonal.default expand.default lift_fresh.default permute.default select.int slice.Tensor
        split.Tensor split_with_sizes.default squeeze.default squeeze.dim squeeze.dims t.default transpose.int
        unbind.int unfold.default unsafe_split.Tensor unsafe_split_with_sizes.default unsqueeze.default view.default
        view.dtype view_as_complex.default view_as_real.default
    """)

    def aliases(self, call: Call) -> tuple[int | None, ...]:
        return tuple(0 for _ in call.outputs)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return ()

    def flops(self, call: Call) -> int:
        return 0

    def samples(self) -> Iterable[Sample]:
        for op in overloads("_neg_view.default alias.default detach.default lift_fresh.default squeeze.default"):
            yield Sample(op, (X,))
        yield Sample("aten._conj.default", (T((2, 3), DType.C64),))
        yield Sample("aten._reshape_alias.default", (X, (6, 4), (4, 1)))
        for op in overloads("_unsafe_view.default view.default"):
            yield Sample(op, (X, (6, -1)))
            yield Sample(op, (T((2, 3, 4), strides=(0, 4, 1)), (2, 12)))
            yield Sample(op, (T((2, 0, 4)), (0, 8)))
        yield Sample("aten.as_strided.default", (X, (2, 2), (12, 2), 1))
        yield Sample("aten.diagonal.default", (X, 1, 1, 2))
        yield Sample("aten.expand.default", (T((3, 1)), (2, 3, 4)))
        yield Sample("aten.expand.default", (X, (2, -1, 4)), (("implicit", True),))
        yield Sample("aten.permute.default", (X, (2, 0, 1)))
        yield Sample("aten.select.int", (X, 1, -1))
        yield Sample("aten.slice.Tensor", (X, 2, 1, 3))
        yield Sample("aten.slice.Tensor", (X, 0, 0, 9223372036854775807))
        yield Sample("aten.slice.Tensor", (X, 1, None, None, 2))
        for op in overloads("split.Tensor unsafe_split.Tensor"):
            yield Sample(op, (X, 2, 2))
            yield Sample(op, (X, 5, 1))
        for op in overloads("split_with_sizes.default unsafe_split_with_sizes.default"):
            yield Sample(op, (X, (1, 3), -1))
        yield Sample("aten.squeeze.dim", (T((2, 1, 3)), 1))
        yield Sample("aten.squeeze.dims", (T((1, 2, 1)), (0, 2)))
        yield Sample("aten.t.default", (T((2, 3)),))
        yield Sample("aten.t.default", (T((2,)),))
        yield Sample("aten.transpose.int", (X, 0, -1))
        yield Sample("aten.unbind.int", (X, 1))
        yield Sample("aten.unfold.default", (X, 2, 2, 1))
        yield Sample("aten.unsqueeze.default", (X, -1))
        yield Sample("aten.view.dtype", (X, DType.I32))
        yield Sample("aten.view_as_complex.default", (T((3, 2)),))
        yield Sample("aten.view_as_real.default", (T((3,), DType.C64),))
