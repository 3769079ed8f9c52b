"""Batch normalisation of [N, C, ...], in training over all elements of a channel: one launch each way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call, TensorSpec
from magis.ops.arguments import flag_at, given, input_at, number_at, overloads
from magis.ops.loop import Axis, Concat, Loop, Lost, Reduce, Role, Same, whole_dims
from magis.ops.normalize import centred, centred_gradient
from magis.ops.rule import OpRule, Sample, T, argument, square, tensor_argument
from magis.ops.slots import at_places


def _across(x: Any) -> list[int]:
    """Every dimension but the channel's."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _channels(value: Any, x: Any) -> Any:
    """A value for each channel, shaped to meet x."""
    return value.reshape(1, -1, *(1 for _ in x.shape[2:]))


def _loops(call: Call, images: tuple[int, ...], backward: bool, training: bool) -> Iterator[Loop]:
    """Along channels, where every tensor of one value a channel is sliced too; in inference also along every other
    dimension of the tensors at `images`, where gradients of weight and bias are sums."""
    if any(spec is not None and spec.writes for spec in call.outputs):
        return
    x = input_at(call, images[0], "input").shape
    channels = x[1]
    flat = Axis(0, channels)
    axes: dict[int | str, Axis | None] = dict.fromkeys(range(len(call.args)), flat)
    for place, value in enumerate(call.args):
        if isinstance(value, Slot) and call.inputs[value.index].shape != (channels,):
            axes[place] = Axis(1, channels) if place in images else None
    yield from at_places(call, axes, [_role(spec, Axis(1, channels), Concat(flat)) for spec in call.outputs])
    for axis in () if training else whole_dims(x, (dim for dim in range(len(x)) if dim != 1)):
        rest: Role = Reduce() if backward else Same()
        yield from at_places(call, dict.fromkeys(images, axis), [_role(spec, axis, rest) for spec in call.outputs])


def _role(spec: TensorSpec | None, axis: Axis, flat: Role) -> Role:
    """The role of a result: an image, one value a channel, or nothing."""
    if spec is None:
        return None
    if not spec.numel:
        return Same()
    return Concat(axis) if len(spec.shape) > 1 else flat


class BatchNorm(OpRule):
    """`(x, weight, bias, running_mean, running_var, training, momentum, eps)` gives y, mean and rstd, and
    in functional form the new running statistics."""

    ops = overloads("""
        _batch_norm_with_update_functional.default _native_batch_norm_legit.no_stats
        _native_batch_norm_legit_functional.default
    """)

    def loops(self, call: Call) -> Iterable[Loop]:
        return _loops(call, (0,), False, self.training(call))

    def training(self, call: Call) -> bool:
        """Whether it takes the statistics of its input."""
        if "_with_update" in call.op:
            return True
        return flag_at(call, 3 if call.op.endswith("no_stats") else 5, "training")

    def running(self, call: Call, output: int) -> str:
        """Which running statistic a result is; empty for the others."""
        return (
            {len(call.outputs) - 2: "mean", len(call.outputs) - 1: "variance"}.get(output, "")
            if ("functional" in call.op)
            else ""
        )

    def count(self, call: Call) -> int:
        """Elements of one channel."""
        x = input_at(call, 0, "input")
        return x.numel // max(x.shape[1], 1)

    def terms(self, call: Call, output: int) -> int:
        if not self.training(call):
            return 1
        if self.running(call, output):
            return self.count(call) + 1
        return self.count(call) + 2 if output == 0 else self.count(call) if output < 3 else 1

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        if not self.training(call):
            return None
        x, weight, bias = (given(call, tensors, place, "") for place in range(3))
        dims, count = _across(x), self.count(call)
        if running := self.running(call, output):
            return self._running(call, tensors, x, running)
        if output == 1:
            return square(x).sum(dims) / (count * count)
        if output > 1:
            return None
        eps = number_at(call, len(call.args) - 1, "eps", 0.0)
        rstd = (x.var(dims, unbiased=False, keepdim=True) + eps).rsqrt()
        scale = rstd if weight is None else rstd * _channels(weight, x)
        return centred(x, scale, None if bias is None else _channels(bias, x), dims)

    def _running(self, call: Call, tensors: Sequence[Any], x: Any, statistic: str) -> Any:
        """`(1 - momentum) * old + momentum * new`, the new one a mean or the unbiased variance."""
        dims, count = _across(x), self.count(call)
        momentum = number_at(call, len(call.args) - 2, "momentum")
        old = square(given(call, tensors, 3 if statistic == "mean" else 4, "")) * (1 - momentum) ** 2
        if statistic == "mean":
            return old + square(x).sum(dims) * (momentum / count) ** 2
        centred_squares = square(x - x.mean(dims, keepdim=True))
        return old + square(centred_squares).sum(dims) * (momentum / max(count - 1, 1)) ** 2

    def samples(self) -> Iterable[Sample]:
        x, c = T((3, 2, 4, 2)), T((2,))
        for training in (True, False):
            yield Sample("aten._native_batch_norm_legit_functional.default", (x, c, c, c, c, training, 0.1, 1e-5))
        yield Sample("aten._native_batch_norm_legit_functional.default", (T((5, 2)), None, None, c, c, True, 0.3, 1e-5))
        yield Sample("aten._native_batch_norm_legit.no_stats", (x, c, c, True, 0.1, 1e-5))
        yield Sample("aten._native_batch_norm_legit.no_stats", (T((1, 6, 3)), None, None, True, 0.1, 1e-5))
        yield Sample("aten._batch_norm_with_update_functional.default", (x, c, c, c, c, 0.1, 1e-5))


class BatchNormWithoutUpdate(OpRule):
    """Inference: the running statistics are only read; elementwise."""

    ops = overloads("_batch_norm_no_update.default _native_batch_norm_legit_no_training.default")

    def loops(self, call: Call) -> Iterable[Loop]:
        return _loops(call, (0,), False, False)

    def samples(self) -> Iterable[Sample]:
        for op in self.ops:
            yield Sample(op, (T((3, 2, 4)), T((2,)), T((2,)), T((2,)), T((2,)), 0.1, 1e-5))


class BatchNormInPlace(BatchNorm):
    """The forms that write the running statistics they are given: not to be repeated."""

    ops = overloads("""
        _batch_norm_with_update.default _native_batch_norm_legit.default cudnn_batch_norm.default
        native_batch_norm.default
    """)
    recomputable = False

    def loops(self, call: Call) -> Iterable[Loop]:
        return () if self.training(call) else super().loops(call)

    def samples(self) -> Iterable[Sample]:
        x, c = T((3, 2, 4, 2)), T((2,))
        yield Sample("aten._batch_norm_with_update.default", (x, c, c, c, c, 0.1, 1e-5))
        for op in self.ops[1:]:
            yield Sample(op, (x, c, c, c, c, True, 0.1, 1e-5))
            yield Sample(op, (x, c, c, c, c, False, 0.1, 1e-5))


class BatchNormBackward(OpRule):
    """`(grad, x, weight, running_mean, running_var, save_mean, save_invstd, training, eps, mask)` gives the
    gradients of x, weight and bias."""

    ops = overloads("batch_norm_backward.default native_batch_norm_backward.default")
    grad, source = 0, 1

    def loops(self, call: Call) -> Iterable[Loop]:
        mask = argument(call, 9, "output_mask")
        for loop in _loops(call, (self.source, self.grad), True, self.training(call)):
            asked = mask if isinstance(mask, tuple) else (True,) * len(loop.roles)
            yield replace(
                loop, roles=tuple(role if wanted else role and Lost() for role, wanted in zip(loop.roles, asked))
            )

    def training(self, call: Call) -> bool:
        """Whether the statistics were those of the input."""
        return flag_at(call, 7, "train")

    def terms(self, call: Call, output: int) -> int:
        x = input_at(call, self.source, "input")
        count = x.numel // max(x.shape[1], 1)
        if output == 0:
            return 2 * count + 1 if self.training(call) else 1
        return count

    def storage_bytes(self, call: Call, output: int) -> int:
        """Nothing for a gradient that is not asked for, though its type is traced."""
        mask = argument(call, 9, "output_mask")
        asked = not isinstance(mask, tuple) or bool(mask[output])
        return super().storage_bytes(call, output) if asked else 0

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        source, x, weight = (given(call, tensors, place, "") for place in (self.grad, self.source, 2))
        training = self.training(call)
        mean, spread = (given(call, tensors, place + 2 * training, "") for place in (3, 4))
        rstd = spread if training else (spread + number_at(call, 8, "eps", 0.0)).rsqrt()
        rstd = _channels(rstd, x)
        xhat = (x - _channels(mean, x)) * rstd
        if output:
            return square(source * xhat if output == 1 else source).sum(_across(x))
        if not training:
            return None
        grad = source if weight is None else source * _channels(weight, x)
        return centred_gradient(grad, xhat, rstd, _across(x))

    def samples(self) -> Iterable[Sample]:
        x, c, every = T((3, 2, 4, 2)), T((2,)), (True, True, True)
        op = "aten.native_batch_norm_backward.default"
        yield Sample(op, (x, x, c, c, c, c, c, True, 1e-5, every))
        yield Sample(op, (x, x, c, c, c, c, c, False, 1e-5, every))
        yield Sample(op, (x, x, None, None, None, c, c, True, 1e-5, (True, False, False)))
        yield Sample(op, (T((5, 2)), T((5, 2)), c, None, None, c, c, True, 1e-5, (False, True, True)))
        reserve = T((0,), DType.U8)
        yield Sample("aten.batch_norm_backward.default", (x, x, c, c, c, c, c, True, 1e-5, every, reserve))


class CudnnBatchNormBackward(BatchNormBackward):
    """As above, but x comes before the gradient, and always in training."""

    ops = ("aten.cudnn_batch_norm_backward.default",)
    grad, source = 1, 0

    def training(self, call: Call) -> bool:
        return tensor_argument(call, 5, "save_mean") is not None

    def samples(self) -> Iterable[Sample]:
        x, c = T((3, 2, 4, 2)), T((2,))
        yield Sample(self.ops[0], (x, x, c, c, c, c, c, 1e-5, T((0,), DType.U8)))
