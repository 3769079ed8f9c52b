"""Resizing images: each result is a weighted sum of a few elements, along each dimension apart.

So the squares of the terms are the same sums with squared weights: a matrix for each dimension, read off
the operator itself by resizing the unit vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, gcd, prod
from struct import pack, unpack
from typing import Any

from magis.ir.args import Arg, Args, Kwargs
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import input_at, ints_at, overloads
from magis.ops.loop import Axis, Concat, Loop, Window, part_shape
from magis.ops.rule import OpRule, Sample, T, WindowPart, square
from magis.ops.slots import at_places
from magis.ops.windows import empty, over_images, reads_within, sliced, sliding, with_entry

TAPS = {"nearest": 1, "linear": 2, "cubic": 4}
MARGINS = {"nearest": 0, "linear": 1, "cubic": 2}
LINE, IMAGE, VOLUME = T((2, 3, 4)), T((2, 3, 4, 3)), T((1, 2, 3, 2, 2))


def _rank(op: str) -> int:
    return next(rank for rank in (1, 2, 3) if f"{rank}d" in op)


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _rounds_well(before: int, after: int, ratio: float, middle: bool) -> bool:
    """Whether the nearest element of every result, found in float32 or float64, is what it is in whole numbers.
    `middle`: it is looked for under a result's middle."""
    if _power_of_two(after // gcd(before, after)):
        return True
    single = _single(ratio)
    for j in range(after):
        at = j + 0.5 * middle
        nearest = (2 * j + middle) * before // (2 * after)
        if int(at * ratio) != nearest or int(_single(at * single)) != nearest:
            return False
    return True


def _single(number: float) -> float:
    """Rounded to float32."""
    rounded: float = unpack("f", pack("f", number))[0]
    return rounded


class Upsample(OpRule):
    """`(x, size, [align corners], scales...)`."""

    ops = overloads("""
        _upsample_bicubic2d_aa.default _upsample_bilinear2d_aa.default _upsample_nearest_exact1d.default
        _upsample_nearest_exact2d.default _upsample_nearest_exact3d.default upsample_bicubic2d.default
        upsample_bilinear2d.default upsample_linear1d.default upsample_nearest1d.default
        upsample_nearest2d.default upsample_nearest3d.default upsample_trilinear3d.default
    """)
    backward = False

    def loops(self, call: Call) -> Iterable[Loop]:
        if call.kwargs or empty(call) or ("_aa" in call.op and 1 in self.sizes(call)[1]):
            return  # kernels mistake the layout of an image 1 wide: what they give would depend on the parts' strides
        shape = input_at(call, 0, "self").shape
        yield from over_images(call, (0,), (0, 1), shape)
        for place, (before, after) in enumerate(zip(*self.sizes(call))):
            ratio = self._ratio(call, place, before, after)
            if ratio is None:
                continue
            axis = Axis(place + 2, gcd(before, after))
            if self._apart(call, before, after, ratio):
                yield from at_places(call, {0: axis}, [Concat(axis)])
            if not self.backward:
                yield from self._with_halo(call, place + 2, before, after, ratio)

    def _ratio(self, call: Call, place: int, before: int, after: int) -> float | None:
        """The step between results along a dimension, in elements; None when it is not that of the lengths."""
        if not before or not after or self._corners(call) or "_aa" in call.op:
            return None
        first = 2 + self.backward + ("nearest" not in call.op)
        given = call.args[first + place] if first + place < len(call.args) else None
        if given is None:
            return before / after
        return 1 / given if isinstance(given, (int, float)) and given == after / before else None

    def _corners(self, call: Call) -> bool:
        """Whether the outermost elements stay the outermost ones."""
        return "nearest" not in call.op and bool(call.args[2 + self.backward])

    def _apart(self, call: Call, before: int, after: int, ratio: float) -> bool:
        """Whether the smallest pieces whose lengths are in the ratio of the whole ones are resized alone as in it."""
        common = gcd(before, after)
        if "nearest" not in call.op:  # between elements of one piece, if results are fewer
            return "linear" in call.op and common == after
        if self.backward and common == after:  # kernels divide by the ratio
            return _power_of_two(before // after)
        return (not self.backward or common == before) and _rounds_well(before, after, ratio, "exact" in call.op)

    def _with_halo(self, call: Call, dim: int, before: int, after: int, ratio: float) -> Iterator[Loop]:
        """Each result reads the element under it, and this many before and after it."""
        margin = next(margin for kind, margin in MARGINS.items() if kind in call.op)
        if after <= before or after % before:
            return
        scale = after // before
        exact = _power_of_two(scale) if margin else _rounds_well(before, after, ratio, "exact" in call.op)
        if exact:
            yield from sliding(
                call, dim, after, Window((2 * margin + 1) * scale, scale, 1, margin * scale, transposed=True)
            )

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        axis = sliced(loop)
        size = ints_at(call, 1, "output_size")
        if axis.dim >= 2:
            size = with_entry(size, axis.dim - 2, size[axis.dim - 2] // axis.length * length)
        args: list[Arg] = [call.args[0], size, *call.args[2:]]
        role, result = loop.roles[0], call.outputs[0]
        if self.backward and isinstance(role, Concat) and result is not None:
            args[2] = part_shape(result.shape, role.axis, length)
        return tuple(args), call.kwargs

    def windowed(self, call: Call, loop: Loop, rows: range) -> WindowPart:
        window, dim = loop.window, sliced(loop).dim
        assert window is not None
        _, _, reads = reads_within(loop, rows)
        size = with_entry(ints_at(call, 1, "output_size"), dim - 2, len(reads) * window.stride)
        args = (call.args[0], size, *call.args[2:])
        return WindowPart(reads, (0, 0), 0.0, args, call.kwargs, rows.start - reads.start * window.stride, len(rows))

    def sizes(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lengths of the image before and after."""
        return input_at(call, 0, "self").shape[2:], ints_at(call, 1, "output_size")

    def taps(self, call: Call, before: int, after: int) -> int:
        """Most elements along a dimension that one result is made of."""
        taps = next(taps for kind, taps in TAPS.items() if kind in call.op)
        if "_aa" in call.op:
            taps = taps * max(ceil(before / after), 1) + 1
        return min(taps, before)

    def terms(self, call: Call, output: int) -> int:
        return prod(self.taps(call, before, after) for before, after in zip(*self.sizes(call)))

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        result = square(tensors[0])
        for place, weights in enumerate(self._weights(torch, call)):
            weights = square(weights).to(result.dtype)
            moved = result.movedim(2 + place, -1) @ (weights.mT if self.backward else weights)
            result = moved.movedim(-1, 2 + place)
        return result

    def _weights(self, torch: Any, call: Call) -> Iterable[Any]:
        """For each dimension a matrix [before, after]."""
        name, sizes = call.op.split(".")[1].replace("_backward", ""), self.sizes(call)
        run = getattr(torch.ops.aten, name).default
        rank = len(sizes[0])
        align = () if "nearest" in name else (call.args[2 + self.backward],)
        scales = call.args[2 + self.backward + len(align) :]
        for place, (before, after) in enumerate(zip(*sizes)):
            units = torch.eye(before, dtype=torch.float64)
            others = [before if dim == place else 1 for dim in range(rank)]
            twice = [before if dim == place else 2 for dim in range(rank)]  # a length of 1 misleads some kernels
            units = units.reshape(before, 1, *others).expand(before, 1, *twice).contiguous()
            size = [after if dim == place else 2 for dim in range(rank)]
            own = [scales[dim] if dim == place else None for dim in range(len(scales))]
            resized = run(units, size, *align, *own).movedim(2 + place, 1)
            yield resized.reshape(before, after, -1)[:, :, 0]

    def samples(self) -> Iterable[Sample]:
        for op in overloads("_upsample_nearest_exact1d.default upsample_nearest1d.default"):
            yield Sample(op, (LINE, (7,)))
        for op in overloads("_upsample_nearest_exact2d.default upsample_nearest2d.default"):
            yield Sample(op, (IMAGE, (8, 6), 2.0, 2.0))
        for op in overloads("_upsample_nearest_exact3d.default upsample_nearest3d.default"):
            yield Sample(op, (VOLUME, (6, 4, 3)))
        for corners in (True, False):
            yield Sample("aten.upsample_linear1d.default", (LINE, (7,), corners))
            yield Sample("aten.upsample_bilinear2d.default", (IMAGE, (8, 5), corners))
            yield Sample("aten.upsample_bicubic2d.default", (IMAGE, (8, 5), corners))
            yield Sample("aten.upsample_trilinear3d.default", (VOLUME, (6, 3, 3), corners))
        yield Sample("aten.upsample_bilinear2d.default", (T((2, 3, 4, 4), DType.BF16), (8, 8), False, 2.0, 2.0))
        yield Sample("aten.upsample_bilinear2d.default", (T((3, 2, 9, 6)), (3, 12), False))
        yield Sample("aten.upsample_bicubic2d.default", (T((3, 2, 5, 6)), (10, 24), False))
        yield Sample("aten.upsample_nearest2d.default", (T((3, 2, 6, 10)), (9, 4)))
        yield Sample("aten._upsample_bilinear2d_aa.default", (T((1, 2, 6, 4)), (3, 2), False))
        yield Sample("aten._upsample_bicubic2d_aa.default", (T((1, 2, 6, 4)), (3, 2), False))


class UpsampleBackward(Upsample):
    """`(grad, size, input size, [align corners], scales...)`: the transposed sums."""

    ops = overloads("""
        _upsample_bicubic2d_aa_backward.default _upsample_bilinear2d_aa_backward.default
        _upsample_nearest_exact1d_backward.default _upsample_nearest_exact2d_backward.default
        _upsample_nearest_exact3d_backward.default upsample_bicubic2d_backward.default
        upsample_bilinear2d_backward.default upsample_linear1d_backward.default
        upsample_nearest1d_backward.default upsample_nearest2d_backward.default
        upsample_nearest3d_backward.default upsample_trilinear3d_backward.default
    """)
    backward = True

    def sizes(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return ints_at(call, 2, "input_size")[2:], ints_at(call, 1, "output_size")

    def taps(self, call: Call, before: int, after: int) -> int:
        """Most results that use one element along a dimension; at a border all taps may meet in it."""
        taps = next(taps for kind, taps in TAPS.items() if kind in call.op)
        return min(taps * (ceil(after / before) + 1), after)

    def samples(self) -> Iterable[Sample]:
        for op in overloads("_upsample_nearest_exact1d_backward.default upsample_nearest1d_backward.default"):
            yield Sample(op, (T((2, 3, 7)), (7,), (2, 3, 4)))
        for op in overloads("_upsample_nearest_exact2d_backward.default upsample_nearest2d_backward.default"):
            yield Sample(op, (T((2, 3, 8, 6)), (8, 6), (2, 3, 4, 3), 2.0, 2.0))
        for op in overloads("_upsample_nearest_exact3d_backward.default upsample_nearest3d_backward.default"):
            yield Sample(op, (T((1, 2, 6, 4, 3)), (6, 4, 3), (1, 2, 3, 2, 2)))
        for corners in (True, False):
            image = (T((2, 3, 8, 5)), (8, 5), (2, 3, 4, 3), corners)
            yield Sample("aten.upsample_linear1d_backward.default", (T((2, 3, 7)), (7,), (2, 3, 4), corners))
            yield Sample("aten.upsample_bilinear2d_backward.default", image)
            yield Sample("aten.upsample_bicubic2d_backward.default", image)
            volume = (T((1, 2, 6, 3, 3)), (6, 3, 3), (1, 2, 3, 2, 2), corners)
            yield Sample("aten.upsample_trilinear3d_backward.default", volume)
        smaller = (T((3, 2, 4, 3)), (4, 3), (3, 2, 12, 6), False)
        yield Sample("aten.upsample_bilinear2d_backward.default", smaller)
        smaller = (T((1, 2, 3, 2)), (3, 2), (1, 2, 6, 4), False)
        yield Sample("aten._upsample_bilinear2d_aa_backward.default", smaller)
        yield Sample("aten._upsample_bicubic2d_aa_backward.default", smaller)
