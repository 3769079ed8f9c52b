"""Finds by enumeration along which axes a call may run in parts, whatever its rule says.

A candidate slices some inputs along one dimension each, all of one length; where integers among the arguments are
multiples of that length, they may shrink with it. It is valid when uneven parts, on a few sets of random tensors, fit a
role for every output, and when no sliced input could as well be shared whole. Invalid candidates may crash the process:
`loop_child` runs this in one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from math import prod

import torch

from magis.ir.args import Arg, Slot
from magis.ir.graph import Call
from magis.ops.loop import Axis, Concat, Loop, Reduce, Role, Same
from magis.ops.registry import rule_for
from oracle.loops import LONG, REFUSALS, Results, combined, narrowed, partitions, run_whole, same, writes
from oracle.run import UNDEFINED, Case, copies, execute

FACTORED: dict[str, str] = {
    "attention": "heads",
    "convolution": "leading",
    "normalize": "leading",
    "pad": "leading",
    "pool": "leading",
    "upsample": "leading",
    "view": "every",
}
"""Families of operators whose dimensions may consist of groups or windows, and which of their factors are tried: of
dimension 1, leading ones, or all."""

BIASED = {"addmm": 0, "addmv": 0, "addbmm": 0, "baddbmm": 0, "addr": 0, "convolution": 2}
"""Position of an argument that is added to a sum of products."""

_MOST_VARIATIONS = 24
_REDRAWN = 5
_MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Candidate:
    """Axes of the sliced inputs. `once`: this input is zero in all parts but the first."""

    axes: tuple[Axis | None, ...]
    length: int
    once: int | None = None

    @property
    def sliced(self) -> list[int]:
        """The inputs that are sliced."""
        return [number for number, axis in enumerate(self.axes) if axis is not None]


@dataclass(frozen=True)
class Sizes:
    """Integers among the arguments that shrink with the parts: for each changed argument, by its place in the list of
    all, the position in it (-1 for a bare integer) and the elements for each position of the axis."""

    changes: tuple[tuple[int, int, int], ...]

    def arguments(self, call: Call, length: int) -> Call:
        """The call with the integers of a part of that length."""
        values: list[Arg] = [*call.args, *(value for _, value in call.kwargs)]
        for place, position, unit in self.changes:
            old = values[place]
            if isinstance(old, tuple):
                values[place] = (*old[:position], unit * length, *old[position + 1 :])
            else:
                values[place] = unit * length
        names = [name for name, _ in call.kwargs]
        return replace(call, args=tuple(values[: len(call.args)]), kwargs=tuple(zip(names, values[len(call.args) :])))


def searchable(case: Case) -> bool:
    """Whether runs can be compared, and are short."""
    call = case.call
    if call.op in UNDEFINED or rule_for(call.op).draws(call) or any(t.is_meta for t in case.tensors):
        return False
    if writes(call) or not any(call.outputs) or rule_for(call.op).flops(call) > LONG:
        return False
    specs = [spec for spec in (*call.inputs, *call.outputs) if spec is not None]
    return sum(spec.numel for spec in specs) <= _MOST_ELEMENTS and any(s.numel for s in call.outputs if s is not None)


def valid_loops(
    case: Case, loops: Sequence[Loop], start: int, most: int, trying: Callable[[int], None]
) -> Iterator[Loop]:
    """Loops that are valid and that none of the given ones covers, out of the candidates from number `start` up to
    number `most`. `trying` is told the number of each candidate before it is run."""
    search = _Search(case)
    known = list(loops)
    every = chain(_inner_factors(loops), candidates(case.call))
    for number, candidate in islice(enumerate(every), start, most):
        if candidate.sliced and any(covers(loop, candidate.axes) for loop in known):
            continue
        trying(number)
        roles = search.roles(candidate)
        if roles is not None and search.needed(candidate):
            loop = Loop(candidate.axes, roles, once=candidate.once)
            if candidate.sliced or not any(covers_results(other, loop) for other in known):
                known.append(loop)
                yield loop


def _inner_factors(loops: Sequence[Loop]) -> Iterator[Candidate]:
    """Of loops that are said to need contiguous parts: an inner factor, which needs others."""
    for loop in loops:
        outer = next((n for n in range(2, loop.length) if loop.length % n == 0), 0)
        if not loop.uniform and loop.window is None and outer:
            length = loop.length // outer
            yield Candidate(loop.refined(outer, length).inputs, length, loop.once)


def covers(loop: Loop, axes: Sequence[Axis | None]) -> bool:
    """Whether a loop splits these inputs along these axes, or along axes of which these are factors."""
    return loop.window is None and _factors(loop, [(a, b) for a, b in zip(axes, loop.inputs) if a is not None])


def covers_results(loop: Loop, found: Loop) -> bool:
    """Whether a loop puts together the same axes of the results, or axes of which these are factors."""
    pairs = [
        (b.axis, a.axis if isinstance(a, Concat) else None)
        for a, b in zip(loop.roles, found.roles)
        if isinstance(b, Concat)
    ]
    return loop.window is None and _factors(loop, pairs)


def _factors(loop: Loop, pairs: list[tuple[Axis, Axis | None]]) -> bool:
    """Whether all first axes are one and the same factor of the second ones."""
    outers = set()
    for part, whole in pairs:
        if whole is None or part.dim != whole.dim or part.outer % whole.outer:
            return False
        outer = part.outer // whole.outer
        if whole.length % (outer * part.length):
            return False
        outers.add(outer)
    return len(outers) == 1 and (loop.uniform or outers == {1})


def candidates(call: Call) -> Iterator[Candidate]:
    """Candidates: first those that slice all inputs of one shape alike, then the others; of these by falling length;
    of one length, those that slice fewer inputs first."""
    lengths = sorted(_lengths(call), reverse=True)
    for alike in (True, False):
        for length in lengths:
            chosen = [c for c in _products(_choices(call, length)) if _alike(call, c) == alike]
            for axes in sorted(chosen, key=lambda c: sum(axis is not None for axis in c)):
                yield Candidate(axes, length)
                bias = _bias(call)
                if bias is not None and axes[bias] is None and any(axes):
                    yield Candidate(axes, length, bias)


def _alike(call: Call, axes: Sequence[Axis | None]) -> bool:
    return len(set(zip((spec.shape for spec in call.inputs), axes))) == len({spec.shape for spec in call.inputs})


def _bias(call: Call) -> int | None:
    place = BIASED.get(call.op.split(".")[1])
    value = call.args[place] if place is not None and place < len(call.args) else None
    return value.index if isinstance(value, Slot) else None


def _lengths(call: Call) -> set[int]:
    """Lengths that an axis may have."""
    dims = {n for spec in (*call.inputs, *call.outputs) if spec is not None for n in spec.shape if n > 1}
    if rule_for(call.op).family not in FACTORED:
        return dims
    return dims | {f for n in dims for f in range(2, n // 2 + 1) if n % f == 0}


def _choices(call: Call, length: int) -> list[list[Axis | None]]:
    """For each input, None, and the axes of that length."""
    tried = FACTORED.get(rule_for(call.op).family, "")
    found: list[list[Axis | None]] = []
    for spec in call.inputs:
        axes: list[Axis | None] = [None]
        for dim, n in enumerate(spec.shape):
            if n == length:
                axes.append(Axis(dim, length))
            elif tried and n and n % length == 0 and (dim == 1 or tried != "heads"):
                outers = [o for o in range(1, n // length + 1) if (n // length) % o == 0]
                axes += [Axis(dim, length, o) for o in outers if o == 1 or tried == "every"]
        found.append(axes)
    return found


def _products(axes: list[list[Axis | None]]) -> Iterable[tuple[Axis | None, ...]]:
    """One axis, or none, for each input. Of very many inputs, all are sliced alike."""
    if prod(len(options) for options in axes) <= 4096:
        return product(*axes)
    dims = range(max(len(options) for options in axes))
    return (tuple(options[min(place, len(options) - 1)] for options in axes) for place in dims)


def sizes(call: Call, length: int) -> list[Sizes]:
    """Which integers among the arguments may shrink with an axis of that length; none at all first."""
    options: list[list[tuple[int, int, int] | None]] = []
    for place, value in enumerate([*call.args, *(v for _, v in call.kwargs)]):
        ints = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in ints):
            continue
        fitting = [i for i, n in enumerate(ints) if n > 0 and n % length == 0]  # type: ignore[operator]
        changes = [(place, i if isinstance(value, tuple) else -1, ints[i] // length) for i in fitting]  # type: ignore[operator]
        if changes:
            options.append([None, *changes])
    combined = [Sizes(tuple(change for change in chosen if change)) for chosen in product(*options)]
    return sorted(combined, key=lambda s: len(s.changes))[:_MOST_VARIATIONS]


class _Search:
    """Runs candidates of one call on a few sets of tensors."""

    def __init__(self, case: Case) -> None:
        whole = run_whole(case, rule_for(case.call.op))
        self.call = whole.call
        self.runs = [(whole.tensors, whole.results)]
        for seed in range(1, 1 + _REDRAWN):
            again = redrawn(whole.tensors, seed)
            with suppress(REFUSALS):
                self.runs.append((again, execute(self.call, copies(again))))

    def roles(self, candidate: Candidate, proven: bool = True) -> tuple[Role, ...] | None:
        """A role for every result; None when the candidate is not valid. `proven`: nor when the fit proves nothing, as
        a result never changes."""
        for change in sizes(self.call, candidate.length):
            if not candidate.sliced and not change.changes:
                continue
            fitting: list[list[Role]] | None = None
            for lengths in partitions(candidate.length):
                for tensors, results in self.runs:
                    fitting = self._fitting(candidate, change, lengths, tensors, results, fitting)
                    if fitting is None:
                        break
                if fitting is None:
                    break
            roles = None if fitting is None else self._chosen(fitting, candidate, proven)
            if roles is not None:
                return roles
        return None

    def needed(self, candidate: Candidate) -> bool:
        """Whether no sliced input could as well be shared whole."""
        for number in candidate.sliced:
            axes = tuple(None if i == number else axis for i, axis in enumerate(candidate.axes))
            if self.roles(replace(candidate, axes=axes), proven=False) is not None:
                return False
        return candidate.once is None or self.roles(replace(candidate, once=None)) is None

    def _fitting(
        self,
        candidate: Candidate,
        change: Sizes,
        lengths: tuple[int, ...],
        tensors: list[torch.Tensor],
        results: Results,
        known: list[list[Role]] | None,
    ) -> list[list[Role]] | None:
        """For each result, those roles (of the known ones) that the parts fit; None when some result has none."""
        try:
            parts = list(self._parts(candidate, change, lengths, tensors))
        except REFUSALS:
            return None
        found: list[list[Role]] = []
        for number, result in enumerate(results):
            pieces = [part[number] if number < len(part) else None for part in parts]
            given = [piece for piece in pieces if piece is not None]
            if result is None or len(given) < len(pieces):
                roles: list[Role] = [None] if result is None and not given else []
            else:
                roles = list(fitting_roles(result, given, lengths, known and known[number]))
            if not roles:
                return None
            found.append(roles)
        return found

    def _parts(
        self, candidate: Candidate, change: Sizes, lengths: tuple[int, ...], tensors: list[torch.Tensor]
    ) -> Iterator[Results]:
        start = 0
        for length in lengths:
            slices = [
                tensor if axis is None else narrowed(tensor, axis, start, length, copying=True)
                for tensor, axis in zip(tensors, candidate.axes)
            ]
            if start and candidate.once is not None:
                slices[candidate.once] = torch.zeros_like(slices[candidate.once])
            yield execute(change.arguments(self.call, length), copies(slices))
            start += length

    def _chosen(self, fitting: list[list[Role]], candidate: Candidate, proven: bool) -> tuple[Role, ...] | None:
        """The first role of each; None when none makes anything of parts. Where nothing is sliced, only what lies side
        by side counts: `2 x` is not a sum of two parts."""
        roles = tuple(each[0] for each in fitting)
        if not any(isinstance(role, (Concat, Reduce) if candidate.sliced else Concat) for role in roles):
            return None
        for role, (first, *others) in zip(roles, zip(*(results for _, results in self.runs))):
            telling = isinstance(role, Reduce) or (not candidate.sliced and bool(self.call.inputs))
            if proven and telling and others and all(same(first, other) for other in others if first is not None):
                return None
        return roles


def fitting_roles(
    whole: torch.Tensor, pieces: list[torch.Tensor], lengths: Sequence[int], known: list[Role] | None
) -> Iterator[Role]:
    """The roles that parts of a result fit."""
    if any(piece.dtype != whole.dtype or piece.dim() != whole.dim() for piece in pieces):
        return
    for role in _possible(whole, pieces, lengths) if known is None else known:
        if isinstance(role, Concat) and not _has_shapes(whole, pieces, role.axis, lengths):
            continue
        if not isinstance(role, Concat) and any(piece.shape != whole.shape for piece in pieces):
            continue
        if isinstance(role, Same):
            fits = all(same(piece, whole) for piece in pieces)
        else:
            fits = same(combined(role, pieces, lengths), whole)
        if fits:
            yield role


def _has_shapes(whole: torch.Tensor, pieces: list[torch.Tensor], axis: Axis, lengths: Sequence[int]) -> bool:
    for piece, length in zip(pieces, lengths):
        wanted = list(whole.shape)
        wanted[axis.dim] = wanted[axis.dim] // axis.length * length
        if list(piece.shape) != wanted:
            return False
    return True


def _possible(whole: torch.Tensor, pieces: list[torch.Tensor], lengths: Sequence[int]) -> Iterator[Role]:
    """The roles that the shapes allow: side by side, the same, partial."""
    length = sum(lengths)
    if all(piece.shape == whole.shape for piece in pieces):
        yield Same()
        if whole.dtype is not torch.bool and not whole.is_complex():
            yield Reduce("sum")
            yield Reduce("average")
        elif whole.is_complex():
            yield Reduce("sum")
        if not whole.is_complex():
            yield Reduce("max")
            yield Reduce("min")
        return
    changed = [dim for dim in range(whole.dim()) if pieces[0].shape[dim] != whole.shape[dim]]
    if len(changed) == 1 and whole.shape[changed[0]] % length == 0:
        inner = whole.shape[changed[0]] // length
        for outer in range(1, inner + 1):
            if inner % outer == 0:
                yield Concat(Axis(changed[0], length, outer))


def redrawn(tensors: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Other random tensors of the same shapes and of the same ranges of values, no two elements in one place."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for tensor in tensors:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        low, high = _range(tensor)
        if tensor.dtype is torch.bool:
            flat.copy_(torch.rand(flat.shape, generator=generator) < 0.5)
        elif tensor.is_complex() or (tensor.is_floating_point() and not 0 <= low <= high <= 1):
            flat.copy_(
                torch.randn(flat.shape, generator=generator, dtype=torch.promote_types(flat.dtype, torch.float32))
            )
        elif tensor.is_floating_point():
            flat.copy_(torch.rand(flat.shape, generator=generator).clamp(0.01, 0.99))
        else:
            flat.copy_(torch.randint(int(low), int(high) + 1, flat.shape, generator=generator))
        found.append(flat.view(tensor.shape))
    return found


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    if not tensor.numel() or tensor.is_complex() or tensor.dtype is torch.bool:
        return 0, 0
    values = tensor.double() if tensor.is_floating_point() else tensor.to(torch.int64)
    return values.min().item(), values.max().item()
