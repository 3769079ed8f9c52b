"""Loops: along which axes an operator may run in parts, and what becomes of each result then (ADR 9).

A loop of an operator says which axis of each input its parts read a slice of, and a role for each output: the
parts' results lie side by side (`Concat`), are partial results (`Reduce`), or are all the same (`Same`).

    mm: c[m,n] = sum_k a[m,k] b[k,n]
        m:  inputs (Axis(0, m), None)        roles (Concat(Axis(0, m)),)
        n:  inputs (None, Axis(1, n))        roles (Concat(Axis(1, n)),)
        k:  inputs (Axis(1, k), Axis(0, k))  roles (Reduce("sum"),)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Axis:
    """A factor of a dimension: dimension `dim` of a tensor seen as [outer, length, inner]. `length` is what parts
    divide. A whole dimension has `outer` 1 and the dimension's length."""

    dim: int
    length: int
    outer: int = 1


@dataclass(frozen=True, slots=True)
class Concat:
    """The parts' results side by side along an axis are the whole result."""

    axis: Axis


@dataclass(frozen=True, slots=True)
class Reduce:
    """The parts' results are partial: `by` "sum", "max" or "min" of them is the whole result; by "average", their
    mean weighted with the parts' lengths."""

    by: str = "sum"


@dataclass(frozen=True, slots=True)
class Same:
    """Every part's result is the whole result."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The parts do not give this result: a region in which, or behind which, anybody reads it is refused."""


Role: TypeAlias = "Concat | Reduce | Same | Lost | None"
"""None: the result is no tensor."""


@dataclass(frozen=True, slots=True)
class Window:
    """Positions of an axis that an output position j reads through a sliding window: of the input,
    j * stride - padding + dilation * (0 .. kernel-1); if `transposed`, those i for which j is one of
    i * stride - padding + dilation * (0 .. kernel-1). Positions outside the input read nothing (or a constant)."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    transposed: bool = False

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """First input position read by output positions [start, stop), and one past the last; both may lie outside
        the input."""
        reach = self.dilation * (self.kernel - 1)
        if not self.transposed:
            return start * self.stride - self.padding, (stop - 1) * self.stride - self.padding + reach + 1
        first, last = start + self.padding, stop - 1 + self.padding
        return min(-(-(first - reach) // self.stride), first // self.stride), last // self.stride + 1


@dataclass(frozen=True, slots=True)
class Loop:
    """One way to run an operator call in parts. `inputs` has, for each of the call's inputs, the axis along which
    each part reads its slice, or None for an input that all parts share whole.

    `uniform`: the operator treats all positions of the axis alike, whatever their order, so that any factor of it may
    be split; otherwise only its leading (outermost) factor, whose parts are contiguous. `once` is the number of an
    input that only one part may add (a bias): see `OpRule.without_bias`. `window`: the inputs' axis is read through a
    sliding window, so that parts overlap (a halo); its length may differ from the output's.
    """

    inputs: tuple[Axis | None, ...]
    roles: tuple[Role, ...]
    uniform: bool = True
    once: int | None = None
    window: Window | None = None

    @property
    def length(self) -> int:
        """How many positions there are to divide (of a window loop: of the output)."""
        for role in self.roles:
            if isinstance(role, Concat):
                return role.axis.length
        return next(axis.length for axis in self.inputs if axis is not None)

    @property
    def concatenates(self) -> bool:
        """Whether any result is put together side by side."""
        return any(isinstance(role, Concat) for role in self.roles)

    def refined(self, outer: int, length: int) -> Loop:
        """The loop over a factor of its axis: the axis is seen as [outer, length, rest]."""
        if outer == 1 and length == self.length:
            return self

        def factor(axis: Axis) -> Axis:
            return replace(axis, outer=axis.outer * outer, length=length)

        return replace(
            self,
            inputs=tuple(axis and factor(axis) for axis in self.inputs),
            roles=tuple(Concat(factor(r.axis)) if isinstance(r, Concat) else r for r in self.roles),
        )


def part_shape(shape: tuple[int, ...], axis: Axis, length: int) -> tuple[int, ...]:
    """The shape of a part that has `length` of the axis's positions."""
    dims = list(shape)
    dims[axis.dim] = dims[axis.dim] // axis.length * length
    return tuple(dims)


def shrunk(axis: Axis, by: Axis, length: int) -> Axis:
    """The axis in a part of a tensor that has `length` positions of the axis `by`. Raises ValueError when they
    overlap but for being the same."""
    if axis.dim != by.dim:
        return axis
    if (axis.outer, axis.length) == (by.outer, by.length):
        return replace(axis, length=length)
    if axis.outer >= by.outer * by.length and axis.outer % (by.outer * by.length) == 0:
        return replace(axis, outer=axis.outer // by.length * length)
    if by.outer >= axis.outer * axis.length and by.outer % (axis.outer * axis.length) == 0:
        return axis
    raise ValueError(f"{axis} and {by} are factors of different views of dimension {axis.dim}")


def elementwise(shapes: Iterable[tuple[int, ...]], results: Iterable[tuple[int, ...] | None]) -> Iterator[Loop]:
    """The loops of an operator that works element by element on broadcast inputs: every dimension of the results
    (which all have one shape; None for a result that is no tensor) that is longer than 1."""
    inputs, outputs = tuple(shapes), tuple(results)
    whole = next(shape for shape in outputs if shape is not None)
    for dim, length in enumerate(whole):
        if length <= 1:
            continue
        yield Loop(
            tuple(aligned(shape, len(whole), dim, length) for shape in inputs),
            tuple(None if shape is None else Concat(Axis(dim, length)) for shape in outputs),
        )


def aligned(shape: tuple[int, ...], rank: int, dim: int, length: int) -> Axis | None:
    """The dimension of a broadcast input that stands under dimension `dim` of a result of that rank; None when the
    input has no such dimension or it is broadcast."""
    place = dim - (rank - len(shape))
    return Axis(place, length) if place >= 0 and shape[place] == length else None


def whole_dims(shape: tuple[int, ...], dims: Iterable[int]) -> Iterator[Axis]:
    """Those dimensions of a shape that have more than one position."""
    for dim in dims:
        if shape[dim] > 1:
            yield Axis(dim, shape[dim])


def along(count: int, axes: Mapping[int, Axis], roles: Iterable[Role], **more: object) -> Loop:
    """A loop of a call with `count` inputs, from the axes of those inputs that are sliced."""
    return Loop(tuple(axes.get(index) for index in range(count)), tuple(roles), **more)  # type: ignore[arg-type]


def inner(shape: tuple[int, ...], axis: Axis) -> int:
    """Elements of the axis's dimension for each of its positions."""
    return shape[axis.dim] // (axis.outer * axis.length)


def viewed(shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    """The shape with the axis as a dimension of its own (number `axis.dim + 1`)."""
    dims = (axis.outer, axis.length, inner(shape, axis))
    assert prod(dims) == shape[axis.dim], f"{axis} is no factor of shape {shape}"
    return (*shape[: axis.dim], *dims, *shape[axis.dim + 1 :])
