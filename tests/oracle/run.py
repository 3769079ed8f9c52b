"""The oracle: runs an operator call for real on small tensors and compares with what its rule says.

`check_call` returns the problems it finds, in words; none when rule and execution agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from magis.aten.convert import overload, python_literal, spec_of, torch_dtype
from magis.ir.args import Arg, Slot
from magis.ir.graph import Call, TensorSpec
from magis.ops.registry import rule_for
from magis.ops.registry import rules as all_rules
from magis.ops.rule import OpRule, Sample, T

UNDEFINED = rule_for("aten.empty.memory_format").ops
"""Results hold whatever the memory held."""


def rules() -> dict[str, OpRule]:
    """The rules of PyTorch's operators."""
    return {op: rule for op, rule in all_rules().items() if op.startswith("aten.")}


@dataclass
class Case:
    """A call and tensors for its inputs."""

    call: Call
    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor | None] = field(default_factory=list)


def case_of(sample: Sample, device: str = "cpu") -> Case:
    """The sample with random tensors, and with the results that PyTorch gives on that device."""
    generator = torch.Generator().manual_seed(0)
    tensors: list[torch.Tensor] = []

    def template(value: Any) -> Arg:
        if isinstance(value, T):
            tensors.append(_random(_spec(value), value.high, generator).to(device))
            return Slot(len(tensors) - 1)
        if isinstance(value, tuple):
            return tuple(template(item) for item in value)
        return value  # type: ignore[no-any-return]

    args = tuple(template(value) for value in sample.args)
    kwargs = tuple((name, template(value)) for name, value in sample.kwargs)
    call = Call(sample.op, args, kwargs, tuple(spec_of(tensor) for tensor in tensors), ())
    outputs = execute(call, copies(tensors))
    specs = tuple(None if out is None else spec_of(out) for out in outputs)
    return Case(replace(call, outputs=specs), tensors, outputs)


def case_for(call: Call, highs: tuple[int, ...] | None = None) -> Case:
    """A call from a graph with random tensors. Integers are below `highs`, one for each input, and zero without:
    a valid index everywhere."""
    generator = torch.Generator().manual_seed(0)
    bounds = highs or tuple(1 for _ in call.inputs)
    return Case(call, [_random(spec, bound, generator) for spec, bound in zip(call.inputs, bounds)])


def check_call(call: Call, highs: tuple[int, ...] | None = None) -> list[str]:
    """Problems of one call from a graph, run on the CPU."""
    return check(case_for(call, highs))


def check(case: Case) -> list[str]:
    """Problems of one call with given tensors."""
    rule = rule_for(case.call.op)
    if not rule.known:
        return [f"{case.call.op} has no rule"]
    tensors = copies(case.tensors)
    torch.manual_seed(0)
    outputs = execute(case.call, tensors)
    problems = list(_layout_problems(case.call, outputs))
    if problems:
        return problems
    problems += _alias_problems(case.call, tensors, outputs)
    problems += _write_problems(case, tensors)
    problems += _random_problems(case, outputs)
    problems += cost_problems(case.call, tensors, outputs)
    return problems


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors in storages of their own, strides and offsets kept."""
    result = []
    for tensor in tensors:
        if tensor.is_meta:
            result.append(tensor)
            continue
        storage = tensor.untyped_storage().clone()
        copy = torch.empty(0, dtype=tensor.dtype)
        result.append(copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride()))
    return result


def execute(call: Call, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The call's results; None for those that are no tensor."""
    args = [_filled(value, tensors) for value in call.args]
    kwargs = {name: _filled(value, tensors) for name, value in call.kwargs}
    result = overload(call.op)(*args, **kwargs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [item if isinstance(item, torch.Tensor) else None for item in results]


def _filled(value: Arg, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, Slot):
        return tensors[value.index]
    if isinstance(value, tuple):
        return [_filled(item, tensors) for item in value]
    return python_literal(value)


def _spec(wanted: T) -> TensorSpec:
    strides = wanted.strides or torch.empty(wanted.shape, device="meta").stride()
    return TensorSpec(wanted.shape, tuple(strides), wanted.dtype, 0)


def _random(spec: TensorSpec, high: int, generator: torch.Generator) -> torch.Tensor:
    """A tensor of that layout: normal numbers, booleans, integers below `high`; `high == 0`: numbers in (0, 1)."""
    dtype = torch_dtype(spec.dtype)
    extent = sum((length - 1) * stride for length, stride in zip(spec.shape, spec.strides)) + 1
    size = spec.offset + (extent if spec.numel else 0)
    if dtype is torch.bool:
        flat = torch.rand(size, generator=generator) < 0.5
    elif dtype.is_complex:
        flat = torch.randn(size, generator=generator, dtype=dtype)
    elif not dtype.is_floating_point:
        flat = torch.randint(max(high, 1), (size,), generator=generator).to(dtype)
    elif high == 0:
        flat = torch.rand(size, generator=generator).clamp(0.01, 0.99).to(dtype)
    else:
        flat = torch.randn(size, generator=generator).to(dtype)
    return flat.as_strided(spec.shape, spec.strides, spec.offset)


def _layout_problems(call: Call, outputs: list[torch.Tensor | None]) -> Iterator[str]:
    if len(outputs) != len(call.outputs):
        yield f"{len(outputs)} results, but the call has {len(call.outputs)}"
        return
    for number, (spec, out) in enumerate(zip(call.outputs, outputs)):
        if (spec is None) != (out is None):
            yield f"result {number} is {'a tensor' if out is not None else 'no tensor'}, the call says otherwise"
        elif spec is not None and out is not None:
            real = spec_of(out)
            if (layout(real), real.dtype) != (layout(spec), spec.dtype):
                yield f"result {number} is {real}, the call says {spec}"


def layout(spec: TensorSpec) -> tuple[tuple[int, int], ...]:
    """Lengths and strides; the stride of a length of 1 means nothing."""
    return tuple((length, stride if length > 1 else 0) for length, stride in zip(spec.shape, spec.strides))


def _alias_problems(call: Call, tensors: list[torch.Tensor], outputs: list[torch.Tensor | None]) -> Iterator[str]:
    owner = {tensor.untyped_storage()._cdata: place for place, tensor in reversed(list(enumerate(tensors)))}
    declared = rule_for(call.op).aliases(call)
    if len(declared) != len(outputs):
        yield f"aliases of {len(declared)} results, there are {len(outputs)}"
        return
    seen: dict[int, int] = {}
    for number, (out, said) in enumerate(zip(outputs, declared)):
        if out is None:
            if said is not None:
                yield f"result {number} is no tensor, the rule says it aliases input {said}"
            continue
        storage = out.untyped_storage()._cdata
        if owner.get(storage) != said:
            yield f"result {number} aliases input {owner.get(storage)}, the rule says {said}"
        if said is None and storage in seen:
            yield f"results {seen[storage]} and {number} share a storage"
        seen[storage] = number


def _write_problems(case: Case, after: list[torch.Tensor]) -> Iterator[str]:
    """Which inputs changed, against what the rule and the schema say."""
    rule = rule_for(case.call.op)
    schema = overload(case.call.op)._schema
    written = [place for place, (old, new) in enumerate(zip(case.tensors, after)) if not same_bits(old, new)]
    if rule.recomputable:
        if written or schema.is_mutable:
            yield f"inputs {written} are overwritten, the rule says that it may be recomputed"
    elif schema.is_mutable and "batch_norm" not in case.call.op:
        first = schema.arguments[0].alias_info
        if first is None or not first.is_write:
            yield "its schema does not write the first argument"
        if set(written) - {0}:
            yield f"inputs {written} are overwritten, not only the first"


def _random_problems(case: Case, first: list[torch.Tensor | None]) -> Iterator[str]:
    """Two runs from one generator state agree; the generator is used exactly when the rule says so."""
    if case.call.op in UNDEFINED:
        return
    torch.manual_seed(0)
    before = torch.get_rng_state()
    second = execute(case.call, copies(case.tensors))
    used = not torch.equal(before, torch.get_rng_state())
    if not all(same_bits(a, b) for a, b in zip(first, second)):
        yield "two runs from the same generator state differ"
    if used != rule_for(case.call.op).draws(case.call):
        yield f"it {'uses' if used else 'does not use'} the random generator, the rule says otherwise"
    if not used:
        torch.manual_seed(1)
        third = execute(case.call, copies(case.tensors))
        if not all(same_bits(a, b) for a, b in zip(first, third)):
            yield "its results depend on the random generator"


def cost_problems(call: Call, tensors: list[torch.Tensor], outputs: list[torch.Tensor | None]) -> Iterator[str]:
    """Launches and flops against what there is to do, and against PyTorch's own count."""
    rule = rule_for(call.op)
    owned = any(spec is not None and alias is None for spec, alias in zip(call.outputs, rule.aliases(call)))
    kernels = rule.kernels(call)
    if not kernels and owned and call.op not in UNDEFINED:
        yield "it makes a tensor but launches nothing"
    if any(kernel.nbytes < 0 for kernel in kernels):
        yield "a kernel moves fewer than no bytes"
    count = flop_registry.get(overload(call.op)._overloadpacket)
    if count is None:
        return
    args = [_filled(value, tensors) for value in call.args]
    kwargs = {name: _filled(value, tensors) for name, value in call.kwargs}
    results = outputs[0] if len(outputs) == 1 else tuple(outputs)
    expected = count(*args, **kwargs, out_val=results)
    if re.match("aten._(flash|efficient)_attention", call.op):
        return  # it takes [batch, length, heads, width] for [batch, heads, length, width]
    if "convolution_backward" in call.op and call.args[9] != 1:
        return  # it counts the weight gradient of a grouped convolution as if it had one group
    if rule.flops(call) != expected:
        yield f"{rule.flops(call)} flops, PyTorch counts {expected}"


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors hold the same bits, NaNs included."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = [t.resolve_conj().resolve_neg().reshape(-1) for t in (a, b)]
    return torch.equal(*(t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in flat))
