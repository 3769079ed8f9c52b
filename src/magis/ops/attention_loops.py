"""Along which axes fused attention may run in parts: samples, heads, and on the CPU queries and keys.

Tensors are [batch, heads, length, width]; several heads of queries may share a head of keys, which then are one
position of the heads' axis; if all share one, the heads of queries are divided. A causal mask depends on the position,
so that lengths stay whole. The results of other kernels that do not lie along an axis (seeds, offsets) are not given by
parts.
"""

from __future__ import annotations

from collections.abc import Iterator

from magis.ir.args import Arg, Slot
from magis.ir.graph import Call
from magis.ops.arguments import flag_at
from magis.ops.loop import Axis, Concat, Loop, Lost, Reduce, Role
from magis.ops.slots import at_places


def attention_loops(call: Call, first: int, on_cpu: bool) -> Iterator[Loop]:
    """The loops of a forward (`first` 0) or backward (`first` 1, after the gradient) call without dropout."""
    q, k = (_shape(call, call.args[first + place]) for place in range(2))
    if len(q) != 4 or len(k) != 4 or not k[1] or q[1] % k[1]:
        return
    if not first or all(spec is None for spec in call.outputs[3:]):
        yield from _along(call, q, 0, Axis(0, q[0]))
        yield from _along(call, q, 1, Axis(1, k[1] if k[1] > 1 else q[1]))
    if not on_cpu or flag_at(call, 7 if first else 4, "is_causal"):
        return
    queries, keys = Axis(2, q[2]), Axis(2, k[2])
    mask: dict[int | str, Axis | None] = {"attn_mask": _of_mask(call, "attn_mask", q[2], -2)}
    over_keys: dict[int | str, Axis | None] = {"attn_mask": _of_mask(call, "attn_mask", k[2], -1)}
    if first:
        yield from at_places(
            call, {**dict.fromkeys((0, 1, 4, 5), queries), **mask}, [Concat(queries), Reduce(), Reduce()]
        )
        yield from at_places(call, {2: keys, 3: keys, **over_keys}, [Reduce(), Concat(keys), Concat(keys)])
    else:
        yield from at_places(call, {0: queries, **mask}, [Concat(queries), Concat(queries)])


def _along(call: Call, q: tuple[int, ...], dim: int, axis: Axis) -> Iterator[Loop]:
    """Samples or heads: every tensor that has them, the mask unless it is the same for all."""
    places: dict[int | str, Axis | None] = {}
    arguments: list[tuple[int | str, Arg]] = [*enumerate(call.args), *call.kwargs]
    for place, value in arguments:
        if isinstance(value, Slot):
            shape = call.inputs[value.index].shape
            has = len(shape) in (3, 4) and len(shape) > dim and shape[dim] % axis.length == 0 and shape[dim] > 1
            places[place] = axis if has and not (len(shape) == 3 and _is_mask(call, place)) else None
    roles: list[Role] = []
    for spec in call.outputs:
        along = spec is not None and len(spec.shape) in (3, 4) and spec.shape[0] == q[0]
        shared = along and spec is not None and spec.shape[dim] % axis.length > 0  # the gradient of one head of keys
        roles.append(None if spec is None else Reduce() if shared else Concat(axis) if along else Lost())
    yield from at_places(call, places, roles)


def _is_mask(call: Call, place: int | str) -> bool:
    return place == "attn_mask"


def _of_mask(call: Call, name: str, length: int, dim: int) -> Axis | None:
    value = dict(call.kwargs).get(name)
    shape = _shape(call, value) if isinstance(value, Slot) else ()
    return Axis(len(shape) + dim, length) if shape and shape[dim] == length else None


def _shape(call: Call, value: Arg) -> tuple[int, ...]:
    return call.inputs[value.index].shape if isinstance(value, Slot) else ()
