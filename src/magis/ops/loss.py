"""Losses and their gradients. A reduced loss sums one term for each element or row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import broadcast, given, input_at, int_at, output_at, overloads
from magis.ops.loop import Axis, Concat, Loop, Reduce, Role, Same, elementwise, whole_dims
from magis.ops.rule import Kernel, OpRule, Sample, T, compute_dtype, one_launch, read_bytes, square, written_bytes
from magis.ops.slots import at_places

NONE, MEAN, SUM = 0, 1, 2
X, Y, P, CLASSES = T((3, 4)), T((3, 4)), T((3, 4), high=0), T((3,), DType.I64, 4)


_REDUCED = {MEAN: Reduce("average"), SUM: Reduce("sum")}


class Loss(OpRule):
    """Losses of `(x, target)` element by element; where their reduction stands is in `places`."""

    ops = overloads("""
        binary_cross_entropy.default binary_cross_entropy_with_logits.default huber_loss.default mse_loss.default
        smooth_l1_loss.default soft_margin_loss.default
    """)
    places: ClassVar[dict[str, int]] = {"binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4}

    def place(self, call: Call) -> int:
        """Where the reduction stands."""
        return self.places.get(call.op.split(".")[1], 2)

    def reduction(self, call: Call) -> int:
        """0 for none, 1 for the mean, 2 for the sum."""
        return int_at(call, self.place(call), "reduction", MEAN)

    def loops(self, call: Call) -> Iterable[Loop]:
        shapes = [spec.shape for spec in call.inputs]
        for loop in elementwise(shapes, [broadcast(*shapes)]):
            reduction = self.reduction(call)
            yield loop if reduction == NONE else replace(loop, roles=(_REDUCED[reduction],))

    def terms(self, call: Call, output: int) -> int:
        return 1 if self.reduction(call) == NONE else input_at(call, 0, "self").numel

    def storage_bytes(self, call: Call, output: int) -> int:
        """Most kernels write every element's loss and reduce it in place: the scalar keeps that storage."""
        spec = output_at(call, output)
        if "huber" in call.op or "with_logits" in call.op:
            return spec.storage_bytes
        x, target = input_at(call, 0, "self").shape, input_at(call, 1, "target").shape
        return max(spec.storage_bytes, prod(broadcast(x, target)) * spec.dtype.nbytes)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        if self.reduction(call) == NONE:
            return None
        run = getattr(torch.ops.aten, call.op.split(".")[1]).default
        filled: list[Any] = [
            tensors[item.index] if isinstance(item, Slot) else item for item in call.args[: self.place(call)]
        ]
        rest = call.args[self.place(call) + 1 :]
        filled += [None] * (self.place(call) - len(filled))
        terms = square(run(*filled, NONE, *rest))
        count = max(terms.numel(), 1) if self.reduction(call) == MEAN else 1
        return terms.sum() / (count * count)

    def samples(self) -> Iterable[Sample]:
        probability = P
        for reduction in (NONE, MEAN, SUM):
            yield Sample("aten.binary_cross_entropy.default", (probability, probability, None, reduction))
            yield Sample("aten.binary_cross_entropy_with_logits.default", (X, Y, T((4,)), None, reduction))
            yield Sample("aten.huber_loss.default", (X, Y, reduction, 0.5))
            yield Sample("aten.mse_loss.default", (X, Y, reduction))
            yield Sample("aten.smooth_l1_loss.default", (X, Y, reduction, 0.5))
            yield Sample("aten.soft_margin_loss.default", (X, Y, reduction))
        yield Sample("aten.mse_loss.default", (X, T((3, 4), DType.F32, strides=(1, 3))))
        yield Sample("aten.mse_loss.default", (T((3, 4), DType.BF16), T((3, 4), DType.BF16)))


class LossGradient(OpRule):
    """Gradients of those losses: elementwise."""

    ops = overloads("""
        binary_cross_entropy_backward.default huber_loss_backward.default mse_loss_backward.default
        smooth_l1_loss_backward.default soft_margin_loss_backward.default
    """)

    def loops(self, call: Call) -> Iterable[Loop]:
        place = 4 if "binary" in call.op else 3
        if int_at(call, place, "reduction", MEAN) != MEAN:  # which divides by the elements of a part
            yield from elementwise((spec.shape for spec in call.inputs), [output_at(call, 0).shape])

    def samples(self) -> Iterable[Sample]:
        for grad, reduction in ((T((3, 4)), NONE), (T(()), MEAN), (T(()), SUM)):
            yield Sample("aten.binary_cross_entropy_backward.default", (grad, P, P, None, reduction))
            yield Sample("aten.huber_loss_backward.default", (grad, X, Y, reduction, 0.5))
            yield Sample("aten.mse_loss_backward.default", (grad, X, Y, reduction))
            yield Sample("aten.smooth_l1_loss_backward.default", (grad, X, Y, reduction, 0.5))
            yield Sample("aten.soft_margin_loss_backward.default", (grad, X, Y, reduction))


def _rows(shape: tuple[int, ...]) -> Iterator[tuple[Axis, Axis]]:
    """The dimensions of log probabilities but for the classes', each with that of the classes given."""
    for axis in whole_dims(shape, (dim for dim in range(len(shape)) if dim != 1)):
        if len(shape) > 1:
            yield axis, replace(axis, dim=max(axis.dim - 1, 0))


class NllLoss(OpRule):
    """`(log probabilities, classes, weights, reduction, ignored class)` gives the loss and the total weight.
    It reads one log probability for each class index."""

    ops = overloads("nll_loss2d_forward.default nll_loss_forward.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        reduction = int_at(call, 3, "reduction", MEAN)
        if reduction == MEAN:  # an average with weights that depend on the classes
            return
        for axis, target in _rows(input_at(call, 0, "self").shape):
            roles: list[Role] = [Reduce(), Reduce()] if reduction == SUM else [Concat(target), Same()]
            yield from at_places(call, {0: axis, 1: target}, roles)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        x, target = input_at(call, 0, "self"), input_at(call, 1, "target")
        picked = target.numel * x.dtype.nbytes
        nbytes = read_bytes(call) - x.nbytes + picked + written_bytes(call)
        return (Kernel(nbytes, dtype=compute_dtype(call)),)

    def terms(self, call: Call, output: int) -> int:
        if int_at(call, 3, "reduction", MEAN) == NONE:
            return 1
        return input_at(call, 1, "target").numel

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        reduction = int_at(call, 3, "reduction", MEAN)
        x, target, weight = (given(call, tensors, place, "") for place in range(3))
        kept = target != int_at(call, 4, "ignore_index", -100)
        weights = kept.to(x.dtype) if weight is None else weight[target.where(kept, 0)] * kept
        if reduction == NONE:
            return None
        if output == 1:
            return square(weights).sum()
        dim = 1 if x.dim() > 1 else 0
        picked = x.gather(dim, target.where(kept, 0).unsqueeze(dim)).squeeze(dim)
        total = square(picked * weights).sum()
        return total / square(weights.sum()) if reduction == MEAN else total

    def samples(self) -> Iterable[Sample]:
        weights = T((4,), high=0)
        for reduction in (NONE, MEAN, SUM):
            yield Sample(self.ops[1], (X, CLASSES, None, reduction, -100))
            yield Sample(self.ops[1], (X, CLASSES, weights, reduction, 1))
            yield Sample(self.ops[0], (T((2, 4, 3, 2)), T((2, 3, 2), DType.I64, 4), weights, reduction, -100))
        yield Sample(self.ops[1], (T((3, 4), DType.BF16), CLASSES, None, MEAN, -100))


class NllLossGradient(OpRule):
    """`(grad, x, classes, weights, reduction, ignored class, total weight)`: zeros but for the classes. x gives
    only the shape."""

    ops = overloads("nll_loss2d_backward.default nll_loss_backward.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        each = int_at(call, 4, "reduction", MEAN) == NONE
        for axis, target in _rows(input_at(call, 1, "self").shape):
            yield from at_places(call, {0: target if each else None, 1: axis, 2: target}, [Concat(axis)])

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return one_launch(call, input_at(call, 1, "self"))

    def samples(self) -> Iterable[Sample]:
        total, weights = T((), high=0), T((4,), high=0)
        yield Sample(self.ops[1], (T(()), X, CLASSES, None, MEAN, -100, total))
        yield Sample(self.ops[1], (T(()), X, CLASSES, weights, SUM, 1, total))
        yield Sample(self.ops[1], (T((3,)), X, CLASSES, weights, NONE, -100, total))
        image, classes = T((2, 4, 3, 2)), T((2, 3, 2), DType.I64, 4)
        yield Sample(self.ops[0], (T(()), image, classes, None, MEAN, -100, total))


class MarginLoss(OpRule):
    """Multi-class margins of `(x, classes, p, margin, weight, reduction)`: each row sums over its classes."""

    ops = ("aten.multi_margin_loss.default",)

    def loops(self, call: Call) -> Iterable[Loop]:
        axis = Axis(0, input_at(call, 0, "self").shape[0])
        reduction = int_at(call, 5, "reduction", MEAN)
        if len(input_at(call, 0, "self").shape) == 2:
            yield from at_places(call, {0: axis, 1: axis}, [_REDUCED.get(reduction, Concat(axis))])

    def terms(self, call: Call, output: int) -> int:
        x = input_at(call, 0, "self")
        return x.shape[-1] if int_at(call, 5, "reduction", MEAN) == NONE else x.numel

    def samples(self) -> Iterable[Sample]:
        for reduction in (NONE, MEAN, SUM):
            yield Sample(self.ops[0], (X, CLASSES, 1, 1, None, reduction))


class MarginLossGradient(OpRule):
    """Its gradient; the element of the class itself sums over the others."""

    ops = ("aten.multi_margin_loss_backward.default",)

    def loops(self, call: Call) -> Iterable[Loop]:
        axis = Axis(0, input_at(call, 1, "self").shape[0])
        reduction = int_at(call, 6, "reduction", MEAN)
        if reduction != MEAN and len(input_at(call, 1, "self").shape) == 2:
            yield from at_places(call, {0: axis if reduction == NONE else None, 1: axis, 2: axis}, [Concat(axis)])

    def terms(self, call: Call, output: int) -> int:
        return input_at(call, 1, "self").shape[-1]

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T(()), X, CLASSES, 1, 1, None, MEAN))
