"""Where the elements of a tensor lie in the results of operators that move, divide, join or pick them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import gcd, lcm, prod

from magis.ir.args import Arg, Args, Kwargs, Slot
from magis.ir.graph import Call
from magis.ops.arguments import int_at, output_at
from magis.ops.loop import Axis, Concat, Loop, Role, along, part_shape
from magis.ops.rule import argument

Pair = tuple[Axis, Axis]
"""An axis of one tensor, and where it lies in another."""


def moved(call: Call, places: Iterable[Pair]) -> Iterator[Loop]:
    """The loops of an operator that moves the elements of its only input: for each pair, the input's axis is the
    other axis in every result."""
    for source, target in places:
        yield along(len(call.inputs), {0: source}, (Concat(target) for _ in call.outputs))


def kept(shape: Sequence[int], places: Iterable[tuple[int, int]]) -> Iterator[Pair]:
    """Whole dimensions of a shape, longer than 1, and the number that each has elsewhere."""
    for dim, place in places:
        if shape[dim] > 1:
            yield Axis(dim, shape[dim]), Axis(place, shape[dim])


def turned(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """The same seen from the other tensor."""
    return ((target, source) for source, target in pairs)


def without(rank: int, *dims: int) -> Iterator[tuple[int, int]]:
    """The dimensions of a tensor other than these (which may be counted from the end), and their numbers in a tensor
    that lacks these."""
    taken = {dim % rank for dim in dims} if rank else set()
    rest = [dim for dim in range(rank) if dim not in taken]
    return ((dim, place) for place, dim in enumerate(rest))


def beside(rank: int, *dims: int) -> Iterator[tuple[int, int]]:
    """The dimensions of a tensor other than these, under the same number in another tensor."""
    return ((dim, dim) for dim, _ in without(rank, *dims))


def atoms(source: Sequence[int], target: Sequence[int]) -> Iterator[Pair]:
    """The common refinement of two shapes of the same elements in row-major order: every factor of a dimension of one
    that is a factor of a dimension of the other.

    A dimension of length n after dimensions of product a spans the products a to a*n. Where the spans [a, b] and
    [c, d] of two dimensions overlap in whole factors, their atom goes from lcm(a, c) to gcd(b, d)."""
    if prod(source) == 0:
        return
    for dim, (a, b) in enumerate(_spans(source)):
        for place, (c, d) in enumerate(_spans(target)):
            start, stop = lcm(a, c), gcd(b, d)
            if start < stop and stop % start == 0:
                length = stop // start
                yield Axis(dim, length, start // a), Axis(place, length, start // c)


def _spans(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 1
    for length in shape:
        yield start, start * length
        start *= length


def pieces(dim: int, lengths: Sequence[int]) -> tuple[Axis, ...] | None:
    """For a dimension that consists of pieces of these lengths: the axis of the whole dimension, then that of every
    piece, that runs through all of them at once. None when a piece is empty, or when the shortest does not measure
    the others (finer factors would cut the dimension up for little)."""
    unit = min(lengths, default=0)
    if unit <= 1 or any(length % unit for length in lengths):
        return None
    return tuple(Axis(dim, unit, length // unit) for length in (sum(lengths), *lengths))


def slice_range(call: Call, length: int, first: int) -> range:
    """The positions that a slice takes of a dimension of that length: arguments `start, end, step` from position
    `first` on."""
    start, end = argument(call, first, "start"), argument(call, first + 1, "end")
    step = int_at(call, first + 2, "step", 1)
    return range(length)[start:end:step]  # type: ignore[index]


def slice_pairs(length: int, dim: int, taken: range) -> Iterator[Pair]:
    """The axes of a dimension of which a slice is taken, and where they lie in the slice: of every group of `step`
    positions one is taken, to the end; or a piece that measures the rest, or is measured by it."""
    step = taken.step
    if strided(length, taken):
        if len(taken) > 1:
            yield Axis(dim, len(taken)), Axis(dim, len(taken))
        return
    if step != 1 or not taken:
        return
    bounds = [0, taken.start, taken.stop, length]
    found = pieces(dim, [b - a for a, b in pairwise(bounds) if b > a])
    if found is not None:
        unit = found[0].length
        yield found[0], Axis(dim, unit, len(taken) // unit)


def strided(length: int, taken: range) -> bool:
    """Whether one position is taken of every group of `step`, all alike."""
    return length % taken.step == 0 and taken.start < taken.step and len(taken) * taken.step == length


def slice_part(taken: range, length: int, axis: Axis, part: int) -> tuple[int, int, int]:
    """`start, end, step` in a part with `part` positions of an axis of the dimension that a slice is taken of."""
    if strided(length, taken):
        return taken.start, sys.maxsize, taken.step
    return resized(taken.start, axis, part), resized(taken.stop, axis, part), 1


def window_pairs(length: int, dim: int, windowed: Sequence[int], step: int) -> Iterator[Pair]:
    """The axes of a dimension of that length that lie in its windows, which are dimension `dim` of a tensor that has
    their positions in its last dimension. Where windows do not overlap and the dimension ends with a whole step,
    windows are a factor of it; positions are another if windows leave nothing out."""
    count, size = windowed[dim], windowed[-1]
    if size <= step and count * step == length:
        if count > 1:
            yield Axis(dim, count), Axis(dim, count)
        if size == step > 1:
            yield Axis(dim, size, count), Axis(len(windowed) - 1, size)


def resized(arg: int, axis: Axis, length: int) -> int:
    """A size or place counted in elements of a dimension, in a part with `length` positions of the axis."""
    return arg * length // axis.length


def with_argument(args: Args, kwargs: Kwargs, position: int, name: str, value: Arg) -> tuple[Args, Kwargs]:
    """The arguments with another value at a position, or under a name where it is not given by position."""
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, (*((k, v) for k, v in kwargs if k != name), (name, value))


def slot(call: Call, position: int, name: str) -> int | None:
    """The number of the input that stands at an argument; None when it is absent."""
    value = argument(call, position, name)
    return value.index if isinstance(value, Slot) else None


def joint(call: Call, reads: Iterable[tuple[int | None, Axis | None]], *roles: Role) -> Iterator[Loop]:
    """The loop in which all inputs are read along these axes (None: whole); none when one tensor, given twice, would
    have to be read in two ways, or when nothing is said of an input."""
    axes: dict[int, Axis | None] = {}
    for number, axis in reads:
        if number is not None and axes.setdefault(number, axis) != axis:
            return
    if len(axes) == len(call.inputs):
        yield Loop(tuple(axes[index] for index in range(len(call.inputs))), roles)


def concat_axis(loop: Loop, output: int = 0) -> Axis:
    """Where a result of a loop's parts is put together."""
    role = loop.roles[output]
    assert isinstance(role, Concat), f"result {output} is not put together"
    return role.axis


def result_part(call: Call, loop: Loop, length: int, output: int = 0) -> tuple[int, ...]:
    """The shape of a result in a part with `length` of the loop's positions."""
    spec = call.outputs[output]
    assert spec is not None, f"result {output} of {call.op} is no tensor"
    role = loop.roles[output]
    return part_shape(spec.shape, role.axis, length) if isinstance(role, Concat) else spec.shape


def piece_pairs(call: Call, position: int) -> Iterator[Pair]:
    """The axes of the result that a slice, a selection or a diagonal of it has too, and where they are there:
    arguments `dim, index`, `dim, start, end, step` or `offset, dim1, dim2` from a position on."""
    shape, name = output_at(call, 0).shape, call.op.split(".")[1]
    dim = int_at(call, position, "dim")
    if name.startswith("slice"):
        yield from kept(shape, beside(len(shape), dim))
        dim %= len(shape)
        yield from slice_pairs(shape[dim], dim, slice_range(call, shape[dim], position + 1))
    elif name.startswith("select"):
        yield from kept(shape, without(len(shape), dim))
    else:
        dims = int_at(call, position + 1, "dim1"), int_at(call, position + 2, "dim2", 1)
        yield from kept(shape, without(len(shape), *dims))


def sliced_args(call: Call, position: int, args: Args, loop: Loop, length: int) -> Args:
    """The arguments of a part, where those from a position on are a slice's of a dimension that is divided."""
    shape, axis = output_at(call, 0).shape, concat_axis(loop)
    dim = int_at(call, position, "dim") % len(shape)
    if not call.op.startswith("aten.slice") or dim != axis.dim:
        return args
    taken = slice_range(call, shape[dim], position + 1)
    return (*args[:position], dim, *slice_part(taken, shape[dim], axis, length))
