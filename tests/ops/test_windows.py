"""Operators that slide windows over an image: parts of their positions against the whole operator, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from magis.ir.dtype import DType
from magis.ops.loop import Axis, Concat, Loop, Lost, Reduce
from magis.ops.registry import rule_for
from magis.ops.rule import Sample, T
from oracle.loops import loop_problems
from oracle.run import Case, case_of

CONVOLUTION = "aten.convolution.default"
MAX_POOL = "aten.max_pool2d_with_indices.default"
AVERAGE_POOL = "aten.avg_pool2d.default"
PLAIN = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
"""A convolution's arguments from the strides on."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(op: str, *args: Any) -> tuple[Case, list[Loop]]:
    """A call, and its loops along positions; parts of all its loops agree with the whole."""
    case = case_of(Sample(op, args))
    assert loop_problems(case) == []
    channels = len(case.call.inputs[0].shape) - (3 if "3d" in op else 2)
    if "convolution" in op or "upsample" in op:
        channels = 2
    loops = rule_for(op).loops(case.call)
    return case, [loop for loop in loops if any(axis and axis.dim >= channels for axis in loop.inputs)]


def windows(loops: list[Loop]) -> set[int]:
    """Dimensions along which parts overlap."""
    return {loop.inputs[0].dim for loop in loops if loop.window is not None and loop.inputs[0] is not None}


def factors(loops: list[Loop]) -> set[tuple[Axis, Axis]]:
    """Axes of the first input, and of the first result, along which parts lie side by side."""
    return {
        (loop.inputs[0], loop.roles[0].axis)
        for loop in loops
        if loop.window is None and isinstance(loop.roles[0], Concat) and loop.inputs[0] is not None
    }


def out(length: int, kernel: int, stride: int, dilation: int, padding: int) -> int:
    return (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_convolution_of_a_line(kernel: int, stride: int) -> None:
    """Every border: positions left over by the stride, padding up to and beyond the window."""
    for dilation, padding, length in product((1, 2), (0, 1, 2, 3), (7, 8, 12)):
        if out(length, kernel, stride, dilation, padding) < 2:
            continue
        x, weight = T((2, 3, length)), T((2, 3, kernel))
        _, loops = made(CONVOLUTION, x, weight, T((2,)), (stride,), (padding,), (dilation,), False, (0,), 1)
        reach = dilation * (kernel - 1)
        assert windows(loops) == ({2} if padding <= reach else set())
        patches = reach < stride and padding == 0 and length % stride == 0
        axis = Axis(2, length // stride)
        assert factors(loops) == ({(axis, axis)} if patches else set())


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_transposed_convolution_of_a_line(kernel: int, stride: int) -> None:
    for dilation, padding, more, length in product((1, 2), (0, 1, 2), (0, 1), (5, 6)):
        reach = dilation * (kernel - 1)
        if more >= max(stride, dilation) or (length - 1) * stride - 2 * padding + reach + more < 1:
            continue
        x, weight = T((2, 3, length)), T((3, 2, kernel))
        _, loops = made(CONVOLUTION, x, weight, T((2,)), (stride,), (padding,), (dilation,), True, (more,), 1)
        assert windows(loops) == ({2} if reach + 1 >= stride and more <= padding else set())
        assert bool(factors(loops)) == (padding == 0 and reach + 1 + more == stride)


@pytest.mark.parametrize("rank", [2, 3])
def test_convolution_with_options_of_each_dimension(rank: int) -> None:
    """Groups; kernels, strides, padding and dilation that differ; one dimension is cut, the others stay as they are."""
    options = (2, 1, 3)[:rank], (1, 2, 0)[:rank], (1, 2, 1)[:rank]
    x, weight = T((3, 4, 7, 6, 6)[: rank + 2]), T((6, 2, 3, 3, 2)[: rank + 2])
    _, loops = made(CONVOLUTION, x, weight, T((6,)), *options, False, (0,) * rank, 2)
    assert windows(loops) == set(range(2, rank + 2))
    weight = T((4, 3, 3, 3, 4)[: rank + 2])
    _, loops = made(CONVOLUTION, x, weight, None, *options, True, (1, 0, 0)[:rank], 2)
    assert windows(loops) == set(range(2, rank + 2))


def test_gradients_of_patches() -> None:
    """Patches are apart in the gradients as well: those of the weight and the bias are summed."""
    x, weight, grad = T((2, 3, 6, 8)), T((4, 3, 2, 2)), T((2, 4, 3, 4))
    rest = ((4,), (2, 2), (0, 0), (1, 1), False, (0, 0), 1, (True, True, True))
    _, loops = made("aten.convolution_backward.default", grad, x, weight, *rest)
    assert {loop.roles for loop in loops} == {(Concat(axis), Reduce(), Reduce()) for axis in (Axis(2, 3), Axis(3, 4))}
    rest = ((3,), (2, 2), (0, 0), (1, 1), True, (0, 0), 1, (True, True, True))
    _, loops = made("aten.convolution_backward.default", T((2, 3, 6, 8)), T((2, 4, 3, 4)), T((4, 3, 2, 2)), *rest)
    assert {loop.roles for loop in loops} == {(Concat(axis), Reduce(), Reduce()) for axis in (Axis(2, 3), Axis(3, 4))}


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_pooling(kernel: int, stride: int, ceil: bool) -> None:
    for padding, length in product((0, 1), (6, 7, 8)):
        image = T((2, 2, length, 5))
        sizes, strides, pads = (kernel, 2), (stride, 1), (padding, 1)
        case, loops = made(MAX_POOL, image, sizes, strides, pads, (1, 1), ceil)
        small = case.call.outputs[0].shape[2]  # type: ignore[union-attr]
        assert windows(loops) == ({2, 3} if small > 1 else {3})
        assert {loop.roles[1] for loop in loops} == {Lost()}  # places count within the whole image
        cut = (small - 1) * stride + kernel > length + 2 * padding
        for counted, divisor in product((True, False), (None, 5)):
            _, loops = made(AVERAGE_POOL, image, sizes, strides, pads, ceil, counted, divisor)
            alike = divisor is not None or (not cut and (counted or not padding))
            assert (2 in windows(loops)) == (alike and small > 1)
            assert (3 in windows(loops)) == (counted or divisor is not None)


def test_dilated_maximum() -> None:
    _, loops = made(MAX_POOL, T((2, 3, 9, 7), DType.BF16), (3, 2), (2, 1), (1, 1), (2, 3))
    assert windows(loops) == {2, 3}


def test_windows_as_large_as_the_image() -> None:
    """Parts of the one window: their averages, or the largest of them."""
    for op, by, rest in ((AVERAGE_POOL, "average", ()), (MAX_POOL, "max", (Lost(),))):
        _, loops = made(op, T((2, 3, 6, 4)), (6, 4), (1, 1))
        assert [loop.roles for loop in loops] == [(Reduce(by), *rest)] * 2
    _, loops = made(AVERAGE_POOL, T((2, 3, 6, 4)), (6, 4), (1, 1), (0, 0), False, True, 7)
    assert loops == []
    _, loops = made("aten._adaptive_avg_pool2d.default", T((2, 3, 6, 4)), (1, 2))
    assert {loop.roles for loop in loops} == {(Reduce("average"),), (Concat(Axis(3, 2)),)}


def test_adaptive_pooling_in_pieces_of_the_common_ratio() -> None:
    for large, small in ((12, 4), (12, 8), (9, 6), (6, 12), (7, 3)):
        for op in ("aten._adaptive_avg_pool2d.default", "aten.adaptive_max_pool2d.default"):
            _, loops = made(op, T((2, 3, large, 5)), (small, 4))
            axis = Axis(2, {4: 4, 8: 4, 6: 3, 12: 6, 3: 1}[small])
            assert factors(loops) == ({(axis, axis)} if axis.length > 1 else set())


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_upsampling(scale: int, given: bool) -> None:
    image, size = T((2, 3, 5, 4)), (5 * scale, 8)
    scales = (float(scale), 2.0) if given else ()
    for op in ("aten.upsample_nearest2d.default", "aten._upsample_nearest_exact2d.default"):
        _, loops = made(op, image, size, *scales)
        assert windows(loops) == {2, 3}
        assert factors(loops) == {(Axis(2, 5), Axis(2, 5)), (Axis(3, 4), Axis(3, 4))}
    for op in ("aten.upsample_bilinear2d.default", "aten.upsample_bicubic2d.default"):
        _, loops = made(op, image, size, False, *scales)
        assert windows(loops) == ({3} if scale == 3 else {2, 3})  # thirds of a step are rounded: parts would differ
        _, loops = made(op, image, size, True)
        assert loops == []


def test_scales_that_are_not_those_of_the_lengths() -> None:
    _, loops = made("aten.upsample_nearest2d.default", T((2, 3, 5, 4)), (11, 8), 2.2, 2.1)
    assert factors(loops) == set() and windows(loops) == set()


def test_nearest_elements_that_are_rounded_wrongly() -> None:
    """41 * float32(1/41) is below 1: a kernel takes the element before there, a part of it would not."""
    _, loops = made("aten.upsample_nearest1d.default", T((2, 3, 64)), (64 * 41,))
    assert loops == []
    _, loops = made("aten._upsample_nearest_exact1d.default", T((2, 3, 64)), (64 * 41,))
    assert windows(loops) == {2}


def test_one_tensor_as_image_and_weight() -> None:
    """It is sliced only along the dimension that is the same in both: channels of the image."""
    tensor = T((3, 3, 3, 3))
    call = case_of(Sample(CONVOLUTION, (tensor, tensor, None, *PLAIN))).call
    call = replace(call, args=(call.args[0], call.args[0], None, *PLAIN), inputs=call.inputs[:1])
    assert list(rule_for(CONVOLUTION).loops(call)) == [Loop((Axis(1, 3),), (Reduce(),))]


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4)])
def test_empty_images(shape: tuple[int, ...]) -> None:
    for op, *rest in ((MAX_POOL, (2, 2)), (AVERAGE_POOL, (2, 2)), ("aten.upsample_nearest2d.default", (8, 8))):
        try:
            case = case_of(Sample(op, (T(shape), *rest)))
        except RuntimeError:
            continue
        assert loop_problems(case) == []
    case = case_of(Sample(CONVOLUTION, (T((0, 3, 4, 4)), T((2, 3, 3, 3)), None, *PLAIN)))
    assert loop_problems(case) == []
