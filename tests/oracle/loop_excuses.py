"""Valid loops that rules need not have, and why."""

from __future__ import annotations

import re
from collections.abc import Callable

from magis.ir.graph import Call
from magis.ops.arguments import int_at, ints_at, number_at
from magis.ops.loop import Loop, Reduce
from magis.ops.rule import argument

Applies = Callable[[Call, Loop], bool]


def excuse(call: Call, loop: Loop) -> str | None:
    """Why a rule may lack this valid loop; None when it may not."""
    name = call.op.removeprefix("aten.")
    return next((why for names, applies, why in EXCUSED if re.match(names, name) and applies(call, loop)), None)


def _always(call: Call, loop: Loop) -> bool:
    return True


def _squeezed(call: Call, loop: Loop) -> bool:
    """Whether it is a dimension that is squeezed if it has one position."""
    named = argument(call, 1, "dim")
    dims = named if isinstance(named, tuple) else (named,)
    rank = len(call.inputs[0].shape)
    return named is None or any(axis is not None and axis.dim - rank in _negative(dims, rank) for axis in loop.inputs)


def _negative(dims: tuple[object, ...], rank: int) -> list[int]:
    return [dim % rank - rank for dim in dims if isinstance(dim, int)]


def _scaled_bias(call: Call, loop: Loop) -> bool:
    """Whether a bias that is added once is scaled, or the product is, or no operator makes the product alone."""
    if "addbmm" in call.op and "baddbmm" not in call.op:
        return loop.once is not None
    return loop.once is not None and (number_at(call, 3, "beta"), number_at(call, 4, "alpha")) != (1, 1)


def _no_input(call: Call, loop: Loop) -> bool:
    return not any(loop.inputs)


def _taps(call: Call, loop: Loop) -> bool:
    """Whether taps of the weight are divided."""
    weight = loop.inputs[1 if call.op.endswith("convolution.default") else 2]
    return weight is not None and weight.dim >= 2


def _scattered_positions(call: Call, loop: Loop) -> bool:
    return loop.roles == (Reduce("sum"),)


def _one_wide(call: Call, loop: Loop) -> bool:
    """Whether gradients are summed into one position."""
    image = call.outputs[0]
    dims = [axis.dim for axis in loop.inputs if axis is not None]
    return loop.roles == (Reduce("sum"),) and image is not None and all(image.shape[dim] == 1 for dim in dims)


def _by_chance(call: Call, loop: Loop) -> bool:
    """Whether what is written by chance exceeds what was there."""
    return all(role in (Reduce("max"), Reduce("min")) for role in loop.roles)


def _rolled(call: Call, loop: Loop) -> bool:
    """Whether it is a dimension that is rolled, by some multiple of its length."""
    rank, dims = len(call.inputs[0].shape), argument(call, 2, "dims")
    named = _negative(dims, rank) if isinstance(dims, tuple) and dims else list(range(-rank, 0))
    return any(axis is not None and axis.dim - rank in named for axis in loop.inputs)


def _sides(call: Call, loop: Loop) -> bool:
    """Whether a side of an image is divided that keeps its length, or whose lengths have an odd ratio."""
    before, after = call.inputs[0].shape, call.outputs[0].shape if call.outputs[0] else ()
    dims = [axis.dim for axis in loop.inputs if axis is not None]
    return all(
        dim > 1 and (before[dim] == after[dim] or max(before[dim], after[dim]) % min(before[dim], after[dim]))
        for dim in dims
    )


def _one_pixel(call: Call, loop: Loop) -> bool:
    image = call.outputs[0] if "backward" in call.op else call.inputs[0]
    other = call.inputs[0] if "backward" in call.op else call.outputs[0]
    return any(spec is not None and 1 in spec.shape[2:] for spec in (image, other))


def _padded_window(call: Call, loop: Loop) -> bool:
    return loop.roles == (Reduce("average"),) and any(ints_at(call, 3, "padding"))


def _one_window(call: Call, loop: Loop) -> bool:
    dim = int_at(call, 1, "dimension") % max(len(call.inputs[0].shape), 1)
    return call.inputs[0].shape[dim] == int_at(call, 2, "size")


def _boundaries(call: Call, loop: Loop) -> bool:
    return loop.roles == (Reduce("sum"),)


def _input_frozen(call: Call, loop: Loop) -> bool:
    return call.outputs[0] is None


EXCUSED: tuple[tuple[str, Applies, str], ...] = (
    ("squeeze", _squeezed, "a part of one position would lose its dimension"),
    ("as_strided|_reshape_alias", _always, "its arguments say where in the storage the elements lie"),
    ("addbmm|addmm|addmv|baddbmm", _scaled_bias, "no operator makes what is left without the bias"),
    ("_?upsample|_?adaptive", _no_input, "copies of one position: nothing that is read shrinks"),
    ("(_adaptive_avg_pool|_?upsample).*_backward", _one_wide, "images one position wide"),
    ("_?upsample", _sides, "few images are resized along one side only, or by odd ratios"),
    ("_upsample.*_aa", _one_pixel, "antialiasing kernels misread images one position wide"),
    ("convolution", _taps, "taps are few"),
    ("avg_pool", _padded_window, "few windows that cover the whole image are padded"),
    ("unfold.default", _one_window, "nothing is unfolded"),
    ("roll", _rolled, "a shift by whole lengths, or of whole rows, is no shift"),
    ("(adaptive_)?max_pool.*_backward", _scattered_positions, "every part would make a whole image"),
    ("index_fill|scatter.value", _by_chance, "the value written is larger than all others by chance"),
    ("bucketize|searchsorted", _boundaries, "boundaries are few"),
    ("native_(batch|layer)_norm_backward", _input_frozen, "an input that needs no gradient is the first layer's"),
)
"""The start of operators' names, which of their loops are meant, and the reason."""
