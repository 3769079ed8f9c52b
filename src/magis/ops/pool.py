"""Pooling and sliding windows: one launch, every tensor once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, prod
from typing import Any

from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import input_at, ints_at, output_at, overloads
from magis.ops.loop import Axis, Concat, Loop, Window
from magis.ops.pool_loops import AdaptivePool, AveragingPool, Pool, WindowPool
from magis.ops.rule import Kernel, OpRule, Sample, T, one_launch, square
from magis.ops.slots import at_places
from magis.ops.windows import each, over_images, patches

IMAGE, VOLUME = T((2, 3, 5, 6)), T((1, 2, 4, 4, 4))


class AveragePool(AveragingPool):
    """`(x, window, stride, padding, ceil, count padding, divisor)`."""

    ops = overloads("avg_pool2d.default avg_pool3d.default")

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
        yield Sample("aten.avg_pool2d.default", (T((4, 3, 5, 7)), (5, 3), (1, 2), (0, 1)))
        yield Sample("aten.avg_pool2d.default", (T((3, 9, 8)), (3, 3), (2, 2), (1, 1), True, False, 4))
        yield Sample("aten.avg_pool3d.default", (VOLUME, 2, 2))


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


class AdaptiveAveragePool(AdaptivePool):
    """`(x, result size)`: windows that cover the image, each divided by its own size."""

    ops = overloads("_adaptive_avg_pool2d.default _adaptive_avg_pool3d.default")

    def spans(self, call: Call) -> list[list[int]]:
        """Lengths of the windows along each dimension."""
        rank = 3 if "3d" in call.op else 2
        large = input_at(call, int(self.backward), "self").shape[-rank:]
        small = (input_at(call, 0, "grad_output") if self.backward else output_at(call, 0)).shape[-rank:]
        return [_spans(length, parts) for length, parts in zip(large, small)]

    def terms(self, call: Call, output: int) -> int:
        return prod(max(spans, default=1) for spans in self.spans(call))

    def shares(self, torch: Any, call: Call, like: Any) -> Any:
        """One over the windows' sizes, in the shape of the result's last dimensions."""
        total = torch.ones((), dtype=like.dtype)
        for spans in self.spans(call):
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
        yield Sample("aten._adaptive_avg_pool2d.default", (T((4, 3, 9, 7)), (6, 1)))
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


class MaxPool(WindowPool):
    """The largest element of each window and its place: exact.

    Places count within the whole image: parts of it do not know them."""

    ops = overloads("max_pool2d_with_indices.default max_pool3d_with_indices.default")
    by = "max"
    fill = float("-inf")

    def borders_alike(self, call: Call, window: Window, large: int, small: int) -> bool:
        return not window.padding or input_at(call, 0, "self").dtype.is_floating

    def samples(self) -> Iterable[Sample]:
        op = "aten.max_pool2d_with_indices.default"
        yield Sample(op, (IMAGE, (2, 2), (2, 2)))
        yield Sample(op, (IMAGE, (3, 3), (2, 2), (1, 1), (1, 1), True))
        yield Sample(op, (T((2, 3, 4, 4), DType.BF16), (2, 2)))
        yield Sample(op, (T((4, 3, 6, 9)), (6, 2), (1, 4), (0, 0), (1, 2)))
        yield Sample("aten.max_pool3d_with_indices.default", (VOLUME, 2))


class AdaptiveMaxPool(AdaptivePool):
    """The largest element of each window and its place within the whole image: exact."""

    ops = overloads("adaptive_max_pool2d.default adaptive_max_pool3d.default")
    by = "max"

    def samples(self) -> Iterable[Sample]:
        yield Sample("aten.adaptive_max_pool2d.default", (IMAGE, (2, 4)))
        yield Sample("aten.adaptive_max_pool3d.default", (VOLUME, (2, 3, 1)))


class MaxUnpool(Pool):
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
        yield from over_images(call, (0,), range(len(shape) - 2), shape)

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (IMAGE, (2, 3), (1, 1), (1, 0), (2, 1)))


class WindowsBackward(OpRule):
    """`col2im(columns, image, window, dilation, padding, stride)`: windows that overlap are summed."""

    ops = ("aten.col2im.default",)

    def loops(self, call: Call) -> Iterable[Loop]:
        shape = output_at(call, 0).shape
        yield from over_images(call, (0,), range(len(shape) - 2), shape)

    def terms(self, call: Call, output: int) -> int:
        return prod(ints_at(call, 2, "kernel_size"))

    def storage_bytes(self, call: Call, output: int) -> int:
        """The kernel allocates the columns' size first and keeps it."""
        return max(input_at(call, 0, "self").nbytes, output_at(call, output).storage_bytes)

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        return torch.ops.aten.col2im.default(square(tensors[0]), *call.args[1:])

    def samples(self) -> Iterable[Sample]:
        yield Sample(self.ops[0], (T((2, 8, 12)), (4, 5), (2, 2), (1, 1), (0, 0), (1, 1)))
