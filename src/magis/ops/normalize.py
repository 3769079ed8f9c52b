"""Layer, group and RMS normalisation, forward and backward: one launch each.

A normalised value is (x - mean(x)) * rstd over `count` elements. Its own rounding and that of its gradient
come from sums over those elements, written out in `centred` and `centred_gradient`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, ClassVar

from magis.ir.args import Args, Kwargs, Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import given, input_at, int_at, ints_at, number_at
from magis.ops.loop import Axis, Concat, Loop, Reduce, Role, whole_dims
from magis.ops.rule import OpRule, Sample, T, square
from magis.ops.slots import Places, at_places


def centred(x: Any, scale: Any, bias: Any, dims: list[int]) -> Any:
    """Squares of the terms of `(x - mean(x)) * scale + bias`: x, each share of the mean, the bias."""
    squares = square(x)
    shares = squares.mean(dims, keepdim=True) / _count(x, dims)
    return square(scale) * (squares + shares) + (0 if bias is None else square(bias))


def centred_gradient(grad: Any, xhat: Any, rstd: Any, dims: list[int]) -> Any:
    """Squares of the terms of `rstd * (g - mean(g) - xhat * mean(g * xhat))`, g times the weight already."""
    count, squares, normal = _count(grad, dims), square(grad), square(xhat)
    first = squares.mean(dims, keepdim=True) / count
    second = (squares * normal).mean(dims, keepdim=True) / count
    return square(rstd) * (squares + first + normal * second)


def _count(x: Any, dims: list[int]) -> int:
    return max(prod(int(x.shape[dim]) for dim in dims), 1)


class Normalisation(OpRule):
    """What layer, group and RMS normalisation share: `count` elements make one mean, and `spread` elements
    of the input share one element of the weight."""

    backward = False
    rows: ClassVar[tuple[int, ...]] = (0,)
    """Arguments that have a value for each row: the input, its gradient, statistics."""

    def role(self, call: Call, output: int, axis: Axis) -> Role:
        """What parts of the rows give of a result: gradients of weight and bias are sums over all rows."""
        if call.outputs[output] is None:
            return None
        return Reduce() if self.backward and output else Concat(axis)

    def loops(self, call: Call) -> Iterable[Loop]:
        x = input_at(call, 1 if self.backward else 0, "input").shape
        for axis in whole_dims(x, range(len(x) - len(ints_at(call, 2 if self.backward else 1, "normalized_shape")))):
            roles = [self.role(call, output, axis) for output in range(len(call.outputs))]
            yield from at_places(call, dict.fromkeys(self.rows, axis), roles)

    def count(self, call: Call) -> int:
        """Elements that are normalised together."""
        raise NotImplementedError

    def spread(self, call: Call) -> int:
        """Elements of the input that meet one element of the weight."""
        raise NotImplementedError

    def terms(self, call: Call, output: int) -> int:
        if not self.backward:
            return self.count(call) + 2 if output == 0 else self.count(call)
        return 2 * self.count(call) + 1 if output == 0 else self.spread(call)


class LayerNorm(Normalisation):
    """`native_layer_norm(x, shape, weight, bias, eps)` gives y, mean, rstd over the last dimensions."""

    ops = ("aten.native_layer_norm.default",)

    def count(self, call: Call) -> int:
        return prod(ints_at(call, 1, "normalized_shape"))

    def spread(self, call: Call) -> int:
        return input_at(call, 0, "input").numel // max(self.count(call), 1)

    def dims(self, call: Call) -> list[int]:
        """The normalised dimensions, counted from the end."""
        return list(range(-len(ints_at(call, 2 if self.backward else 1, "normalized_shape")), 0))

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        x, weight, bias = (given(call, tensors, place, "") for place in (0, 2, 3))
        dims = self.dims(call)
        if output == 1:
            return square(x).mean(dims, keepdim=True) / self.count(call)
        if output == 2:
            return None
        rstd = (x.var(dims, unbiased=False, keepdim=True) + number_at(call, 4, "eps", 0.0)).rsqrt()
        return centred(x, rstd if weight is None else rstd * weight, bias, dims)

    def samples(self) -> Iterable[Sample]:
        x, w, half = T((2, 3, 4)), T((4,)), DType.BF16
        yield Sample(self.ops[0], (x, (4,), w, w, 1e-5))
        yield Sample(self.ops[0], (x, (3, 4), T((3, 4)), None, 1e-5))
        yield Sample(self.ops[0], (T((2, 3, 4), strides=(12, 1, 3)), (4,), None, None, 1e-5))
        yield Sample(self.ops[0], (T((3, 4), half), (4,), T((4,), half), T((4,), half), 1e-5))


class LayerNormBackward(LayerNorm):
    """`(grad, x, shape, mean, rstd, weight, bias, mask)` gives the gradients of x, weight and bias."""

    ops = ("aten.native_layer_norm_backward.default",)
    rows: ClassVar[tuple[int, ...]] = (0, 1, 3, 4)
    contiguous_at: ClassVar[tuple[int, ...]] = (3, 4)
    backward = True

    def count(self, call: Call) -> int:
        return prod(ints_at(call, 2, "normalized_shape"))

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        grad, x, mean, rstd, weight = (given(call, tensors, place, "") for place in (0, 1, 3, 4, 5))
        dims = self.dims(call)
        leading = list(range(grad.dim() - len(dims)))
        xhat = (x - mean) * rstd
        if output == 0:
            return centred_gradient(grad if weight is None else grad * weight, xhat, rstd, dims)
        terms = square(grad * xhat if output == 1 else grad)
        return terms.sum(leading) if leading else terms

    def samples(self) -> Iterable[Sample]:
        x, w, half, every = T((2, 3, 4)), T((4,)), DType.BF16, (True, True, True)
        stats = T((2, 3, 1))
        yield Sample(self.ops[0], (x, x, (4,), stats, stats, w, w, every))
        yield Sample(self.ops[0], (x, x, (3, 4), T((2, 1, 1)), T((2, 1, 1)), T((3, 4)), T((3, 4)), every))
        yield Sample(self.ops[0], (x, x, (4,), stats, stats, None, None, (True, False, False)))
        yield Sample(self.ops[0], (x, x, (4,), stats, stats, w, w, (False, True, True)))
        rows, row, stats = T((3, 4), half), T((4,), half), T((3, 1), half)
        yield Sample(self.ops[0], (rows, rows, (4,), stats, stats, row, row, every))


def _slot(call: Call, place: int) -> int:
    """The number of the tensor at an argument that is one."""
    value = call.args[place]
    assert isinstance(value, Slot)
    return value.index


class GroupNorm(Normalisation):
    """`native_group_norm(x, weight, bias, N, C, HxW, groups, eps)` gives y, and mean and rstd of [N, groups]."""

    ops = ("aten.native_group_norm.default",)
    contiguous_at: ClassVar[tuple[int, ...]] = (0,)
    first = 3  # where N, C, HxW and groups stand
    weights: ClassVar[tuple[int, ...]] = (1, 2)

    def loops(self, call: Call) -> Iterable[Loop]:
        n, _, _, groups = self.sizes(call)
        samples = Axis(0, n)
        roles = [self.role(call, output, samples) for output in range(len(call.outputs))]
        yield from at_places(call, dict.fromkeys(self.rows, samples), roles)
        inner, outer = Axis(1, groups), Axis(0, groups)
        axes: Places = {**dict.fromkeys(self.rows, inner), **dict.fromkeys(self.weights, outer)}
        made = [outer if self.backward and output else inner for output in range(len(call.outputs))]
        yield from at_places(call, axes, [None if o is None else Concat(a) for o, a in zip(call.outputs, made)])

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        n, c, positions, groups = self.sizes(call)
        axis = loop.inputs[_slot(call, 0)]
        assert axis is not None
        if axis.dim == 0:
            sizes = (n // axis.length * length, c, positions, groups)
        else:
            sizes = (n, c // axis.length * length, positions, groups // axis.length * length)
        return (*call.args[: self.first], *sizes, *call.args[self.first + 4 :]), call.kwargs

    def sizes(self, call: Call) -> tuple[int, int, int, int]:
        """N, C, positions and groups."""
        n, c, positions, groups = (int_at(call, self.first + place, "") for place in range(4))
        return n, c, positions, groups

    def count(self, call: Call) -> int:
        _, c, positions, groups = self.sizes(call)
        return c // groups * positions

    def spread(self, call: Call) -> int:
        n, _, positions, _ = self.sizes(call)
        return n * positions

    def grouped(self, call: Call, x: Any) -> Any:
        """x as [N, groups, channels of a group, positions]."""
        n, c, positions, groups = self.sizes(call)
        return x.reshape(n, groups, c // groups, positions)

    def channels(self, call: Call, weight: Any) -> Any:
        """A value for each channel, as [1, groups, channels of a group, 1]."""
        return weight.reshape(1, self.sizes(call)[3], -1, 1)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        source, weight, bias = (given(call, tensors, place, "") for place in range(3))
        x = self.grouped(call, source)
        if output == 1:
            return square(x).mean([2, 3]) / self.count(call)
        if output == 2:
            return None
        rstd = (x.var([2, 3], unbiased=False, keepdim=True) + number_at(call, 7, "eps", 0.0)).rsqrt()
        scale = rstd if weight is None else rstd * self.channels(call, weight)
        added = None if bias is None else self.channels(call, bias)
        return centred(x, scale, added, [2, 3]).reshape(source.shape)

    def samples(self) -> Iterable[Sample]:
        x, w = T((2, 4, 3, 2)), T((4,))
        yield Sample(self.ops[0], (x, w, w, 2, 4, 6, 2, 1e-5))
        yield Sample(self.ops[0], (x, None, None, 2, 4, 6, 4, 1e-5))
        yield Sample(self.ops[0], (T((3, 4)), w, w, 3, 4, 1, 1, 1e-5))


class GroupNormBackward(GroupNorm):
    """`(grad, x, mean, rstd, weight, N, C, HxW, groups, mask)` gives the gradients of x, weight and bias."""

    ops = ("aten.native_group_norm_backward.default",)
    backward = True
    first = 5
    rows: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    contiguous_at = (0, 1, 2, 3)
    weights: ClassVar[tuple[int, ...]] = (4,)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        source, x = (self.grouped(call, given(call, tensors, place, "")) for place in (0, 1))
        n, _, _, groups = self.sizes(call)
        mean, rstd = (given(call, tensors, place, "").reshape(n, groups, 1, 1) for place in (2, 3))
        weight = given(call, tensors, 4, "weight")
        xhat = (x - mean) * rstd
        if output:
            return square(source * xhat if output == 1 else source).sum([0, 3]).reshape(-1)
        grad = source if weight is None else source * self.channels(call, weight)
        return centred_gradient(grad, xhat, rstd, [2, 3]).reshape(input_at(call, 1, "input").shape)

    def samples(self) -> Iterable[Sample]:
        x, w, stats = T((2, 4, 3, 2)), T((4,)), T((2, 2))
        yield Sample(self.ops[0], (x, x, stats, stats, w, 2, 4, 6, 2, (True, True, True)))
        yield Sample(self.ops[0], (x, x, stats, stats, None, 2, 4, 6, 2, (True, False, False)))


class RmsNorm(LayerNorm):
    """`_fused_rms_norm(x, shape, weight, eps)` gives y and rstd, whose squares are summed: positive terms."""

    ops = ("aten._fused_rms_norm.default",)

    def terms(self, call: Call, output: int) -> int:
        return self.count(call)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return None

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T((2, 3, 4)), (4,), T((4,)), 1e-5))
        yield Sample(self.ops[0], (T((2, 3, 4)), (3, 4), None, None))


class RmsNormBackward(LayerNormBackward):
    """`(grad, x, shape, rstd, weight, mask)` gives the gradients of x and weight."""

    ops = ("aten._fused_rms_norm_backward.default",)
    rows: ClassVar[tuple[int, ...]] = (0, 1, 3)
    contiguous_at: ClassVar[tuple[int, ...]] = (3,)

    def terms(self, call: Call, output: int) -> int:
        return self.spread(call) if output else self.count(call) + 1

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        source, x, rstd, weight = (given(call, tensors, place, "") for place in (0, 1, 3, 4))
        dims, xhat = self.dims(call), x * rstd
        if output:
            return square(source * xhat).sum(list(range(source.dim() - len(dims))))
        squares, normal = square(source if weight is None else source * weight), square(xhat)
        share = (squares * normal).mean(dims, keepdim=True) / self.count(call)
        return square(rstd) * (squares + normal * share)

    def samples(self) -> Iterable[Sample]:
        x, stats = T((2, 3, 4)), T((2, 3, 1))
        yield Sample(self.ops[0], (x, x, (4,), stats, T((4,)), (True, True)))
