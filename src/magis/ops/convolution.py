"""Convolutions of any rank as implicit matrix products, one for each group (device model v1).

With c, k channels of a group on the image's and the result's side and r*s kernel taps: forward
M=n*oh*ow N=k K=c*r*s, input gradient M=n*h*w N=c K=k*r*s, weight gradient M=c*r*s N=k K=n*oh*ow. A transposed
convolution is an input gradient run forward, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Any

from magis.ir.args import Args, Kwargs
from magis.ir.dtype import DType
from magis.ir.graph import Call, TensorSpec
from magis.ops.arguments import flag_at, given, input_at, int_at, ints_at, output_at
from magis.ops.convolution_loops import (
    backward_loops,
    backward_part,
    forward_loops,
    forward_part,
    windowed,
    without_bias,
)
from magis.ops.loop import Loop
from magis.ops.rule import (
    Gemm,
    Kernel,
    OpRule,
    Sample,
    T,
    WindowPart,
    argument,
    compute_dtype,
    read_bytes,
    square,
    stored_bytes,
    written_bytes,
)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of a plain convolution `image -> result`, whichever way the call runs through it."""

    n: int
    image: int  # positions
    result: int  # positions
    taps: int
    c: int  # channels of one group of the image
    k: int  # channels of one group of the result
    groups: int
    reach: int  # most taps that touch one position of the image

    @property
    def forward(self) -> Gemm:
        return Gemm(self.groups, self.n * self.result, self.k, self.c * self.taps)

    @property
    def image_gradient(self) -> Gemm:
        return Gemm(self.groups, self.n * self.image, self.c, self.k * self.taps)

    @property
    def weight_gradient(self) -> Gemm:
        return Gemm(self.groups, self.c * self.taps, self.k, self.n * self.result)

    @property
    def flops(self) -> int:
        """A multiply and an add for each tap that is applied: strides leave taps of the gradients idle."""
        return 2 * self.groups * self.n * self.result * self.taps * self.c * self.k


def _shape(call: Call, x: TensorSpec, y: TensorSpec, weight: TensorSpec, first: int) -> _Shape:
    """Sizes of the call from its input, its result and its weight; `first` is where the strides stand."""
    transposed = flag_at(call, first + 3, "transposed")
    groups = int_at(call, first + 5, "groups", 1)
    image, result = (y, x) if transposed else (x, y)
    rank = len(weight.shape) - 2
    strides = ints_at(call, first, "stride") * rank
    dilations = ints_at(call, first + 2, "dilation") * rank
    taps = weight.shape[2:]
    reach = prod(ceil(t / (s // gcd(s, d))) for t, s, d in zip(taps, strides, dilations))
    n = x.shape[0] if len(x.shape) == rank + 2 else 1
    k = weight.shape[0] // groups
    return _Shape(
        n, prod(image.shape[-rank:]), prod(result.shape[-rank:]), prod(taps), weight.shape[1], k, groups, reach
    )


class Convolution(OpRule):
    """`convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)`."""

    ops = ("aten.convolution.default",)

    def loops(self, call: Call) -> Iterable[Loop]:
        return forward_loops(call)

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        return forward_part(call, loop, length)

    def without_bias(self, call: Call, loop: Loop) -> tuple[Call, tuple[int, ...]]:
        return without_bias(call)

    def windowed(self, call: Call, loop: Loop, rows: range) -> WindowPart:
        return windowed(call, loop, rows)

    def _shape(self, call: Call) -> _Shape:
        return _shape(call, input_at(call, 0, "input"), output_at(call, 0), input_at(call, 1, "weight"), 3)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        shape = self._shape(call)
        gemm = shape.image_gradient if flag_at(call, 6, "transposed") else shape.forward
        return (Kernel(read_bytes(call) + written_bytes(call), (gemm,), compute_dtype(call)),)

    def flops(self, call: Call) -> int:
        return self._shape(call).flops

    def terms(self, call: Call, output: int) -> int:
        shape = self._shape(call)
        summed = shape.k * shape.reach if flag_at(call, 6, "transposed") else shape.c * shape.taps
        return summed + (argument(call, 2, "bias") is not None)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        x, weight, bias = (given(call, tensors, place, "") for place in range(3))
        squared_bias = None if bias is None else square(bias)
        return torch.ops.aten.convolution.default(square(x), square(weight), squared_bias, *call.args[3:])

    def samples(self) -> Iterable[Sample]:
        for x, weight, bias, options in _cases():
            yield Sample("aten.convolution.default", (T(x), T(weight), bias and T(bias), *options))
        half = DType.BF16
        tensors = T((2, 3, 5, 5), half), T((4, 3, 3, 3), half), T((4,), half)
        yield Sample("aten.convolution.default", (*tensors, (1, 1), (1, 1), (1, 1), False, (0, 0), 1))
        yield Sample(
            "aten.convolution.default",
            (T((2, 3, 4, 4), strides=(48, 1, 12, 3)), T((2, 3, 1, 1)), None, (1,), (0,), (1,), False, (0,), 1),
        )


def _cases() -> Iterable[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, tuple[Any, ...]]]:
    """Input, weight, bias, and the arguments from the strides on."""
    one, two = (1, 1), (2, 2)
    yield (2, 3, 5, 6), (4, 3, 3, 3), (4,), (one, one, one, False, (0, 0), 1)  # plain
    yield (2, 4, 5, 5), (6, 2, 3, 3), None, (two, one, one, False, (0, 0), 2)  # strided
    yield (1, 2, 6, 6), (2, 2, 3, 2), (2,), ((1, 2), (2, 0), (2, 1), False, (0, 0), 1)  # dilated
    yield (2, 3, 4, 4), (6, 1, 3, 3), (6,), (one, one, one, False, (0, 0), 3)  # depthwise
    yield (2, 2, 7), (3, 2, 3), (3,), ((2,), (1,), (1,), False, (0,), 1)  # line
    yield (1, 2, 3, 3, 3), (2, 2, 2, 2, 2), None, ((1,) * 3, (0,) * 3, (1,) * 3, False, (0,) * 3, 1)  # volume
    yield (2, 4, 3, 3), (4, 3, 2, 2), (3,), (two, (0, 0), one, True, (0, 0), 1)  # transposed
    yield (1, 4, 3, 3), (4, 2, 3, 3), (4,), (two, one, one, True, one, 2)  # transposed groups
    yield (3, 5, 6, 8), (7, 5, 1, 1), None, (two, (0, 0), one, False, (0, 0), 1)  # points
    yield (3, 12, 4, 6), (18, 2, 2, 3), (18,), ((2, 3), (0, 0), one, False, (0, 0), 6)  # patches, groups


class ConvolutionBackward(OpRule):
    """Gradients of the input, the weight and the bias: one launch for each that is asked for."""

    ops = ("aten.convolution_backward.default",)

    def loops(self, call: Call) -> Iterable[Loop]:
        return backward_loops(call)

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        return backward_part(call, loop, length)

    def _shape(self, call: Call) -> _Shape:
        result, x = input_at(call, 0, "grad_output"), input_at(call, 1, "input")
        return _shape(call, x, result, input_at(call, 2, "weight"), 4)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        shape, dtype = self._shape(call), compute_dtype(call)
        grad, x, weight = (stored_bytes(input_at(call, place, "")) for place in range(3))
        gemm = shape.forward if flag_at(call, 7, "transposed") else shape.image_gradient
        reads = ((grad + weight, (gemm,)), (grad + x, (shape.weight_gradient,)), (grad, ()))
        return tuple(
            Kernel(read + spec.nbytes, gemms, dtype) for (read, gemms), spec in zip(reads, call.outputs) if spec
        )

    def flops(self, call: Call) -> int:
        asked = [spec is not None for spec in call.outputs]
        products = asked[0] + asked[1]
        if products:
            return products * self._shape(call).flops
        return input_at(call, 0, "grad_output").numel if asked[2] else 0

    def terms(self, call: Call, output: int) -> int:
        shape = self._shape(call)
        transposed = flag_at(call, 7, "transposed")
        if output == 0:
            return shape.c * shape.taps if transposed else shape.k * shape.reach
        if output == 1:
            return shape.n * shape.result
        return shape.n * (shape.image if transposed else shape.result)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        squares = [square(given(call, tensors, place, "")) for place in range(3)]
        if output == 2:
            return squares[0].sum([d for d in range(squares[0].dim()) if d != squares[0].dim() - self._rank(call) - 1])
        mask = [place == output for place in range(3)]
        results = torch.ops.aten.convolution_backward.default(*squares, *call.args[3:10], mask)
        return results[output]

    def _rank(self, call: Call) -> int:
        return len(input_at(call, 2, "weight").shape) - 2

    def samples(self) -> Iterable[Sample]:
        masks = [(True, True, True), (True, True, False), (False, True, True), (True, False, False)]
        for number, (x, weight, bias, options) in enumerate(_cases()):
            grad = T(_result_shape(x, weight, options))
            mask = masks[number % len(masks)]
            sizes = bias or ((weight[1] if options[3] else weight[0]),) if mask[2] else None
            yield Sample(self.ops[0], (grad, T(x), T(weight), sizes, *options, mask))


def _result_shape(x: tuple[int, ...], weight: tuple[int, ...], options: tuple[Any, ...]) -> tuple[int, ...]:
    stride, padding, dilation, transposed, output_padding, groups = options
    sizes = []
    for place, (length, taps) in enumerate(zip(x[2:], weight[2:])):
        s, p, d, extra = stride[place], padding[place], dilation[place], output_padding[place]
        span = d * (taps - 1)
        sizes.append(
            (length - 1) * s - 2 * p + span + extra + 1 if transposed else (length + 2 * p - span - 1) // s + 1
        )
    return (x[0], weight[1] * groups if transposed else weight[0], *sizes)
