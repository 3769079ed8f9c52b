"""Operators that draw from the random generator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import flag_at, overloads
from magis.ops.loop import Loop, elementwise
from magis.ops.rule import Kernel, OpRule, Sample, T, one_launch

X, P = T((3, 4)), T((3, 4), high=0)


def alike(call: Call) -> Iterable[Loop]:
    """The loops of an operator that works element by element on tensors of one shape."""
    shapes = {spec.shape for spec in (*call.inputs, *call.outputs) if spec is not None}
    if len(shapes) > 1:
        return ()
    return elementwise(
        [spec.shape for spec in call.inputs], [None if spec is None else spec.shape for spec in call.outputs]
    )


class Dropout(OpRule):
    """`native_dropout(x, p, train)` gives the result and the mask; in training it draws even where p is 0."""

    ops = ("aten.native_dropout.default",)

    def draws(self, call: Call) -> bool:
        return flag_at(call, 2, "train", True)

    def loops(self, call: Call) -> Iterable[Loop]:
        """Where it draws, none: the numbers of parts would be others."""
        return () if self.draws(call) else alike(call)

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (X, 0.25, True))
        yield Sample(self.ops[0], (T((3, 4), DType.BF16), 0.25, True))
        yield Sample(self.ops[0], (X, 0.0, True))
        yield Sample(self.ops[0], (X, 1.0, True))
        yield Sample(self.ops[0], (X, 0.25, False))


class Draw(OpRule):
    """New random tensors; the elements of a tensor that only gives shape and type are not read."""

    ops = overloads("""
        bernoulli.p exponential.default normal.float_float rand.default rand_like.default randint.default
        randint.low randint_like.default randint_like.low_dtype randn.default randn_like.default randperm.default
        uniform.default
    """)
    random = True
    _plain: ClassVar[dict[str, tuple[Any, ...]]] = {
        "bernoulli.p": (X, 0.5),
        "exponential.default": (X,),
        "normal.float_float": (0.0, 1.0, (3, 4)),
        "rand.default": ((3, 4),),
        "rand_like.default": (X,),
        "randint.default": (5, (3, 4)),
        "randint.low": (1, 5, (3, 4)),
        "randint_like.default": (X, 5),
        "randint_like.low_dtype": (X, 1, 5),
        "randn.default": ((3, 4),),
        "randn_like.default": (X,),
        "randperm.default": (5,),
        "uniform.default": (X, -1.0, 1.0),
    }

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return one_launch(call, *call.inputs)

    def samples(self) -> Iterable[Sample]:
        for name, args in self._plain.items():
            yield Sample(f"aten.{name}", args)
        yield Sample("aten.rand.default", ((3, 4),), (("dtype", DType.BF16),))


class DrawFrom(OpRule):
    """Random tensors whose elements depend on those of the inputs."""

    ops = overloads("""
        bernoulli.Tensor bernoulli.default multinomial.default normal.Tensor_Tensor normal.Tensor_float
        normal.float_Tensor poisson.default
    """)
    random = True

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.bernoulli.Tensor", (X, P))
        yield Sample("aten.bernoulli.default", (P,))
        yield Sample("aten.multinomial.default", (P, 2))
        yield Sample("aten.normal.Tensor_Tensor", (X, P))
        yield Sample("aten.normal.Tensor_float", (X, 0.5))
        yield Sample("aten.normal.float_Tensor", (0.5, P))
        yield Sample("aten.poisson.default", (P,))


class DrawInPlace(OpRule):
    """Random numbers written over a tensor, whose old elements are not read."""

    ops = overloads("""
        bernoulli_.Tensor bernoulli_.float exponential_.default normal_.default random_.default random_.from
        random_.to uniform_.default
    """)
    random = True
    recomputable = False

    def aliases(self, call: Call) -> tuple[int | None, ...]:
        return (0,)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return one_launch(call, call.inputs[0])

    def flops(self, call: Call) -> int:
        return call.inputs[0].numel

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.bernoulli_.Tensor", (X, P))
        yield Sample("aten.bernoulli_.float", (X, 0.5))
        for op in overloads("exponential_.default normal_.default random_.default uniform_.default"):
            yield Sample(op, (X,))
        yield Sample("aten.random_.from", (X, 1, 5))
        yield Sample("aten.random_.to", (X, 5))


class RandomLeakyRelu(OpRule):
    """`rrelu_with_noise_functional(x, noise, lower, upper, training)` gives the result and the noise drawn."""

    ops = ("aten.rrelu_with_noise_functional.default",)

    def draws(self, call: Call) -> bool:
        return flag_at(call, 4, "training")

    def loops(self, call: Call) -> Iterable[Loop]:
        """Where it draws, none: the numbers of parts would be others."""
        return () if self.draws(call) else alike(call)

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (X, X, 0.125, 0.25, True))
        yield Sample(self.ops[0], (X, X, 0.125, 0.25, False))
