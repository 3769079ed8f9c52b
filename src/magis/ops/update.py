"""In-place writes: result 0 is the first input, overwritten. Never repeated.

`add_` counts three operands: the target read, the other read, the target written (device model v1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import input_at, overloads
from magis.ops.loop import Loop
from magis.ops.matmul import AddedProduct
from magis.ops.rule import Kernel, OpRule, Sample, T, compute_dtype, one_launch, read_bytes, stored_bytes

X, Y, INT, BITS = T((3, 4)), T((4,)), T((3, 4), DType.I64, 5), T((4,), DType.I64, 5)


class InPlace(OpRule):
    """Writes of elements that depend on what they overwrite, and those of masks."""

    ops = overloads("""
        add_.Scalar add_.Tensor addcdiv_.default addcmul_.default atan2_.default celu_.default clamp_.Tensor
        clamp_.default clamp_max_.Tensor clamp_max_.default clamp_min_.Tensor clamp_min_.default
        div_.Scalar div_.Scalar_mode div_.Tensor div_.Tensor_mode elu_.default fmod_.Scalar fmod_.Tensor
        hardtanh_.default hypot_.default leaky_relu_.default lerp_.Scalar lerp_.Tensor masked_fill_.Scalar
        masked_fill_.Tensor masked_scatter_.default mul_.Scalar mul_.Tensor nan_to_num_.default pow_.Scalar
        pow_.Tensor remainder_.Scalar remainder_.Tensor sub_.Scalar sub_.Tensor threshold_.default tril_.default
        triu_.default xlogy_.Tensor
    """)
    recomputable = False
    _more: ClassVar[dict[str, tuple[Any, ...]]] = {
        "addcdiv_": (X, X),
        "addcmul_": (Y, X),
        "clamp_": (-0.5, 0.5),
        "lerp_": (X, 0.1),
        "masked_fill_": (T((3, 4), DType.BOOL), 0.5),
        "masked_scatter_": (T((3, 4), DType.BOOL), T((12,))),
        "threshold_": (0.1, 2),
    }

    def aliases(self, call: Call) -> tuple[int | None, ...]:
        return (0,)

    def flops(self, call: Call) -> int:
        return input_at(call, 0, "self").numel

    def samples(self) -> Iterable[Sample]:
        alone = ("celu_", "elu_", "hardtanh_", "leaky_relu_", "nan_to_num_", "tril_", "triu_")
        for op in self.ops:
            name, overload = op.split(".")[1:]
            other = Y if overload.startswith("Tensor") or name in ("atan2_", "hypot_") else 2.0
            args = self._more.get(name, () if name in alone else (other,))
            if overload == "Tensor" and name in self._more:
                args = (X, X) if name == "clamp_" else (*args[:-1], T(()) if name == "masked_fill_" else X)
            yield Sample(op, (X, *args), (("rounding_mode", "floor"),) if overload.endswith("_mode") else ())
        yield Sample("aten.add_.Tensor", (X, X), (("alpha", -0.01),))
        yield Sample("aten.add_.Tensor", (T((3, 4), DType.BF16), T((3, 4), DType.F32, strides=(1, 3))))
        yield Sample("aten.add_.Tensor", (T((), DType.I64), 1))
        yield Sample("aten.addcdiv_.default", (X, X, X), (("value", -0.001),))
        yield Sample("aten.mul_.Tensor", (T((3, 4), strides=(1, 3)), T(())))


class InPlaceUnary(InPlace):
    """Functions of one tensor written over it."""

    ops = overloads("""
        abs_.default acos_.default asin_.default atan_.default ceil_.default cos_.default cosh_.default
        digamma_.default erf_.default erfc_.default erfinv_.default exp2_.default exp_.default expm1_.default
        floor_.default frac_.default hardsigmoid_.default hardswish_.default lgamma_.default log10_.default
        log1p_.default log2_.default log_.default logical_not_.default mish_.default neg_.default
        reciprocal_.default relu_.default round_.default rsqrt_.default sgn_.default sigmoid_.default
        sign_.default silu_.default sin_.default sinh_.default sqrt_.default tan_.default tanh_.default
        trunc_.default
    """)

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            yield Sample(op, (X,))


class InPlaceInteger(InPlace):
    """Bitwise and logical operators written over the first operand."""

    ops = overloads("""
        bitwise_and_.Scalar bitwise_and_.Tensor bitwise_not_.default bitwise_or_.Scalar bitwise_or_.Tensor
        bitwise_xor_.Scalar bitwise_xor_.Tensor logical_and_.default logical_or_.default logical_xor_.default
    """)

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            yield Sample(op, (INT,) if "not" in op else (INT, 3 if "Scalar" in op else BITS))


class Overwrite(InPlace):
    """Writes that do not read what they overwrite."""

    ops = overloads("copy_.default fill_.Scalar fill_.Tensor zero_.default")

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return one_launch(call, input_at(call, 0, "self"))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.copy_.default", (X, X))
        yield Sample("aten.copy_.default", (T((3, 4), DType.BF16), Y))
        yield Sample("aten.copy_.default", (T((), DType.I64), T((), DType.I64)))
        yield Sample("aten.fill_.Scalar", (X, 0.5))
        yield Sample("aten.fill_.Tensor", (X, T(())))
        yield Sample("aten.zero_.default", (X,))


class ScatterInPlace(InPlace):
    """Writes by index: the values are read once, the elements that they meet read and written."""

    ops = overloads("""
        index_add_.default index_copy_.default index_fill_.int_Scalar index_put_.default put_.default
        scatter_.src scatter_.value scatter_add_.default
    """)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        target = input_at(call, 0, "self")
        values = read_bytes(call) - stored_bytes(target)
        touched = max((spec.numel for spec in call.inputs[1:]), default=0) * target.dtype.nbytes
        return (Kernel(values + 2 * min(touched, target.nbytes), dtype=compute_dtype(call)),)

    def terms(self, call: Call, output: int) -> int:
        """At most all indices meet one element."""
        return 1 + max((spec.numel for spec in call.inputs[1:] if not spec.dtype.is_floating), default=0)

    def samples(self) -> Iterable[Sample]:
        rows, places = T((1,), DType.I64, 3), T((2, 3), DType.I64, 3)
        yield Sample("aten.index_add_.default", (X, 0, rows, T((1, 4))))
        yield Sample("aten.index_copy_.default", (X, 0, rows, T((1, 4))))
        yield Sample("aten.index_fill_.int_Scalar", (X, 0, rows, 0.5))
        yield Sample("aten.index_put_.default", (X, (rows,), T((1, 4)), True))
        yield Sample("aten.put_.default", (X, T((1,), DType.I64, 12), T((1,)), True))
        yield Sample("aten.scatter_.src", (X, 0, T((1, 3), DType.I64, 3), T((2, 4))))
        yield Sample("aten.scatter_.value", (X, 0, places, 0.5))
        yield Sample("aten.scatter_add_.default", (X, 0, places, T((2, 4))))


class AddedProductInPlace(AddedProduct):
    """Matrix products added to the first operand, such as an accumulated gradient."""

    ops = overloads("addbmm_.default addmm_.default addmv_.default addr_.default baddbmm_.default")
    recomputable = False

    def aliases(self, call: Call) -> tuple[int | None, ...]:
        return (0,)

    def loops(self, call: Call) -> Iterable[Loop]:
        return ()

    def samples(self) -> Iterable[Sample]:
        batches = (T((2, 3, 5)), T((2, 5, 4)))
        yield Sample("aten.addbmm_.default", (X, *batches))
        yield Sample("aten.addmm_.default", (X, T((3, 5)), T((5, 4))), (("alpha", 0.5),))
        yield Sample("aten.addmv_.default", (T((3,)), T((3, 5)), T((5,))))
        yield Sample("aten.addr_.default", (X, T((3,)), T((4,))))
        yield Sample("aten.baddbmm_.default", (T((2, 3, 4)), *batches))
