"""Axes by argument: which of a call's inputs a loop slices, said by where they stand in the call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from magis.ir.args import Arg, Slot
from magis.ir.graph import Call
from magis.ops.loop import Axis, Loop, Role

Places: TypeAlias = "Mapping[Any, Axis | None]"
"""Axes of the tensors at arguments, by position or keyword; tensors at others are shared whole."""


def at_places(call: Call, axes: Places, roles: Sequence[Role]) -> Iterator[Loop]:
    """The loop that slices the tensors at these arguments; none when it would slice one tensor in two ways, or not at
    all along an axis longer than 1."""
    found: dict[int, Axis | None] = {}
    arguments: list[tuple[int | str, Arg]] = [*enumerate(call.args), *call.kwargs]
    for place, value in arguments:
        for index in _slots(value):
            axis = axes.get(place)
            if found.setdefault(index, axis) != axis:
                return
    inputs = tuple(found.get(index) for index in range(len(call.inputs)))
    lengths = {axis.length for axis in inputs if axis is not None}
    if len(lengths) == 1 and min(lengths) > 1:
        yield Loop(inputs, tuple(roles))


def _slots(value: Arg) -> Iterator[int]:
    if isinstance(value, Slot):
        yield value.index
    elif isinstance(value, tuple):
        for item in value:
            yield from _slots(item)
