"""What an operator call gives for inputs of other sizes: asked of PyTorch on fake tensors, remembered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.utils import _pytree as pytree

from magis.aten.convert import overload, python_literal, spec_of, torch_dtype
from magis.errors import PlanError
from magis.fission.parts import CannotInferError
from magis.ir.args import Arg, Slot
from magis.ir.graph import Call, TensorSpec
from magis.ops.registry import rule_for

_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError, PlanError, UnsupportedFakeTensorException)


@lru_cache(maxsize=1 << 16)
def infer(call: Call) -> tuple[TensorSpec | None, ...]:
    """The outputs of a call whose inputs or arguments were resized. `call.outputs` are those of the original: from
    them come the number of results, which share an input's storage, and devices.

    Raises CannotInferError when PyTorch refuses the call, or gives results of another kind."""
    own = rule_for(call.op).types(call)
    if own is not None:
        return own
    try:
        function: Callable[..., Any] = overload(call.op)
        with _quiet(), _without_data(call), torch.no_grad():
            tensors = [_fake(spec) for spec in call.inputs]
            args = [_real(value, tensors) for value in call.args]
            kwargs = {name: _real(value, tensors) for name, value in call.kwargs}
            made = pytree.tree_leaves(function(*args, **kwargs), is_leaf=lambda leaf: leaf is None)
    except _REFUSALS as error:
        raise CannotInferError(f"{call.op}: {str(error).splitlines()[0]:.200}") from None
    if len(made) != len(call.outputs):
        raise CannotInferError(f"{call.op} gives {len(made)} results where it gave {len(call.outputs)}")
    return tuple(_typed(tensor, old) for tensor, old in zip(made, call.outputs))


def _without_data(call: Call) -> AbstractContextManager[Any]:
    """Where tensors have no elements. Views are made on the meta device, whose kernels are the real ones: fake tensors
    give a layout to some that PyTorch refuses, such as strides (224, 112, 8, 1) of shape (3, 1, 14, 8) as (42, 8)."""
    views = all(spec is None or spec.alias_of is not None for spec in call.outputs)
    return cast(AbstractContextManager[Any], torch.device("meta") if views else FakeTensorMode())


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs a traceback for what it refuses; here a refusal is an answer."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _real(value: Arg, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, Slot):
        return tensors[value.index]
    if isinstance(value, tuple):
        return [_real(item, tensors) for item in value]
    return python_literal(value)


def _fake(spec: TensorSpec) -> torch.Tensor:
    """A fake tensor of that layout, with room before it for its offset."""
    extent = 1 + sum((length - 1) * stride for length, stride in zip(spec.shape, spec.strides) if length)
    flat = torch.empty(extent + spec.offset, dtype=torch_dtype(spec.dtype))
    return flat.as_strided(spec.shape, spec.strides, spec.offset)


def _typed(tensor: Any, old: TensorSpec | None) -> TensorSpec | None:
    if old is None or not isinstance(tensor, torch.Tensor):
        return None
    spec = replace(spec_of(tensor, old.alias_of, old.writes), device=old.device)
    return spec if old.alias_of is not None or spec.storage_bytes == spec.nbytes else _own(spec)


def _own(spec: TensorSpec) -> TensorSpec:
    return replace(spec, storage_bytes=max(spec.nbytes, spec.storage_bytes))
