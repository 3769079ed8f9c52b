"""Along which axes convolutions and their gradients may run in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from magis.ir.args import Args, Kwargs, Slot
from magis.ir.graph import Call
from magis.ops.arguments import flag_at, input_at, int_at, ints_at, output_at
from magis.ops.loop import Axis, Concat, Loop, Lost, Reduce, Role, Same, Window
from magis.ops.rule import WindowPart
from magis.ops.slots import Places, at_places
from magis.ops.windows import each, empty, patches, sliced, sliding, window_part, with_entry


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of a convolution from its strides on, which stand at `first`."""

    first: int
    rank: int
    transposed: bool
    groups: int
    windows: tuple[Window, ...]

    @classmethod
    def of(cls, call: Call, first: int, weight: tuple[int, ...]) -> Options:
        """Read from a call."""
        rank = len(weight) - 2
        strides, padding, dilation = (each(ints_at(call, first + i, ""), rank) for i in range(3))
        transposed = flag_at(call, first + 3, "transposed")
        windows = tuple(
            Window(taps, stride, spread, pad, transposed)
            for taps, stride, pad, spread in zip(weight[2:], strides, padding, dilation)
        )
        return cls(first, rank, transposed, int_at(call, first + 5, "groups", 1), windows)


def forward_loops(call: Call) -> Iterator[Loop]:
    """Samples, channels of the result, channels of the image, groups, positions; of `(x, weight, bias, ...)`."""
    x, weight, y = input_at(call, 0, "input").shape, input_at(call, 1, "weight").shape, output_at(call, 0).shape
    options = Options.of(call, 3, weight)
    if len(x) != options.rank + 2 or empty(call):
        return
    made, read = (1, 0) if options.transposed else (0, 1)  # the weight's dimensions
    yield from at_places(call, {0: Axis(0, x[0])}, [Concat(Axis(0, x[0]))])
    if options.groups == 1:
        bias = Axis(0, y[1])
        yield from at_places(call, {1: Axis(made, y[1]), 2: bias}, [Concat(Axis(1, y[1]))])
        for loop in at_places(call, {0: Axis(1, x[1]), 1: Axis(read, x[1])}, [Reduce()]):
            value = call.args[2]
            yield replace(loop, once=value.index) if isinstance(value, Slot) else loop
    else:
        group = Axis(0, options.groups)
        yield from at_places(call, {0: Axis(1, options.groups), 1: group, 2: group}, [Concat(Axis(1, options.groups))])
    for place, window in enumerate(options.windows):
        dim = place + 2
        if patches(x[dim], y[dim], window):
            axis = Axis(dim, min(x[dim], y[dim]))
            yield from at_places(call, {0: axis}, [Concat(axis)])
        yield from sliding(call, dim, y[dim], window)


def forward_part(call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
    """Along groups, there are fewer of them."""
    groups = int_at(call, 8, "groups", 1)
    return _fewer_groups(call, loop, length, 8) if groups > 1 else (call.args, call.kwargs)


def _fewer_groups(call: Call, loop: Loop, length: int, place: int) -> tuple[Args, Kwargs]:
    weight = call.args[1 if place == 8 else 2]
    axis = loop.inputs[weight.index] if isinstance(weight, Slot) else None
    if axis is None:
        return call.args, call.kwargs
    groups = int_at(call, place, "groups", 1) // axis.length * length
    return (*call.args[:place], groups, *call.args[place + 1 :]), call.kwargs


def without_bias(call: Call) -> tuple[Call, tuple[int, ...]]:
    """The convolution without its bias, and the shape in which it meets the result."""
    bias = call.args[2]
    assert isinstance(bias, Slot)
    length = call.inputs[bias.index].shape[0]
    inputs = tuple(spec for index, spec in enumerate(call.inputs) if index != bias.index)
    args = tuple(
        Slot(value.index - (value.index > bias.index)) if isinstance(value, Slot) else value
        for value in (*call.args[:2], None, *call.args[3:])
    )
    rank = len(output_at(call, 0).shape)
    return replace(call, inputs=inputs, args=args), (1, length, *(1 for _ in range(rank - 2)))


def windowed(call: Call, loop: Loop, rows: range) -> WindowPart:
    """Some positions of a convolution: without padding, and for a transposed one without additional rows."""
    weight = input_at(call, 1, "weight").shape
    rank = len(weight) - 2
    place = sliced(loop).dim - 2
    args = list(call.args)
    for at in (4, 7):  # padding, output padding
        args[at] = with_entry(each(ints_at(call, at, ""), rank), place, 0)
    return window_part(loop, rows, tuple(args), call.kwargs)


def backward_loops(call: Call) -> Iterator[Loop]:
    """The same axes for the gradients of `(grad, x, weight, ...)`; results are those of x, weight and bias."""
    y, x, weight = (input_at(call, place, "").shape for place in range(3))
    options = Options.of(call, 4, weight)
    if len(x) != options.rank + 2 or empty(call):
        return
    made, read = (1, 0) if options.transposed else (0, 1)
    samples = Axis(0, x[0])
    yield from _asked(call, {0: samples, 1: samples}, (Concat(samples), Reduce(), Reduce()))
    if options.groups == 1:
        out, into = Axis(1, y[1]), Axis(1, x[1])
        roles: tuple[Role, ...] = (Reduce(), Concat(Axis(made, y[1])), Concat(Axis(0, y[1])))
        yield from _asked(call, {0: out, 2: Axis(made, y[1])}, roles)
        roles = (Concat(into), Concat(Axis(read, x[1])), Same())
        yield from _asked(call, {1: into, 2: Axis(read, x[1])}, roles)
    else:
        inner, outer = Axis(1, options.groups), Axis(0, options.groups)
        yield from _asked(call, {0: inner, 1: inner, 2: outer}, (Concat(inner), Concat(outer), Concat(outer)))
    for place, window in enumerate(options.windows):
        dim = place + 2
        if patches(x[dim], y[dim], window):
            axis = Axis(dim, min(x[dim], y[dim]))
            yield from _asked(call, {0: axis, 1: axis}, (Concat(axis), Reduce(), Reduce()))


def _asked(call: Call, axes: Places, roles: Iterable[Role]) -> Iterator[Loop]:
    """A loop with the roles of the gradients that are asked for, if parts differ in any of them."""
    mask = call.args[10]
    assert isinstance(mask, tuple)
    given = [role if asked else Lost() for asked, role in zip(mask, roles)]  # some kernels make more than is asked for
    wanted = [None if spec is None else role for spec, role in zip(call.outputs, given)]
    if any(isinstance(role, (Concat, Reduce)) for role in wanted):
        yield from at_places(call, axes, wanted)


def backward_part(call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
    """Along channels of the result or groups, the bias is shorter; along groups, there are fewer of them."""
    groups = int_at(call, 9, "groups", 1)
    args, kwargs = _fewer_groups(call, loop, length, 9) if groups > 1 else (call.args, call.kwargs)
    grad, sizes = call.args[0], ints_at(call, 3, "bias_sizes")
    axis = loop.inputs[grad.index] if isinstance(grad, Slot) else None
    if axis is not None and axis.dim == 1 and sizes:
        args = (*args[:3], (sizes[0] // axis.length * length,), *args[4:])
    return args, kwargs
