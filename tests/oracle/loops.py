"""Loops of operator rules against execution: a call run in uneven parts along each loop must give what it gives whole.

`loop_problems` returns the contradictions that it finds, one sentence each; none when rule and execution agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from magis.aten.convert import overload
from magis.ir.args import Args, Kwargs
from magis.ir.graph import Call, TensorSpec
from magis.ops.loop import Axis, Concat, Loop, Lost, Reduce, Role, Same, part_shape
from magis.ops.registry import rule_for
from magis.ops.rule import OpRule, WindowPart
from oracle.run import UNDEFINED, Case, copies, execute
from oracle.terms import widened

Results = list[torch.Tensor | None]
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError)
_PRECISION = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_COMPLEX = {torch.complex128: 1e-9, torch.complex64: 1e-4}
_COARSE = {torch.float8_e4m3fn: 0.3, torch.float8_e5m2: 0.6}
LONG = 10**8
LARGE = 1 << 19
"""Floating-point operations, or elements, from which on a call is run in few ways, and in its own precision."""

TOLERANCE = {**_PRECISION, **_COMPLEX, **_COARSE}


@dataclass(frozen=True)
class Whole:
    """A call's whole run: tensors, results, whether results say anything (not on meta, not undefined), and whether it
    takes long."""

    call: Call
    tensors: list[torch.Tensor]
    results: Results
    comparable: bool
    long: bool = False


def loop_problems(case: Case, rule: OpRule | None = None) -> list[str]:
    """What is wrong with the loops of one call; the rule is the operator's own unless another is handed in."""
    known = rule or rule_for(case.call.op)
    call = case.call
    if writes(call):
        call = replace(call, outputs=tuple(spec and replace(spec, writes=True) for spec in call.outputs))
    try:
        loops = list(known.loops(call))
    except Exception as error:  # noqa: BLE001
        return [f"{call.op}: loops raise {type(error).__name__}: {_first_line(error)}"]
    if not loops:
        return []
    if writes(call):
        return [f"{call.op}: it writes in place, but has loops"]
    whole = run_whole(case, known)
    problems = []
    for loop in loops:
        wrong = list(_structure_problems(call, loop)) or list(_loop_problems(whole, known, loop))
        problems += [f"{call.op}, {described(loop)}: {what}" for what in wrong]
    return problems


def writes(call: Call) -> bool:
    """Whether it writes in place."""
    declared = overload(call.op)._schema.is_mutable or not rule_for(call.op).recomputable
    return declared or any(spec is not None and spec.writes for spec in call.outputs)


def run_whole(case: Case, rule: OpRule) -> Whole:
    """The call's results in float64, if the operator takes that; otherwise as it is."""
    silent = case.call.op in UNDEFINED or rule.draws(case.call) or any(t.is_meta for t in case.tensors)
    long = rule.flops(case.call) > LONG or sum(tensor.numel() for tensor in case.tensors) > LARGE
    wide = None if silent or long else widened(case)
    if wide is not None:
        kept = copies(case.tensors)
        tensors = [_double(t) if t.is_floating_point() else t for t in kept]
        try:
            results = execute(wide.call, copies(tensors))
            if _shapes(results) == [spec and spec.shape for spec in case.call.outputs]:
                return Whole(wide.call, tensors, results, True)
        except REFUSALS:
            pass
    return Whole(case.call, case.tensors, execute(case.call, copies(case.tensors)), not silent, long)


def _shapes(results: Results) -> list[tuple[int, ...] | None]:
    return [None if result is None else tuple(result.shape) for result in results]


def _double(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, strides kept."""
    flat = torch.as_strided(tensor, (_extent(tensor),), (1,), tensor.storage_offset()).double()
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0


def described(loop: Loop) -> str:
    """A loop in words: which axes of the inputs, and the roles of the outputs."""
    read = ", ".join(f"input {i} {_axis(axis)}" for i, axis in enumerate(loop.inputs) if axis is not None)
    roles = ", ".join(_role(role) for role in loop.roles)
    notes = ("" if loop.uniform else ", in order") + ("" if loop.once is None else f", input {loop.once} once")
    return f"loop ({read or 'no input'} -> {roles}{notes}{', window' if loop.window else ''})"


def _axis(axis: Axis) -> str:
    factor = f" after {axis.outer}" if axis.outer > 1 else ""
    return f"dim {axis.dim} by {axis.length}{factor}"


def _role(role: Role) -> str:
    if isinstance(role, Concat):
        return f"concat {_axis(role.axis)}"
    return role.by if isinstance(role, Reduce) else "none" if role is None else type(role).__name__.lower()


def _structure_problems(call: Call, loop: Loop) -> Iterator[str]:
    """What can be seen without running anything."""
    if len(loop.inputs) != len(call.inputs) or len(loop.roles) != len(call.outputs):
        yield f"{len(loop.inputs)} axes and {len(loop.roles)} roles for {len(call.inputs)} inputs" + (
            f" and {len(call.outputs)} outputs"
        )
        return
    for number, (role, spec) in enumerate(zip(loop.roles, call.outputs)):
        if (role is None) != (spec is None):
            yield f"output {number} is {'no' if spec is None else 'a'} tensor, its role is {_role(role)}"
        elif isinstance(role, Reduce) and role.by not in ("sum", "average", "max", "min"):
            yield f"output {number} is reduced by {role.by!r}"
    if loop.once is not None and not (0 <= loop.once < len(call.inputs) and loop.inputs[loop.once] is None):
        yield f"input {loop.once} cannot be added once: it is sliced, or there is none"
    if loop.once is not None and any(role != Reduce("sum") for role in loop.roles):
        yield f"input {loop.once} is added once, but not every output is a sum"
    if not any(isinstance(role, (Concat, Reduce)) for role in loop.roles):
        yield "no output is put together or reduced"
    axes = [(f"input {i}", a, s) for i, (a, s) in enumerate(zip(loop.inputs, call.inputs)) if a is not None]
    axes += [(f"output {i}", r.axis, call.outputs[i]) for i, r in enumerate(loop.roles) if isinstance(r, Concat)]
    yield from _axis_problems(axes, loop)


def _axis_problems(axes: Sequence[tuple[str, Axis, TensorSpec | None]], loop: Loop) -> Iterator[str]:
    for name, axis, spec in axes:
        if spec is None:
            continue
        if not 0 <= axis.dim < len(spec.shape):
            yield f"{name} of shape {spec.shape} has no dimension {axis.dim}"
        elif spec.shape[axis.dim] == 0 or spec.shape[axis.dim] % (axis.outer * axis.length):
            yield f"{name}: {axis.outer} x {axis.length} does not divide dimension {axis.dim} of {spec.shape}"
        if axis.length < 2:
            yield f"{name} has an axis of length {axis.length}"
    lengths = {axis.length for _, axis, _ in axes}
    if not axes:
        yield "nothing is sliced and nothing is put together"
    if len(lengths) > 1 and loop.window is None:
        yield f"axes of different lengths {sorted(lengths)}"


def _loop_problems(whole: Whole, rule: OpRule, loop: Loop) -> Iterator[str]:
    if loop.window is not None:
        for lengths in _partitions(whole, loop):
            yield from _attempt(partial(_windowed, whole, rule, loop, lengths), lengths, whole, loop)
        return
    for refined in (loop,) if whole.long else (loop, *refinements(loop)):
        note = "" if refined is loop else f"refined to {_factor(refined)}: "
        for lengths in _partitions(whole, refined):
            for problem in _part_problems(whole, rule, refined, lengths):
                yield note + problem


def _partitions(whole: Whole, loop: Loop) -> list[tuple[int, ...]]:
    found = partitions(loop.length)
    return found[-1:] if whole.long else found


def _part_problems(whole: Whole, rule: OpRule, loop: Loop, lengths: tuple[int, ...]) -> list[str]:
    """With copies of slices, and with views. Views may be refused: a region copies its slices then."""
    copied = list(_attempt_parts(whole, rule, loop, lengths, copying=True))
    if copied or whole.long:
        return copied
    viewed = _attempt_parts(whole, rule, loop, lengths, copying=False)
    return [f"{problem} (slices are views)" for problem in viewed if "refused" not in problem]


def _factor(loop: Loop) -> str:
    axis = next(a for a in (*loop.inputs, *(r.axis for r in loop.roles if isinstance(r, Concat))) if a is not None)
    return _axis(axis)


def refinements(loop: Loop) -> Iterator[Loop]:
    """Up to two factors of the loop's axis that may be split as well: leading and, where positions are alike, inner."""
    for outer in (2, 3, 5, 7):
        if loop.length % outer == 0 and loop.length > outer:
            yield loop.refined(1, outer)
            if loop.uniform:
                yield loop.refined(outer, loop.length // outer)
            return


def partitions(length: int) -> list[tuple[int, ...]]:
    """Uneven parts of that many positions: two, and where that is possible three."""
    first = max(length // 3, 1)
    found = [(first, length - first)]
    if length > 2:
        found.append((length - first - 1, 1, first) if length - first > 1 else (1, 1, 1))
    return found


def _attempt_parts(whole: Whole, rule: OpRule, loop: Loop, lengths: tuple[int, ...], copying: bool) -> Iterator[str]:
    def parts() -> list[Results]:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        found = [_part(whole, rule, loop, start, length, copying) for start, length in zip(starts, lengths)]
        return found if loop.once is None else [*found, _bias(whole, rule, loop)]

    yield from _attempt(parts, lengths, whole, loop)


def _attempt(parts: Callable[[], list[Results]], lengths: tuple[int, ...], whole: Whole, loop: Loop) -> Iterator[str]:
    """Runs the parts and compares what they give with the whole."""
    try:
        results = parts()
    except REFUSALS as error:
        yield f"parts of {lengths} are refused: {type(error).__name__}: {_first_line(error)}"
        return
    for number, (role, result) in enumerate(zip(loop.roles, whole.results)):
        if role is None or result is None or isinstance(role, Lost):
            continue
        pieces = [part[number] for part in results]
        problem = role_problem(role, result, pieces, lengths, whole.comparable)
        if problem:
            yield f"output {number}, parts of {lengths}: {problem}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def narrowed(tensor: torch.Tensor, axis: Axis, start: int, length: int, copying: bool) -> torch.Tensor:
    """The slice of a tensor with `length` positions of an axis from `start` on: a view, but of inner factors a copy."""
    inner = tensor.shape[axis.dim] // (axis.outer * axis.length)
    if axis.outer == 1:
        piece = tensor.narrow(axis.dim, start * inner, length * inner)
    else:
        split = tensor.unflatten(axis.dim, (axis.outer, axis.length, inner))
        piece = split.narrow(axis.dim + 1, start, length).flatten(axis.dim, axis.dim + 2)
    return piece.clone(memory_format=torch.contiguous_format) if copying or axis.outer > 1 else piece


def _part(whole: Whole, rule: OpRule, loop: Loop, start: int, length: int, copying: bool) -> Results:
    """The results of one part."""
    dense = rule.contiguous_inputs(whole.call)
    tensors = [
        tensor if axis is None else narrowed(tensor, axis, start, length, copying or number in dense)
        for number, (tensor, axis) in enumerate(zip(whole.tensors, loop.inputs))
    ]
    args, kwargs = rule.part(whole.call, loop, length)
    return _run(whole, rule, loop, args, kwargs, tensors, length)


def _run(
    whole: Whole, rule: OpRule, loop: Loop, args: Args, kwargs: Kwargs, tensors: list[torch.Tensor], length: int
) -> Results:
    inputs = tuple(
        replace(spec, shape=tuple(t.shape), strides=tuple(t.stride())) for spec, t in zip(whole.call.inputs, tensors)
    )
    outputs = tuple(
        replace(spec, shape=part_shape(spec.shape, role.axis, length)) if spec and isinstance(role, Concat) else spec
        for spec, role in zip(whole.call.outputs, loop.roles)
    )
    call = Call(whole.call.op, args, kwargs, inputs, outputs)
    if loop.once is not None:
        call, _ = rule.without_bias(call, loop)
        tensors = [*tensors[: loop.once], *tensors[loop.once + 1 :]]
    return execute(call, copies(tensors))


def _bias(whole: Whole, rule: OpRule, loop: Loop) -> Results:
    """The input that is added once, as one more partial result."""
    assert loop.once is not None
    _, shape = rule.without_bias(whole.call, loop)
    bias = whole.tensors[loop.once].view(shape)
    return [None if result is None else bias.expand(result.shape) for result in whole.results]


def _windowed(whole: Whole, rule: OpRule, loop: Loop, lengths: tuple[int, ...]) -> list[Results]:
    """The results of parts that read overlapping slices."""
    found: list[Results] = []
    for number, length in enumerate(lengths):
        start = sum(lengths[:number])
        part = rule.windowed(whole.call, loop, range(start, start + length))
        if part.keep != length:
            raise ValueError(f"it keeps {part.keep} of {length} positions")
        found.append(_window_part(whole, loop, part))
    return found


def _window_part(whole: Whole, loop: Loop, part: WindowPart) -> Results:
    tensors = []
    for tensor, axis in zip(whole.tensors, loop.inputs):
        if axis is not None:
            if not 0 <= part.reads.start <= part.reads.stop <= tensor.shape[axis.dim] or part.reads.step != 1:
                raise ValueError(f"it reads {part.reads} of {tensor.shape[axis.dim]} positions")
            piece = tensor.narrow(axis.dim, part.reads.start, len(part.reads))
            pads = [0, 0] * (tensor.dim() - axis.dim - 1) + list(part.pads)
            tensor = torch.constant_pad_nd(piece, pads, part.pad_value) if any(part.pads) else piece
        tensors.append(tensor)
    results = execute(Call(whole.call.op, part.args, part.kwargs, whole.call.inputs, whole.call.outputs), tensors)
    kept: Results = []
    for role, result in zip(loop.roles, results):
        if isinstance(role, Concat) and result is not None:
            result = result.narrow(role.axis.dim, part.skip, part.keep)
        kept.append(result)
    return kept


def role_problem(
    role: Role, whole: torch.Tensor, parts: Sequence[torch.Tensor | None], lengths: Sequence[int], values: bool = True
) -> str | None:
    """How the parts' results contradict a role; `values`: whether elements are compared, not only shapes."""
    pieces = [part for part in parts if part is not None]
    if len(pieces) < len(parts):
        return "a part gives no tensor"
    if any(piece.dtype != whole.dtype for piece in pieces):
        return f"a part has elements of {pieces[0].dtype}, the whole of {whole.dtype}"
    if isinstance(role, Concat):
        shapes = [part_shape(tuple(whole.shape), role.axis, n) for n in lengths]
    else:
        shapes = [tuple(whole.shape)] * len(pieces)
    if [tuple(piece.shape) for piece in pieces] != shapes:
        return f"parts have shapes {[tuple(p.shape) for p in pieces]}, {_role(role)} of {tuple(whole.shape)} expected"
    if not values:
        return None
    wholes = pieces if isinstance(role, Same) else [combined(role, pieces, lengths)]
    for made in wholes:
        if not same(made, whole):
            return f"{_role(role)} differs from the whole by up to {max_error(made, whole):.3g}"
    return None


def combined(role: Role, pieces: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """What the parts' results make together."""
    if isinstance(role, Concat):
        return assembled(pieces, role.axis, lengths)
    assert isinstance(role, Reduce)
    if role.by == "sum":
        return _summed(pieces)
    if role.by == "average":
        return _summed([piece * (n / sum(lengths)) for piece, n in zip(pieces, lengths)]).to(pieces[0].dtype)
    stacked = torch.stack(list(pieces))
    return stacked.amax(0) if role.by == "max" else stacked.amin(0)


def _summed(pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    first, *rest = pieces
    total = first.clone()
    for piece in rest:
        total = total + piece
    return total.to(first.dtype)


def assembled(pieces: Sequence[torch.Tensor], axis: Axis, lengths: Sequence[int]) -> torch.Tensor:
    """Parts side by side along an axis."""
    split = [
        piece.unflatten(axis.dim, (axis.outer, n, piece.shape[axis.dim] // (axis.outer * n)))
        for piece, n in zip(pieces, lengths)
    ]
    return torch.cat(split, axis.dim + 1).flatten(axis.dim, axis.dim + 2)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal to summation order, NaNs and infinities included."""
    if a.shape != b.shape:
        return False
    if b.dtype not in TOLERANCE:
        return bool(torch.equal(a, b))
    near = TOLERANCE[b.dtype]
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b)]
    finite = wide[1][wide[1].isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(*wide, rtol=near, atol=near * scale, equal_nan=True)


def max_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, NaN if one of two has no number where the other has one."""
    kind = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(kind), b.to(kind)
    both = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).masked_fill(both, 0).abs().max()) if a.numel() else 0.0
