"""Pooling and sliding windows: one launch, every tensor once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, prod
from typing import Any, ClassVar

from magis.ir.args import Args, Kwargs
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import flag_at, input_at, ints_at, output_at, overloads
from magis.ops.loop import Axis, Concat, Loop, Lost, Window
from magis.ops.rule import Kernel, OpRule, Sample, T, WindowPart, argument, one_launch, square
from magis.ops.slots import at_places
from magis.ops.windows import each, over_images, patches, sliding, window_part, with_entry

IMAGE, VOLUME = T((2, 3, 5, 6)), T((1, 2, 4, 4, 4))


class _Pool(OpRule):
    """Samples and channels apart; positions where windows do not overlap, or with a halo."""

    images: ClassVar[tuple[int, ...]] = (0,)
    """Arguments that are images or results."""

    def rank(self, call: Call) -> int:
        """Dimensions of the window."""
        return 3 if "3d" in call.op else 2

    def loops(self, call: Call) -> Iterable[Loop]:
        shape = input_at(call, self.images[-1], "self").shape
        yield from over_images(call, self.images, range(len(shape) - self.rank(call)), shape)
        yield from self.along_space(call)

    def along_space(self, call: Call) -> Iterator[Loop]:
        """Loops over positions."""
        return iter(())


class AveragePool(_Pool):
    """`(x, window, stride, padding, ceil, count padding, divisor)`."""

    ops = overloads("avg_pool2d.default avg_pool3d.default")
    first = 1  # where the window stands

    def windows(self, call: Call) -> tuple[Window, ...]:
        """Its windows along each dimension."""
        rank = self.rank(call)
        sizes = each(ints_at(call, self.first, "kernel_size"), rank)
        strides = each(ints_at(call, self.first + 1, "stride"), rank) or sizes
        padding = each(ints_at(call, self.first + 2, "padding") or (0,), rank)
        return tuple(Window(size, stride, 1, pad) for size, stride, pad in zip(sizes, strides, padding))

    def along_space(self, call: Call) -> Iterator[Loop]:
        small, large = output_at(call, 0).shape, input_at(call, 0, "self").shape
        counted = (
            flag_at(call, self.first + 4, "count_include_pad", True) or argument(call, self.first + 5, "") is not None
        )
        for place, window in enumerate(self.windows(call)):
            dim = len(large) - self.rank(call) + place
            if patches(large[dim], small[dim], window):
                axis = Axis(dim, small[dim])
                yield from at_places(call, {0: axis}, [Concat(axis)])
            if not flag_at(call, self.first + 3, "ceil_mode") and (counted or not window.padding):
                yield from sliding(call, dim, small[dim], window)

    def windowed(self, call: Call, loop: Loop, rows: range) -> WindowPart:
        return window_part(loop, rows, _without_padding(call, loop, self.rank(call), 3), call.kwargs)

    def terms(self, call: Call, output: int) -> int:
        return prod(each(ints_at(call, self.first, "kernel_size"), self.rank(call)))

    def shares(self, torch: Any, call: Call, like: Any) -> Any:
        """What each window's sum is multiplied with, in the shape of the result."""
        run = getattr(torch.ops.aten, "avg_pool3d" if self.rank(call) == 3 else "avg_pool2d").default
        options: list[Any] = list(call.args[self.first :])
        options += [(), 0, False, True, None][len(options) - 1 :]
        if not options[1]:
            options[1] = options[0]
        ones = torch.ones_like(like, dtype=torch.float64)
        return run(ones, *options) / run(ones, *options[:5], 1).clamp(min=1)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        run = getattr(torch.ops.aten, call.op.split(".")[1]).default
        return run(square(tensors[0]), *call.args[1:]) * self.shares(torch, call, tensors[0])

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.avg_pool2d.default", (IMAGE, (2, 2)))
        yield Sample("aten.avg_pool2d.default", (IMAGE, (3, 2), (2, 1), (1, 0), True, False))
        yield Sample("aten.avg_pool2d.default", (IMAGE, 3, 1, 1))
        yield Sample("aten.avg_pool2d.default", (T((2, 3, 4, 4), DType.BF16), (2, 2), (2, 2), 0, False, True, 3))
        yield Sample("aten.avg_pool3d.default", (VOLUME, 2, 2))


def _without_padding(call: Call, loop: Loop, rank: int, place: int) -> Args:
    """The arguments with no padding along the loop's dimension; padding is the argument at `place`."""
    axis = loop.inputs[0]
    assert axis is not None
    padding = each(ints_at(call, place, "padding") or (0,), rank)
    dim = axis.dim - (len(call.inputs[0].shape) - rank)
    given = (*call.args, *(() for _ in range(place - len(call.args))))  # an empty stride is the window's size
    return (*given[:place], with_entry(padding, dim, 0), *given[place + 1 :])


class AveragePoolBackward(AveragePool):
    """`(grad, x, ...)`: each element sums its share of the windows that hold it."""

    ops = overloads("avg_pool2d_backward.default avg_pool3d_backward.default")
    first = 2
    images = (0, 1)

    def along_space(self, call: Call) -> Iterator[Loop]:
        small, large = input_at(call, 0, "grad_output").shape, output_at(call, 0).shape
        for place, window in enumerate(self.windows(call)):
            dim = len(large) - self.rank(call) + place
            if patches(large[dim], small[dim], window):
                axis = Axis(dim, small[dim])
                yield from at_places(call, {0: axis, 1: axis}, [Concat(axis)])

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return one_launch(call, input_at(call, 1, "self"))

    def terms(self, call: Call, output: int) -> int:
        window = each(ints_at(call, 2, "kernel_size"), self.rank(call))
        stride = each(ints_at(call, 3, "stride"), self.rank(call)) or window
        return prod(ceil(size / step) for size, step in zip(window, stride))

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        run = getattr(torch.ops.aten, call.op.split(".")[1]).default
        grad, x = tensors[0], tensors[-1]
        shares = self.shares(torch, call, x).to(square(grad).dtype)
        return run(square(grad) * shares, square(x), *call.args[2:])

    def samples(self) -> Iterable[Sample]:
        op = "aten.avg_pool2d_backward.default"
        yield Sample(op, (T((2, 3, 2, 3)), IMAGE, (2, 2), (), 0, False, True, None))
        yield Sample(op, (T((2, 3, 5, 5)), IMAGE, (3, 2), (1, 1), (1, 0), False, False, None))
        yield Sample(op, (T((2, 3, 5, 6)), IMAGE, (3, 3), (1, 1), (1, 1), False, True, None))
        yield Sample("aten.avg_pool3d_backward.default", (T((1, 2, 2, 2, 2)), VOLUME, 2, 2, 0, False, True, 5))


def _spans(length: int, parts: int) -> list[int]:
    """Lengths of the windows into which adaptive pooling cuts a dimension."""
    return [ceil((i + 1) * length / parts) - i * length // parts for i in range(parts)]


class AdaptiveAveragePool(_Pool):
    """`(x, result size)`: windows that cover the image, each divided by its own size."""

    ops = overloads("_adaptive_avg_pool2d.default _adaptive_avg_pool3d.default")
    backward = False

    def along_space(self, call: Call) -> Iterator[Loop]:
        small = (input_at(call, 0, "grad_output") if self.backward else output_at(call, 0)).shape
        large = input_at(call, int(self.backward), "self").shape
        for dim in range(len(large) - self.rank(call), len(large)):
            if small[dim] and large[dim] % small[dim] == 0:
                axis = Axis(dim, small[dim])
                yield from at_places(call, dict.fromkeys(self.images, axis), [Concat(axis)])

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        axis = loop.inputs[0]
        place = -1 if axis is None else axis.dim - (len(call.inputs[0].shape) - self.rank(call))
        if self.backward or axis is None or place < 0:
            return call.args, call.kwargs
        size = ints_at(call, 1, "output_size")
        smaller = with_entry(size, place, size[place] // axis.length * length)
        return (call.args[0], smaller, *call.args[2:]), call.kwargs

    def windows(self, call: Call) -> list[list[int]]:
        """Lengths of the windows along each dimension."""
        rank = 3 if "3d" in call.op else 2
        large = input_at(call, int(self.backward), "self").shape[-rank:]
        small = (input_at(call, 0, "grad_output") if self.backward else output_at(call, 0)).shape[-rank:]
        return [_spans(length, parts) for length, parts in zip(large, small)]

    def terms(self, call: Call, output: int) -> int:
        return prod(max(spans, default=1) for spans in self.windows(call))

    def shares(self, torch: Any, call: Call, like: Any) -> Any:
        """One over the windows' sizes, in the shape of the result's last dimensions."""
        total = torch.ones((), dtype=like.dtype)
        for spans in self.windows(call):
            total = total.unsqueeze(-1) * torch.tensor(spans, dtype=like.dtype)
        return 1 / total

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        run = getattr(torch.ops.aten, call.op.split(".")[1]).default
        squares = square(tensors[0])
        if self.backward:
            return run(squares * self.shares(torch, call, squares), square(tensors[-1]))
        return run(squares, *call.args[1:]) * self.shares(torch, call, squares)

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten._adaptive_avg_pool2d.default", (IMAGE, (2, 4)))
        yield Sample("aten._adaptive_avg_pool2d.default", (IMAGE, (7, 7)))
        yield Sample("aten._adaptive_avg_pool3d.default", (VOLUME, (2, 3, 1)))


class AdaptiveAveragePoolBackward(AdaptiveAveragePool):
    """`(grad, x)`: each element sums its share of the windows that hold it."""

    ops = overloads("_adaptive_avg_pool2d_backward.default _adaptive_avg_pool3d_backward.default")
    backward = True
    images = (0, 1)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return one_launch(call, input_at(call, 1, "self"))

    def terms(self, call: Call, output: int) -> int:
        rank = 3 if "3d" in call.op else 2
        large, small = input_at(call, 1, "self").shape[-rank:], input_at(call, 0, "grad_output").shape[-rank:]
        return prod(ceil(parts / length) + (parts % length > 0) for length, parts in zip(large, small))

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten._adaptive_avg_pool2d_backward.default", (T((2, 3, 2, 4)), IMAGE))
        yield Sample("aten._adaptive_avg_pool2d_backward.default", (T((2, 3, 7, 7)), IMAGE))
        yield Sample("aten._adaptive_avg_pool3d_backward.default", (T((1, 2, 2, 3, 1)), VOLUME))


class MaxPool(_Pool):
    """The largest element of each window and its place: exact. `max_unpool` puts them back.

    Places count within the whole image: parts of it do not know them."""

    ops = overloads("""
        adaptive_max_pool2d.default adaptive_max_pool3d.default max_pool2d_with_indices.default
        max_pool3d_with_indices.default
    """)

    def along_space(self, call: Call) -> Iterator[Loop]:
        if "adaptive" in call.op or flag_at(call, 5, "ceil_mode"):
            return
        rank, small, large = self.rank(call), output_at(call, 0).shape, input_at(call, 0, "self").shape
        sizes = each(ints_at(call, 1, "kernel_size"), rank)
        strides = each(ints_at(call, 2, "stride"), rank) or sizes
        padding, dilation = (each(ints_at(call, place, "") or (default,), rank) for place, default in ((3, 0), (4, 1)))
        for place, shape in enumerate(zip(sizes, strides, dilation, padding)):
            dim, window = len(large) - rank + place, Window(*shape)
            if patches(large[dim], small[dim], window):
                axis = Axis(dim, small[dim])
                yield from at_places(call, {0: axis}, [Concat(axis), Lost()])
            yield from sliding(call, dim, small[dim], window)

    def windowed(self, call: Call, loop: Loop, rows: range) -> WindowPart:
        return window_part(loop, rows, _without_padding(call, loop, self.rank(call), 3), call.kwargs, float("-inf"))

    def samples(self) -> Iterable[Sample]:
        op = "aten.max_pool2d_with_indices.default"
        yield Sample(op, (IMAGE, (2, 2), (2, 2)))
        yield Sample(op, (IMAGE, (3, 3), (2, 2), (1, 1), (1, 1), True))
        yield Sample(op, (T((2, 3, 4, 4), DType.BF16), (2, 2)))
        yield Sample("aten.max_pool3d_with_indices.default", (VOLUME, 2))
        yield Sample("aten.adaptive_max_pool2d.default", (IMAGE, (2, 4)))
        yield Sample("aten.adaptive_max_pool3d.default", (VOLUME, (2, 3, 1)))


class MaxUnpool(_Pool):
    """`(x, places, size)`: elements put back where they were the largest."""

    ops = ("aten.max_unpool2d.default",)
    images = (0, 1)

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T((2, 3, 2, 2)), T((2, 3, 2, 2), DType.I64, 16), (4, 4)))


class MaxPoolBackward(OpRule):
    """`(grad, x, ..., indices)`: windows that share their largest element are summed there."""

    ops = overloads("""
        adaptive_max_pool2d_backward.default adaptive_max_pool3d_backward.default
        max_pool2d_with_indices_backward.default max_pool3d_with_indices_backward.default
    """)

    def loops(self, call: Call) -> Iterable[Loop]:
        shape = input_at(call, 1, "self").shape
        images = (0, 1, 2 if "adaptive" in call.op else 7)
        yield from over_images(call, images, range(len(shape) - (3 if "3d" in call.op else 2)), shape)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return one_launch(call, input_at(call, 1, "self"))

    def terms(self, call: Call, output: int) -> int:
        rank = 3 if "3d" in call.op else 2
        if "adaptive" in call.op:
            large, small = input_at(call, 1, "self").shape[-rank:], input_at(call, 0, "grad_output").shape[-rank:]
            return prod(ceil(parts / length) + (length % parts > 0) for length, parts in zip(large, small))
        window = each(ints_at(call, 2, "kernel_size"), rank)
        stride = each(ints_at(call, 3, "stride"), rank) or window
        return prod(ceil(size / step) for size, step in zip(window, stride))

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        run = getattr(torch.ops.aten, call.op.split(".")[1]).default
        grad, x, indices = tensors[0], tensors[-2], tensors[-1]
        return run(square(grad), square(x), *call.args[2 : len(call.args) - 1 - ("adaptive" in call.op)], indices)

    def samples(self) -> Iterable[Sample]:
        op = "aten.max_pool2d_with_indices_backward.default"
        grad, places = T((2, 3, 3, 3)), T((2, 3, 3, 3), DType.I64, 30)
        yield Sample(op, (grad, IMAGE, (3, 3), (2, 2), (1, 1), (1, 1), False, places))
        places = T((2, 3, 2, 3), DType.I64, 30)
        yield Sample(op, (T((2, 3, 2, 3)), IMAGE, (2, 2), (2, 2), 0, 1, False, places))
        cube = T((1, 2, 2, 2, 2))
        places = T((1, 2, 2, 2, 2), DType.I64, 64)
        yield Sample("aten.max_pool3d_with_indices_backward.default", (cube, VOLUME, 2, 2, 0, 1, False, places))
        yield Sample("aten.adaptive_max_pool3d_backward.default", (cube, VOLUME, places))
        places = T((2, 3, 2, 3), DType.I64, 30)
        yield Sample("aten.adaptive_max_pool2d_backward.default", (T((2, 3, 2, 3)), IMAGE, places))


class Windows(OpRule):
    """`im2col(x, window, dilation, padding, stride)`: every window as a column; elements are copied."""

    ops = ("aten.im2col.default",)

    def loops(self, call: Call) -> Iterable[Loop]:
        shape = input_at(call, 0, "self").shape
        for dim in range(len(shape) - 2):
            axis = Axis(dim, shape[dim])
            yield from at_places(call, {0: axis}, [Concat(axis)])

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (IMAGE, (2, 3), (1, 1), (1, 0), (2, 1)))


class WindowsBackward(OpRule):
    """`col2im(columns, image, window, dilation, padding, stride)`: windows that overlap are summed."""

    ops = ("aten.col2im.default",)

    def loops(self, call: Call) -> Iterable[Loop]:
        shape = output_at(call, 0).shape
        for dim in range(len(shape) - 2):
            axis = Axis(dim, shape[dim])
            yield from at_places(call, {0: axis}, [Concat(axis)])

    def terms(self, call: Call, output: int) -> int:
        return prod(ints_at(call, 2, "kernel_size"))

    def storage_bytes(self, call: Call, output: int) -> int:
        """The kernel allocates the columns' size first and keeps it."""
        return max(input_at(call, 0, "self").nbytes, output_at(call, output).storage_bytes)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return torch.ops.aten.col2im.default(square(tensors[0]), *call.args[1:])

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T((2, 8, 12)), (4, 5), (2, 2), (1, 1), (0, 0), (1, 1)))
