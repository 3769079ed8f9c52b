"""Softmax and log-softmax along one dimension, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import input_at, int_at, overloads, wrapped
from magis.ops.loop import Concat, Loop, whole_dims
from magis.ops.rule import OpRule, Sample, T, square

X, HALF = T((6, 3, 4)), T((3, 4), DType.BF16)


class Softmax(OpRule):
    """`exp(x) / sum(exp(x))`: a sum of positive terms, so that a result's own size is its scale."""

    ops = overloads("_safe_softmax.default _softmax.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        place = 2 if call.op.endswith("_backward_data.default") else 1
        shape = input_at(call, 0, "self").shape
        taken = wrapped((int_at(call, place, "dim", -1),), len(shape))
        for axis in whole_dims(shape, (dim for dim in range(len(shape)) if dim not in taken)):
            yield Loop(tuple(axis for _ in call.inputs), (Concat(axis),))

    def length(self, call: Call) -> int:
        """Elements along the dimension."""
        place = 2 if call.op.endswith("_backward_data.default") else 1
        shape = input_at(call, 0, "self").shape
        return shape[int_at(call, place, "dim", -1)] if shape else 1

    def terms(self, call: Call, output: int) -> int:
        return self.length(call)

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten._safe_softmax.default", (X, -1))
        yield from _forward(self.ops[1])


class LogSoftmax(Softmax):
    """`x - log(sum(exp(x)))`. A relative change of one summand moves the logarithm by its share p of the sum,
    so the squared terms are those of the difference and of the shares."""

    ops = overloads("_log_softmax.default")

    def terms(self, call: Call, output: int) -> int:
        return self.length(call) + 1

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        dim = int_at(call, 1, "dim", -1)
        result = torch.log_softmax(tensors[0], dim)
        return square(result) + square(result.exp()).sum(dim, keepdim=True)

    def samples(self) -> Iterable[Sample]:
        yield from _forward(self.ops[0])


def _forward(op: str) -> Iterable[Sample]:
    yield Sample(op, (X, -1, False))
    yield Sample(op, (X, 1, False))
    yield Sample(op, (HALF, 1, False))
    yield Sample(op, (T((3, 4), strides=(1, 3)), 1, False))
    yield Sample(op, (T((0, 4)), 1, False))


class SoftmaxGradient(Softmax):
    """`y*g - y*sum(y*g)`."""

    ops = overloads("_softmax_backward_data.default")

    def terms(self, call: Call, output: int) -> int:
        return self.length(call) + 1

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        grad, result = square(tensors[0]), square(tensors[-1])
        total = (grad * result).sum(int_at(call, 2, "dim", -1), keepdim=True)
        return result * (grad + total)

    def samples(self) -> Iterable[Sample]:
        yield from _backward(self.ops[0])


class LogSoftmaxGradient(SoftmaxGradient):
    """`g - exp(y)*sum(g)`."""

    ops = overloads("_log_softmax_backward_data.default")

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        grad = square(tensors[0])
        return grad + square(tensors[-1].exp()) * grad.sum(int_at(call, 2, "dim", -1), keepdim=True)

    def samples(self) -> Iterable[Sample]:
        yield from _backward(self.ops[0])


def _backward(op: str) -> Iterable[Sample]:
    yield Sample(op, (X, X, -1, DType.F32))
    yield Sample(op, (X, X, 1, DType.F32))
    yield Sample(op, (HALF, HALF, 0, DType.BF16))
    yield Sample(op, (T((3, 1)), T((3, 1)), 1, DType.F32))
