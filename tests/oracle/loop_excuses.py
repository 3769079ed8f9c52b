"""Valid loops that rules need not have, and why."""

from __future__ import annotations

import re
from collections.abc import Callable

from magis.ir.graph import Call
from magis.ops.arguments import number_at
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
    """Whether only taps of the weight are divided."""
    return [axis is not None and axis.dim >= 2 for axis in loop.inputs[:2]] == [False, True] and loop.inputs[0] is None


def _scattered_positions(call: Call, loop: Loop) -> bool:
    return loop.roles == (Reduce("sum"),)


def _one_wide(call: Call, loop: Loop) -> bool:
    """Whether gradients are summed into one position."""
    image = call.outputs[0]
    dims = [axis.dim for axis in loop.inputs if axis is not None]
    return loop.roles == (Reduce("sum"),) and image is not None and all(image.shape[dim] == 1 for dim in dims)


def _input_frozen(call: Call, loop: Loop) -> bool:
    return call.outputs[0] is None


EXCUSED: tuple[tuple[str, Applies, str], ...] = (
    ("squeeze", _squeezed, "a part of one position would lose its dimension"),
    ("as_strided|_reshape_alias", _always, "its arguments say where in the storage the elements lie"),
    ("addbmm|addmm|addmv|baddbmm", _scaled_bias, "no operator makes what is left without the bias"),
    ("_?upsample", _no_input, "copies of one position: nothing that is read shrinks"),
    ("(_adaptive_avg_pool|_?upsample).*_backward", _one_wide, "images one position wide"),
    ("convolution.default", _taps, "taps of a transposed convolution are few"),
    ("(adaptive_)?max_pool.*_backward", _scattered_positions, "every part would make a whole image"),
    ("native_(batch|layer)_norm_backward", _input_frozen, "an input that needs no gradient is the first layer's"),
)
"""The start of operators' names, which of their loops are meant, and the reason."""
