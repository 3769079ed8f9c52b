"""Random calls of a family of operators: its rules' samples with other sizes, layouts, types and arguments.

Lengths change everywhere at once, in tensors and in arguments, so that most calls stay valid; those that PyTorch
refuses, first on tensors without data, are left out. The same seed gives the same calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod
from random import Random
from typing import Any

import torch

from magis.aten.convert import spec_of
from magis.aten.infer import infer
from magis.errors import MagisError
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.arguments import int_at, ints_at
from magis.ops.rule import OpRule, Sample, T
from oracle.loop_child import LoopChild
from oracle.loops import REFUSALS, same
from oracle.run import Case, case_of, copies, execute, rules
from oracle.test_samples import OTHER_DEVICES

UNCHECKED = re.compile("attention|backward|embedding|nll_loss|unpool|put")
"""Operators whose kernels trust their arguments: only lengths change, consistently."""

_LENGTHS = (1, 2, 3, 4, 5, 6, 6, 7, 8, 9)
_FLOATS = (DType.F32, DType.F32, DType.F64, DType.F16, DType.BF16)
_TRIES = 25


def families() -> list[str]:
    """The names of all families of operators."""
    return sorted({rule.family for rule in rules().values()})


@cache
def _samples(family: str) -> list[Sample]:
    kinds: dict[type[OpRule], OpRule] = {type(rule): rule for rule in rules().values() if rule.family == family}
    samples = [sample for rule in kinds.values() for sample in rule.samples()]
    return [sample for sample in samples if sample.op not in OTHER_DEVICES]


def calls(family: str, count: int, child: LoopChild, seed: int = 0) -> Iterator[Case]:
    """That many different calls of the family's operators, fewer if PyTorch refuses too many. The child tries
    them first: some crash."""
    random = Random(f"{family} {seed}")
    seen: set[Call] = set()
    samples = _samples(family)
    for _ in range(count * _TRIES if samples else 0):
        case = _accepted(random.choice(samples), random, child)
        if case is not None and case.call not in seen:
            seen.add(case.call)
            yield case
            if len(seen) == count:
                return


def _accepted(sample: Sample, random: Random, child: LoopChild) -> Case | None:
    """A change of the sample that PyTorch accepts; None when it refuses."""
    changed = _resized(sample, random)
    if not UNCHECKED.search(sample.op) and "loss" not in sample.op:
        for change in (_retyped, _broadcast, _reargued):
            if random.random() < 0.3:
                changed = change(changed, random)
    try:
        empty = case_of(changed, "meta")
        infer(empty.call)
        if not _sound(empty) or not child.runs(changed):
            return None
        case = _relaid(case_of(changed), random)
        return _with_results(case) if child.runs(case) else None
    except (*REFUSALS, MagisError, ZeroDivisionError):
        return None


def _sound(case: Case) -> bool:
    """Whether the call makes sense, where PyTorch checks nothing: heads of queries that share a head of keys are a
    whole number, gradients of slices have their shape, scales of images agree with their sizes."""
    call = case.call
    if "attention" in call.op:
        heads = [spec.shape[1] for spec in call.inputs if len(spec.shape) > 2]
        return all(heads[0] % n == 0 for n in heads)
    if "slice_backward" in call.op:
        dim = int_at(call, 2, "dim")
        taken = range(*slice(*call.args[3:]).indices(ints_at(call, 1, "input_sizes")[dim]))
        return call.inputs[0].shape[dim] == len(taken)
    scales = [value for value in call.args if isinstance(value, float)] if "upsample" in call.op else []
    sides = [spec.shape[2:] for spec in (call.inputs[0], call.outputs[0]) if spec is not None] if scales else [(), ()]
    return all(max(pair) == min(pair) * scales[0] for pair in zip(*sides))


def _resized(sample: Sample, random: Random) -> Sample:
    """Each length replaced by another wherever it stands, products of neighbouring lengths as well."""
    shapes = [t.shape for t in _tensors(sample)]
    lengths = sorted({n for shape in shapes for n in shape if n > 1})
    new: dict[int, int] = {0: 0, 1: 1}
    if random.random() < 0.3:
        scale = random.choice((2, 3))
        new.update({n: n * scale if random.random() < 0.5 else n for n in lengths})
    else:
        new.update(zip(lengths, random.sample(_LENGTHS, len(lengths)) if len(lengths) < 9 else lengths))
    for shape in shapes:
        for j in range(len(shape), 1, -1):
            for i in range(j - 1):
                new.setdefault(prod(shape[i:j]), prod(new[n] for n in shape[i:j]))
    least = min((new[n] for shape in shapes for n in shape), default=1)

    def change(value: Any) -> Any:
        if isinstance(value, T):
            high = new.get(value.high, min(value.high, least)) if value.dtype is not DType.BOOL else value.high
            return T(tuple(new[n] for n in value.shape), value.dtype, high)
        if isinstance(value, tuple):
            return tuple(change(item) for item in value)
        return new.get(value, value) if isinstance(value, int) and value > 1 else value

    changed = _mapped(sample, change)
    if "loss" in sample.op or (random.random() < 0.5 and not UNCHECKED.search(sample.op)):
        tensors = iter(_tensors(changed))  # the arguments as they were
        return _mapped(sample, lambda value: _placed(value, tensors))
    return changed


def _placed(value: Any, tensors: Iterator[T]) -> Any:
    """The next of the tensors for each tensor."""
    if isinstance(value, T):
        return next(tensors)
    return tuple(_placed(item, tensors) for item in value) if isinstance(value, tuple) else value


def _retyped(sample: Sample, random: Random) -> Sample:
    """Another floating-point type."""
    dtype = random.choice(_FLOATS)

    def change(value: Any) -> Any:
        if isinstance(value, T):
            return replace(value, dtype=dtype) if value.dtype is DType.F32 else value
        return tuple(change(item) for item in value) if isinstance(value, tuple) else value

    return _mapped(sample, change)


def _broadcast(sample: Sample, random: Random) -> Sample:
    """A tensor that has one position along some dimensions, or lacks the first ones."""

    def change(value: Any) -> Any:
        if isinstance(value, T) and random.random() < 0.5:
            shape = tuple(1 if random.random() < 0.3 else n for n in value.shape)
            return T(shape[random.randint(0, len(shape)) :], value.dtype, value.high)
        return tuple(change(item) for item in value) if isinstance(value, tuple) else value

    return _mapped(sample, change)


def _reargued(sample: Sample, random: Random) -> Sample:
    """Other flags, dimensions and numbers."""

    def change(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(change(item) for item in value)
        if random.random() < 0.5:
            return value
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return random.choice((value - 1, value + 1, -1, -2, 0, 1, 2))
        return value * random.choice((0.5, -1.0, 2.0)) if isinstance(value, float) else value

    return _mapped(sample, change)


def _tensors(sample: Sample) -> list[T]:
    found: list[T] = []

    def visit(value: Any) -> Any:
        if isinstance(value, T):
            found.append(value)
        elif isinstance(value, tuple):
            for item in value:
                visit(item)
        return value

    _mapped(sample, visit)
    return found


def _mapped(sample: Sample, change: Any) -> Sample:
    args = tuple(change(value) for value in sample.args)
    return Sample(sample.op, args, tuple((name, change(value)) for name, value in sample.kwargs))


def _relaid(case: Case, random: Random) -> Case:
    """The case with its tensors' elements elsewhere in their storages."""
    rank = 2 if "norm" in case.call.op else 0  # some kernels take weights for contiguous ones, if images are small
    chosen = [tensor.dim() >= rank and random.random() < 0.4 for tensor in case.tensors]
    tensors = [_other_layout(tensor, random) if other else tensor for tensor, other in zip(case.tensors, chosen)]
    return Case(replace(case.call, inputs=tuple(map(spec_of, tensors))), tensors)


def _with_results(case: Case) -> Case | None:
    """The case with its results; None when layouts change them: some kernels take any tensor for a contiguous one."""
    outputs = execute(case.call, copies(case.tensors))
    dense = execute(case.call, [tensor.clone(memory_format=torch.contiguous_format) for tensor in case.tensors])
    if not all(a is b or (a is not None and b is not None and same(a, b)) for a, b in zip(outputs, dense)):
        return None
    specs = tuple(None if out is None else spec_of(out) for out in outputs)
    return Case(replace(case.call, outputs=specs), case.tensors, outputs)


def _other_layout(tensor: torch.Tensor, random: Random) -> torch.Tensor:
    """The same elements in another order of dimensions, with gaps, after an offset; or one position expanded."""
    rank = tensor.dim()
    kind = random.choice(("order", "gaps", "offset", "expanded"))
    if kind == "order":
        order = random.sample(range(rank), rank)
        back = [order.index(dim) for dim in range(rank)]
        return tensor.permute(order).contiguous().permute(back)
    if kind == "expanded" and rank and tensor.numel():
        dim = random.randrange(rank)
        return tensor.narrow(dim, 0, 1).clone().expand(tensor.shape)
    step, start = (2, 0) if kind == "gaps" else (1, 3)
    flat = torch.zeros(tensor.numel() * step + start, dtype=tensor.dtype)
    strides = [stride * step for stride in torch.empty(tensor.shape, device="meta").stride()]
    return flat.as_strided(tensor.shape, strides, start).copy_(tensor)
