"""Indexing with tensors: where the dimensions of what is indexed, and of the indices, are in the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from magis.ir.args import Arg, Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call, TensorSpec
from magis.ops.arguments import broadcast
from magis.ops.layout import joint
from magis.ops.loop import Axis, Concat, Loop, aligned, whole_dims
from magis.ops.rule import argument

MASKS = (DType.BOOL, DType.U8)
UNKNOWN = -1
"""How many elements a mask takes."""


@dataclass(frozen=True, slots=True)
class Indexing:
    """`x[indices]`, where each of the indices is a tensor or None; a mask indexes as many dimensions as it has.
    The result has the dimensions of x that no tensor indexes, and, where the first indexed dimension was, those of the
    broadcast indices; these come first when the indexed dimensions are not next to each other.

    `shape` is the result's; `indices` are the numbers and shapes of the index tensors; `places` are those dimensions
    of the result that are dimensions of x, and their numbers there; the dimensions of the indices begin at `first`."""

    source: int
    shape: tuple[int, ...]
    indices: tuple[tuple[int, tuple[int, ...]], ...]
    places: dict[int, int]
    first: int

    @classmethod
    def of(cls, call: Call, position: int) -> Indexing | None:
        """The indexing of the first argument with the list at a position; None where there is none."""
        source, items = argument(call, 0, "self"), argument(call, position, "indices")
        if not isinstance(source, Slot) or not isinstance(items, tuple):
            return None
        shape, numbers = call.inputs[source.index].shape, [item.index for item in items if isinstance(item, Slot)]
        dims, specs = list(_indexed(call, items)), [call.inputs[number] for number in numbers]
        if not dims or any(spec.dtype in MASKS and not spec.shape for spec in specs):
            return None
        together = _together(specs)
        adjacent = dims[-1] - dims[0] == len(dims) - 1
        before = list(range(dims[0])) if adjacent else []
        after = [dim for dim in range(len(shape)) if dim not in dims and dim not in before]
        result = (*(shape[dim] for dim in before), *together, *(shape[dim] for dim in after))
        places = dict(enumerate(before)) | dict(enumerate(after, len(before) + len(together)))
        indices = tuple((number, call.inputs[number].shape) for number in numbers)
        return cls(source.index, result, indices, places, len(before))

    def axes(self) -> Iterator[Axis]:
        """The dimensions of the result that can be divided: not those that masks make."""
        return whole_dims(self.shape, range(len(self.shape)))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the result may have that shape."""
        return len(shape) == len(self.shape) and all(a in (UNKNOWN, b) for a, b in zip(self.shape, shape))

    def reads(self, axis: Axis) -> Iterator[tuple[int, Axis | None]]:
        """What is read of x and the indices for a whole dimension of the result."""
        place, rank = self.places.get(axis.dim), len(self.shape) - len(self.places)
        yield self.source, None if place is None else Axis(place, axis.length)
        for number, shape in self.indices:
            yield number, aligned(shape, rank, axis.dim - self.first, axis.length) if place is None else None


def _indexed(call: Call, items: tuple[Arg, ...]) -> Iterator[int]:
    """The dimensions that tensors index."""
    dim = 0
    for item in items:
        spec = call.inputs[item.index] if isinstance(item, Slot) else None
        count = len(spec.shape) if spec is not None and spec.dtype in MASKS else 1
        if spec is not None:
            yield from range(dim, dim + count)
        dim += count


def _together(specs: list[TensorSpec]) -> tuple[int, ...]:
    """The shape of the indices together; a mask is a list of places."""
    if not any(spec.dtype in MASKS for spec in specs):
        return broadcast(*(spec.shape for spec in specs))
    return (UNKNOWN,) * max(1 if spec.dtype in MASKS else len(spec.shape) for spec in specs)


def beside_indices(call: Call, position: int, *more: int | None) -> Iterator[Loop]:
    """The loops of an operator that writes to `x[indices]`, along the dimensions of x that are not indexed; `more` are
    the numbers of inputs that broadcast to the elements written. Where the only index is a mask, and what is written
    does not depend on the place, its dimensions are divided too."""
    found = Indexing.of(call, position)
    if found is None:
        return
    shapes = {number: call.inputs[number].shape for number in more if number is not None}
    rank = len(found.shape)
    for axis in found.axes():
        if axis.dim in found.places:
            reads = [(number, aligned(shape, rank, axis.dim, axis.length)) for number, shape in shapes.items()]
            yield from joint(call, [*found.reads(axis), *reads], Concat(Axis(found.places[axis.dim], axis.length)))
    if len(found.indices) > 1 or UNKNOWN not in found.shape:
        return
    if any(len(shape) >= rank - found.first and shape[found.first - rank] != 1 for shape in shapes.values()):
        return
    (mask, masked), shared = found.indices[0], [(number, None) for number in shapes]
    for axis in whole_dims(masked, range(len(masked))):
        whole = Axis(axis.dim + found.first, axis.length)
        yield from joint(call, [(found.source, whole), (mask, axis), *shared], Concat(whole))
