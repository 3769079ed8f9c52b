"""Loops of operators that slide windows over an image: samples, channels, and positions.

Where windows do not overlap, a dimension is [windows, positions of one] and its first factor may be split. Where they
do, or reach over the border, parts overlap by a halo: `Window` says what a part reads, `piece_of_windows` how it is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from magis.ir.args import Args, Kwargs
from magis.ir.graph import Call
from magis.ops.loop import Axis, Concat, Loop, Lost, Role, Window
from magis.ops.rule import WindowPart
from magis.ops.slots import at_places


def each(values: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """One value for each dimension of a window."""
    return values * rank if len(values) == 1 else values


def over_images(call: Call, places: Sequence[int], dims: Sequence[int], shape: tuple[int, ...]) -> Iterator[Loop]:
    """Along dimensions that tensors at `places` and all results have alike."""
    for dim in dims:
        axis = Axis(dim, shape[dim])
        roles: list[Role] = [None if spec is None else Concat(axis) for spec in call.outputs]
        yield from at_places(call, dict.fromkeys(places, axis), roles)


def patches(before: int, after: int, window: Window) -> bool:
    """Whether windows cover a dimension of length `before` without overlap, border or rest."""
    small, large = (before, after) if window.transposed else (after, before)
    plain = window.kernel == window.stride and not window.padding and (window.dilation == 1 or window.kernel == 1)
    return plain and small * window.kernel == large


def reaches(before: int, after: int, window: Window) -> bool:
    """Whether every window touches the image, so that parts can be cut out of it."""
    reach = window.dilation * (window.kernel - 1)
    if not window.transposed:
        return window.padding <= reach
    gap = after - ((before - 1) * window.stride - 2 * window.padding + reach + 1)
    return reach + 1 >= window.stride and gap <= window.padding


def sliding(call: Call, dim: int, after: int, window: Window, rest: Role = None) -> Iterator[Loop]:
    """The loop with a halo along one dimension of the image, which is the first argument; `rest` is the role of further
    results."""
    before = call.inputs[0].shape[dim]
    if after > 1 and before > 1 and reaches(before, after, window):
        inputs = (Axis(dim, before), *(None for _ in call.inputs[1:]))
        roles: list[Role] = [Concat(Axis(dim, after))]
        roles += [None if spec is None else rest or Lost() for spec in call.outputs[1:]]
        yield Loop(inputs, tuple(roles), uniform=False, window=window)


def window_part(loop: Loop, rows: range, args: Args, kwargs: Kwargs, fill: float = 0.0) -> WindowPart:
    """How to compute some positions: `args` are those of a call without padding along the dimension."""
    window, axis = loop.window, loop.inputs[0]
    assert window is not None and axis is not None
    start, stop = window.reads(rows.start, rows.stop)
    inside = range(max(start, 0), min(stop, axis.length))
    skip = rows.start + window.padding - start * window.stride if window.transposed else 0
    return WindowPart(inside, (inside.start - start, stop - inside.stop), fill, args, kwargs, skip, len(rows))


def with_entry(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    """The values with another one at a place."""
    return (*values[:place], value, *values[place + 1 :])
