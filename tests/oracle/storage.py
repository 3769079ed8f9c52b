"""Storages of results: what is captured from fake tensors, corrected by the rule, against real kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from magis.aten.convert import spec_of
from magis.ops.registry import rule_for
from oracle.run import Case, copies, execute, layout


def storage_problems(case: Case) -> Iterator[str]:
    """Where a traced result has other strides or another storage than the real one."""
    call, rule = case.call, rule_for(case.call.op)
    real = execute(call, copies(case.tensors))
    try:
        with FakeTensorMode() as mode:
            fake = execute(call, [mode.from_tensor(tensor) for tensor in case.tensors])
    except DynamicOutputShapeException:
        return
    traced = replace(call, outputs=tuple(None if item is None else spec_of(item) for item in fake))
    for number, (out, spec) in enumerate(zip(real, traced.outputs)):
        if spec is None or rule.aliases(call)[number] is not None:
            continue
        said = rule.storage_bytes(traced, number)
        if out is None:
            if said:
                yield f"result {number} is no tensor, it is given {said} bytes"
            continue
        if (layout(spec), spec.offset) != (layout(spec_of(out)), out.storage_offset()):
            yield f"result {number} is traced as {spec}, it is {spec_of(out)}"
        if said != out.untyped_storage().nbytes():
            yield f"result {number} is given {said} bytes, it has {out.untyped_storage().nbytes()}"
