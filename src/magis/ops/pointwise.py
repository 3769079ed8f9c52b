"""Operators that work element by element with broadcasting: one launch, every tensor once.

The lists hold PyTorch's overloads tagged pointwise, without the special functions that no network uses,
and the elementwise gradients that carry no tag.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from magis.ir.args import Symbol
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import input_at, int_at, output_at, overloads, wrapped
from magis.ops.loop import Axis, Concat, Loop, Same, elementwise, whole_dims
from magis.ops.rule import Kernel, OpRule, Sample, T, one_launch

FLOAT, INT = T((3, 4)), T((3, 4), DType.I64, 5)


class Elementwise(OpRule):
    """Every dimension of the broadcast result may be split, but for those along which a few work by position."""

    def loops(self, call: Call) -> Iterable[Loop]:
        outputs = [spec for spec in call.outputs if spec is not None]
        if not outputs or any(spec.writes or spec.shape != outputs[0].shape for spec in outputs):
            return
        positional = self.positional(call, len(outputs[0].shape))
        shapes = [None if spec is None else spec.shape for spec in call.outputs]
        for loop in elementwise((spec.shape for spec in call.inputs), shapes):
            role = loop.roles[0]
            if isinstance(role, Concat) and role.axis.dim not in positional:
                yield loop

    def positional(self, call: Call, rank: int) -> tuple[int, ...]:
        """Dimensions of the result along which an element depends on others, or on where it stands."""
        return ()


class Unary(Elementwise):
    """Functions of one floating-point tensor whose other arguments all have defaults."""

    ops = overloads("""
        abs.default acos.default acosh.default angle.default asin.default asinh.default atan.default atanh.default
        ceil.default celu.default clone.default cos.default cosh.default deg2rad.default digamma.default
        elu.default erf.default erfc.default erfinv.default exp.default exp2.default expm1.default floor.default
        frac.default frexp.Tensor gelu.default hardshrink.default hardsigmoid.default hardswish.default
        hardtanh.default i0.default isinf.default isnan.default isneginf.default isposinf.default
        leaky_relu.default lgamma.default log.default log10.default log1p.default log2.default
        logical_not.default logit.default mish.default nan_to_num.default neg.default
        rad2deg.default reciprocal.default relu.default round.default rsqrt.default selu.default sgn.default
        sigmoid.default sign.default signbit.default silu.default sin.default sinc.default sinh.default
        softplus.default softshrink.default special_entr.default special_erfcx.default special_i0e.default
        special_i1.default special_i1e.default special_log_ndtr.default sqrt.default tan.default tanh.default
        trunc.default
    """)

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            yield Sample(op, (FLOAT,))
        for op in overloads("clone.default exp.default gelu.default relu.default silu.default tanh.default"):
            yield Sample(op, (T((3, 4), DType.BF16),))
            yield Sample(op, (T((2, 3, 4), strides=(1, 8, 2)),))
            yield Sample(op, (T((2, 3, 4), strides=(0, 4, 1)),))
            yield Sample(op, (T((0, 4)),))
        for op in overloads("ceil.default floor.default round.default sign.default neg.default"):
            yield Sample(op, (INT,))
        yield Sample("aten.clone.default", (FLOAT,), (("memory_format", Symbol("memory_format", "contiguous_format")),))
        yield Sample("aten.elu.default", (FLOAT, 0.5, 1.1, 1))
        yield Sample("aten.gelu.default", (FLOAT,), (("approximate", "tanh"),))
        yield Sample("aten.hardtanh.default", (FLOAT, 0.0, 6.0))
        yield Sample("aten.leaky_relu.default", (FLOAT, 0.1))


class Binary(Elementwise):
    """Functions of two floating-point tensors that broadcast."""

    ops = overloads("""
        add.Tensor atan2.default clamp.Tensor clamp_max.Tensor clamp_min.Tensor complex.default copysign.Tensor
        div.Tensor eq.Tensor fmax.default fmin.default fmod.Tensor ge.Tensor gt.Tensor heaviside.default
        hypot.default igamma.default igammac.default ldexp.Tensor le.Tensor logaddexp.default logaddexp2.default
        logical_and.default logical_or.default logical_xor.default lt.Tensor maximum.default minimum.default
        mul.Tensor ne.Tensor nextafter.default polar.default pow.Tensor_Tensor remainder.Tensor
        special_xlog1py.default special_zeta.default sub.Tensor xlogy.Tensor
    """)

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            yield Sample(op, (FLOAT, FLOAT))
        for op in overloads("add.Tensor div.Tensor maximum.default mul.Tensor sub.Tensor"):
            yield Sample(op, (FLOAT, T((6, 1, 4))))
            yield Sample(op, (T((3, 4), DType.BF16), T(())))
            yield Sample(op, (T((3, 4), strides=(1, 3)), FLOAT))
        yield Sample("aten.add.Tensor", (FLOAT, T((4,))), (("alpha", -0.5),))
        yield Sample("aten.add.Tensor", (INT, T((3, 1), DType.I32)))
        yield Sample("aten.add.Tensor", (FLOAT, 2.5))
        yield Sample("aten.eq.Tensor", (INT, T((3, 1), DType.I64)))
        yield Sample("aten.mul.Tensor", (FLOAT, 0.5))


class WithScalar(Elementwise):
    """Functions of a floating-point tensor and a number."""

    ops = overloads("""
        add.Scalar clamp.default clamp_max.default clamp_min.default copysign.Scalar div.Scalar eq.Scalar
        fmod.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar mul.Scalar ne.Scalar pow.Scalar pow.Tensor_Scalar
        remainder.Scalar remainder.Scalar_Tensor rsub.Scalar sub.Scalar xlogy.Scalar_Other xlogy.Scalar_Self
    """)

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            left = op.endswith((".Scalar_Tensor", ".Scalar_Self")) or op == "aten.pow.Scalar"
            yield Sample(op, (2.0, FLOAT) if left else (FLOAT, 2.0))
        yield Sample("aten.clamp.default", (FLOAT, None, 0.5))
        yield Sample("aten.clamp.default", (T((3, 4), DType.BF16), -1, 1))
        yield Sample("aten.eq.Scalar", (INT, 1))
        yield Sample("aten.pow.Tensor_Scalar", (T((3, 4), strides=(1, 3)), 3))


class Integer(Elementwise):
    """Bitwise operators and whole-number arithmetic."""

    ops = overloads("""
        __lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor bitwise_and.Scalar
        bitwise_and.Scalar_Tensor bitwise_and.Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
        bitwise_not.default bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Tensor
        bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar bitwise_xor.Scalar_Tensor
        bitwise_xor.Tensor gcd.default lcm.default
    """)

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            name, overload = op.split(".")[1:]
            if name == "bitwise_not":
                yield Sample(op, (INT,))
            elif overload == "Scalar_Tensor":
                yield Sample(op, (3, INT))
            else:
                yield Sample(op, (INT, 3 if "Scalar" in overload else T((4,), DType.I64, 5)))
        yield Sample("aten.bitwise_and.Tensor", (T((3, 4), DType.BOOL), T((3, 1), DType.BOOL)))


class Gradient(Elementwise):
    """Elementwise gradients of `(grad, x)`, further arguments as the forward has them."""

    ops = overloads("""
        elu_backward.default gelu_backward.default hardshrink_backward.default hardsigmoid_backward.default
        hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default
        log_sigmoid_backward.default logit_backward.default mish_backward.default native_dropout_backward.default
        sigmoid_backward.default silu_backward.default softplus_backward.default softshrink_backward.default
        tanh_backward.default threshold_backward.default
    """)
    _more: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hardshrink_backward": (0.5,),
        "hardtanh_backward": (-1, 1),
        "leaky_relu_backward": (0.1, False),
        "log_sigmoid_backward": (FLOAT,),
        "softplus_backward": (1, 20),
        "softshrink_backward": (0.5,),
        "threshold_backward": (0,),
    }

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            name = op.split(".")[1]
            if name == "elu_backward":
                yield Sample(op, (FLOAT, 1.0, 1.0, 1.0, False, FLOAT))
            elif name == "native_dropout_backward":
                yield Sample(op, (FLOAT, T((3, 4), DType.BOOL), 1.25))
            else:
                yield Sample(op, (FLOAT, FLOAT, *self._more.get(name, ())))
        yield Sample("aten.gelu_backward.default", (FLOAT, FLOAT), (("approximate", "tanh"),))
        yield Sample("aten.threshold_backward.default", (T((3, 4), strides=(1, 3)), FLOAT, 0))
        yield Sample("aten.silu_backward.default", (T((3, 4), DType.BF16), T((3, 4), DType.BF16)))


class Several(Elementwise):
    """Elementwise functions of three tensors, of a flag tensor, or with other special arguments."""

    ops = overloads("""
        _prelu_kernel.default _prelu_kernel_backward.default _to_copy.default addcdiv.default addcmul.default
        clip.default div.Scalar_mode div.Tensor_mode lerp.Scalar lerp.Tensor masked_fill.Scalar masked_fill.Tensor
        mvlgamma.default polygamma.default round.decimals rrelu_with_noise_backward.default threshold.default where.self
    """)

    def samples(self) -> Iterable[Sample]:
        flags, row = T((3, 4), DType.BOOL), T((4,))
        yield Sample("aten._prelu_kernel.default", (FLOAT, row))
        yield Sample("aten._prelu_kernel_backward.default", (FLOAT, FLOAT, row))
        for dtype in (DType.F32, DType.BF16, DType.I64, DType.BOOL):
            yield Sample("aten._to_copy.default", (FLOAT,), (("dtype", dtype),))
        yield Sample("aten._to_copy.default", (T((3, 4), strides=(1, 3)),), (("device", Symbol("device", "cpu")),))
        for op in overloads("addcdiv.default addcmul.default"):
            yield Sample(op, (FLOAT, row, FLOAT), (("value", -0.1),))
        yield Sample("aten.clip.default", (FLOAT, -1, 1))
        yield Sample("aten.div.Scalar_mode", (INT, 2), (("rounding_mode", "floor"),))
        yield Sample("aten.div.Tensor_mode", (FLOAT, row), (("rounding_mode", "trunc"),))
        yield Sample("aten.lerp.Scalar", (FLOAT, FLOAT, 0.1))
        yield Sample("aten.lerp.Tensor", (FLOAT, FLOAT, row))
        yield Sample("aten.masked_fill.Scalar", (FLOAT, T((3, 1), DType.BOOL), -1e9))
        yield Sample("aten.masked_fill.Tensor", (FLOAT, flags, T(())))
        yield Sample("aten.mvlgamma.default", (FLOAT, 2))
        yield Sample("aten.polygamma.default", (1, FLOAT))
        yield Sample("aten.round.decimals", (FLOAT,), (("decimals", 1),))
        yield Sample("aten.rrelu_with_noise_backward.default", (FLOAT, FLOAT, FLOAT, 0.1, 0.3, True, False))
        yield Sample("aten.threshold.default", (FLOAT, 0.1, 2))
        yield Sample("aten.where.self", (flags, row, T(())))
        yield Sample("aten.where.self", (T((4, 1), DType.BOOL), T((6, 1, 5)), T((1, 5))))


class Copy(Elementwise):
    """`copy(x, source)`: the source in x's shape and type. x itself is not read."""

    ops = ("aten.copy.default",)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return one_launch(call, input_at(call, 0, "self"))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.copy.default", (FLOAT, T((4,), DType.BF16)))


class Triangle(Elementwise):
    """Matrices with zeros above or below a diagonal. A part would have to know where it stands in its matrix."""

    ops = overloads("tril.default triu.default")

    def positional(self, call: Call, rank: int) -> tuple[int, ...]:
        return wrapped((-2, -1), rank)

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            yield Sample(op, (FLOAT,))
            yield Sample(op, (T((6, 5, 3, 4)), -1))


class Cross(Elementwise):
    """The vector product: elements along one dimension, of length 3, depend on each other."""

    ops = overloads("linalg_cross.default")

    def positional(self, call: Call, rank: int) -> tuple[int, ...]:
        return wrapped((int_at(call, 2, "dim", -1),), rank)

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T((2, 3)), T((2, 3))))
        yield Sample(self.ops[0], (T((6, 3, 1, 4)), T((6, 3, 5, 1))), (("dim", 1),))


class LogSigmoid(Elementwise):
    """`log(sigmoid(x))` and a buffer for its gradient, which holds nothing on some devices."""

    ops = overloads("log_sigmoid_forward.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        result, buffer = output_at(call, 0).shape, output_at(call, 1)
        if buffer.numel:
            yield from super().loops(call)
            return
        for loop in elementwise([result], [result]):
            yield Loop(loop.inputs, (*loop.roles, Same()))

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (FLOAT,))
        yield Sample(self.ops[0], (T((6, 4, 5)),))


class Gated(OpRule):
    """`a * sigmoid(b)` of the halves a and b of a dimension, which is thus a pair of halves: split, both shrink."""

    ops = overloads("glu.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        shape = output_at(call, 0).shape
        (halved,) = wrapped((int_at(call, 1, "dim", -1),), len(shape))
        for axis in whole_dims(shape, range(len(shape))):
            yield Loop((_pairs(axis, halved),), (Concat(axis),))

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (FLOAT,))
        yield Sample(self.ops[0], (T((6, 8, 5)), 1))


class GatedGradient(OpRule):
    """The gradient of `Gated` for both halves, from `(grad, x, dim)`."""

    ops = overloads("glu_backward.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        grad = input_at(call, 0, "grad_output").shape
        (halved,) = wrapped((int_at(call, 2, "dim", -1),), len(grad))
        for axis in whole_dims(grad, range(len(grad))):
            yield Loop((axis, _pairs(axis, halved)), (Concat(_pairs(axis, halved)),))

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T((3, 2)), FLOAT, -1))
        yield Sample(self.ops[0], (T((6, 4, 5)), T((6, 8, 5)), 1))


def _pairs(axis: Axis, halved: int) -> Axis:
    """The axis in a tensor that has two of everything along one dimension."""
    return replace(axis, outer=2) if axis.dim == halved else axis
