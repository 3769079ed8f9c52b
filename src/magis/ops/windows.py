"""Loops of operators that slide windows over an image: samples, channels, and positions.

Where windows do not overlap, a dimension is [windows, positions of one] and its first factor may be split. Where they
do, or reach over the border, parts overlap by a halo: `Window` says what a part reads, `window_part` how it is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from magis.ir.args import Args, Kwargs, Slot
from magis.ir.graph import Call
from magis.ops.loop import Axis, Concat, Loop, Lost, Role, Window
from magis.ops.rule import WindowPart
from magis.ops.slots import at_places


def each(values: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """One value for each dimension of a window."""
    return values * rank if len(values) == 1 else values


def empty(call: Call) -> bool:
    """Whether there is nothing to divide."""
    return not all(spec.numel for spec in call.inputs)


def over_images(call: Call, places: Sequence[int], dims: Sequence[int], shape: tuple[int, ...]) -> Iterator[Loop]:
    """Along dimensions that tensors at `places` and all results have alike."""
    for dim in () if empty(call) else dims:
        axis = Axis(dim, shape[dim])
        roles: list[Role] = [None if spec is None else Concat(axis) for spec in call.outputs]
        yield from at_places(call, dict.fromkeys(places, axis), roles)


def patches(before: int, after: int, window: Window) -> bool:
    """Whether windows cut a dimension of length `before` into pieces of one stride, each of which holds its window."""
    small, large = (before, after) if window.transposed else (after, before)
    reach = window.dilation * (window.kernel - 1)
    return reach < window.stride and not window.padding and small * window.stride == large


def reaches(before: int, after: int, window: Window) -> bool:
    """Whether every window touches the image, so that parts can be cut out of it."""
    reach = window.dilation * (window.kernel - 1)
    if not window.transposed:
        return window.padding <= reach
    more = after - ((before - 1) * window.stride - 2 * window.padding + reach + 1)  # rows added after the last window
    return reach + 1 >= window.stride and more <= window.padding


def sliding(call: Call, dim: int, after: int, window: Window) -> Iterator[Loop]:
    """The loop with a halo along one dimension of the image, which is the first argument. Only the first result is
    made in parts."""
    image = call.args[0]
    before = call.inputs[image.index].shape[dim] if isinstance(image, Slot) else 0
    if after > 1 and before > 1 and reaches(before, after, window):
        roles: list[Role] = [Concat(Axis(dim, after))]
        roles += [None if spec is None else Lost() for spec in call.outputs[1:]]
        for loop in at_places(call, {0: Axis(dim, before)}, roles):
            yield replace(loop, uniform=False, window=window)


def sliced(loop: Loop) -> Axis:
    """The axis of the first input that is sliced."""
    return next(axis for axis in loop.inputs if axis is not None)


def reads_within(loop: Loop, rows: range) -> tuple[int, int, range]:
    """First position that a loop's window reads, one past the last, and those of them that lie in the image."""
    assert loop.window is not None
    start, stop = loop.window.reads(rows.start, rows.stop)
    return start, stop, range(max(start, 0), min(stop, sliced(loop).length))


def window_part(loop: Loop, rows: range, args: Args, kwargs: Kwargs, fill: float = 0.0) -> WindowPart:
    """How to compute some positions: `args` are those of a call without padding along the dimension."""
    start, stop, inside = reads_within(loop, rows)
    window = loop.window
    assert window is not None
    skip = rows.start + window.padding - start * window.stride if window.transposed else 0
    return WindowPart(inside, (inside.start - start, stop - inside.stop), fill, args, kwargs, skip, len(rows))


def with_entry(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    """The values with another one at a place."""
    return (*values[:place], value, *values[place + 1 :])
