"""Along which axes pooling may run in parts: what pooling operators have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd
from typing import ClassVar

from magis.ir.args import Args, Kwargs
from magis.ir.graph import Call
from magis.ops.arguments import flag_at, input_at, ints_at, output_at
from magis.ops.loop import Axis, Concat, Loop, Lost, Reduce, Role, Window
from magis.ops.rule import OpRule, WindowPart, argument
from magis.ops.slots import at_places
from magis.ops.windows import each, empty, over_images, patches, sliced, sliding, window_part, with_entry


class Pool(OpRule):
    """Samples and channels apart; positions where windows do not overlap, or with a halo."""

    images: ClassVar[tuple[int, ...]] = (0,)
    """Arguments that are images or results."""
    first: ClassVar[int] = 1
    """Where the window stands among the arguments."""

    def rank(self, call: Call) -> int:
        """Dimensions of the window."""
        return 3 if "3d" in call.op else 2

    def loops(self, call: Call) -> Iterable[Loop]:
        shape = input_at(call, self.images[-1], "self").shape
        yield from over_images(call, self.images, range(len(shape) - self.rank(call)), shape)
        if not call.kwargs and not empty(call):
            yield from self.along_space(call)

    def along_space(self, call: Call) -> Iterator[Loop]:
        """Loops over positions."""
        return iter(())

    def windows(self, call: Call) -> tuple[Window, ...]:
        """The windows along each dimension."""
        rank = self.rank(call)
        sizes = each(ints_at(call, self.first, "kernel_size"), rank)
        strides = each(ints_at(call, self.first + 1, "stride"), rank) or sizes
        padding = each(ints_at(call, self.first + 2, "padding") or (0,), rank)
        spread = ints_at(call, self.first + 3, "dilation") if "max" in call.op else ()
        dilation = each(spread or (1,), rank)
        return tuple(Window(*shape) for shape in zip(sizes, strides, dilation, padding))

    def window_dim(self, call: Call, loop: Loop) -> int:
        """Which dimension of the window a loop runs along; negative for samples and channels."""
        return sliced(loop).dim - (len(call.inputs[0].shape) - self.rank(call))

    def unpadded(self, call: Call, loop: Loop) -> Args:
        """The arguments with no padding along the loop's dimension."""
        place = self.first + 2
        padding = each(ints_at(call, place, "padding") or (0,), self.rank(call))
        given = (*call.args, *(() for _ in range(place - len(call.args))))  # an empty stride is the window's size
        return (*given[:place], with_entry(padding, self.window_dim(call, loop), 0), *given[place + 1 :])


class WindowPool(Pool):
    """Windows of one size: `(x, window, stride, padding, ...)`."""

    by: ClassVar[str] = "average"
    """How partial results of one window combine."""
    fill: ClassVar[float] = 0.0
    """What stands outside of the image."""

    def along_space(self, call: Call) -> Iterator[Loop]:
        small, large = output_at(call, 0).shape, input_at(call, 0, "self").shape
        for place, window in enumerate(self.windows(call)):
            dim = len(large) - self.rank(call) + place
            if patches(large[dim], small[dim], window):
                axis = Axis(dim, small[dim])
                yield from at_places(call, {0: axis}, first_only(call, Concat(axis)))
            if small[dim] == 1 and window == Window(large[dim], window.stride) and self.divides_by_size(call):
                yield from at_places(call, {0: Axis(dim, large[dim])}, first_only(call, Reduce(self.by)))
            if self.borders_alike(call, window, large[dim], small[dim]):
                yield from sliding(call, dim, small[dim], window)

    def divides_by_size(self, call: Call) -> bool:
        """Whether a window's result is the mean (or the largest) of its elements."""
        return True

    def borders_alike(self, call: Call, window: Window, large: int, small: int) -> bool:
        """Whether windows that reach over the border are treated like those of a padded image."""
        return True

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        """Along the elements of a window, it is smaller."""
        if not isinstance(loop.roles[0], Reduce):
            return call.args, call.kwargs
        axis, place = sliced(loop), self.window_dim(call, loop)
        sizes = each(ints_at(call, self.first, "kernel_size"), self.rank(call))
        smaller = with_entry(sizes, place, sizes[place] // axis.length * length)
        return (*call.args[: self.first], smaller, *call.args[self.first + 1 :]), call.kwargs

    def windowed(self, call: Call, loop: Loop, rows: range) -> WindowPart:
        return window_part(loop, rows, self.unpadded(call, loop), call.kwargs, self.fill)


class AveragingPool(WindowPool):
    """Averages: what a window's sum is divided by may depend on how much of it lies in the image."""

    def divides_by_size(self, call: Call) -> bool:
        return argument(call, self.first + 5, "divisor_override") is None

    def borders_alike(self, call: Call, window: Window, large: int, small: int) -> bool:
        if not self.divides_by_size(call):
            return True
        cut = (small - 1) * window.stride + window.kernel > large + 2 * window.padding
        return not cut and (not window.padding or flag_at(call, self.first + 4, "count_include_pad", True))


class AdaptivePool(Pool):
    """Windows that cut an image into so many: `(x, result size)`, or for `backward` `(grad, x)`."""

    by: ClassVar[str] = "average"
    backward: ClassVar[bool] = False

    def along_space(self, call: Call) -> Iterator[Loop]:
        small = (input_at(call, 0, "grad_output") if self.backward else output_at(call, 0)).shape
        large = input_at(call, int(self.backward), "self").shape
        for dim in range(len(large) - self.rank(call), len(large)):
            axis = Axis(dim, gcd(large[dim], small[dim]))  # windows never reach over the borders of these pieces
            if axis.length:
                yield from at_places(call, dict.fromkeys(self.images, axis), first_only(call, Concat(axis)))
            if small[dim] == 1 and not self.backward:
                yield from at_places(call, {0: Axis(dim, large[dim])}, first_only(call, Reduce(self.by)))

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        place = self.window_dim(call, loop)
        if self.backward or place < 0 or isinstance(loop.roles[0], Reduce):
            return call.args, call.kwargs
        size = each(ints_at(call, 1, "output_size"), self.rank(call))
        smaller = with_entry(size, place, size[place] // sliced(loop).length * length)
        return (call.args[0], smaller, *call.args[2:]), call.kwargs


def first_only(call: Call, role: Role) -> list[Role]:
    """The role of the first result; parts do not give further ones: places count within the whole image."""
    return [role, *(None if spec is None else Lost() for spec in call.outputs[1:])]
