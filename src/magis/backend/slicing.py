"""The same call on fewer rows: large operators are measured on a slice and scaled (ADR 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException

from magis.aten.convert import overload, spec_of, torch_dtype
from magis.backend.operands import arguments
from magis.errors import PlanError
from magis.ir.args import Slot
from magis.ir.graph import Call, TensorSpec

_ROWS_IN: dict[str, tuple[int, ...]] = {
    "mm": (0,),
    "addmm": (1,),
    "bmm": (0, 1),
    "baddbmm": (0, 1, 2),
    "convolution": (0,),
    "convolution_backward": (0, 1),
    "embedding": (1,),
    "embedding_dense_backward": (0, 1),
    "nll_loss_forward": (0, 1),
    "nll_loss_backward": (1, 2),
}
"""Positional arguments whose first dimension counts rows (images, tokens, matrices of a batch)."""
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError, PlanError, UnsupportedFakeTensorException)


def with_fewer_rows(call: Call, fraction: float) -> Call | None:
    """The call with about `fraction` of the rows of its first dimension, its other arguments unchanged.

    Rows are the first dimension of the arguments listed in `_ROWS_IN`, for attention of everything that has as many,
    for other operators of every input of the highest rank. The sliced call is checked on fake tensors; None when there
    are no rows or the operator does not take the slice. The caller compares the work to see that it shrank."""
    carriers = _carriers(call)
    lengths = {call.inputs[i].shape[0] for i in carriers}
    if len(lengths) != 1:
        return None
    length = lengths.pop()
    rows = max(1, int(length * fraction))
    rows -= rows % 8 if rows > 8 else 0
    if rows >= length:
        return None
    inputs = tuple(_cut(spec, rows) if i in carriers else spec for i, spec in enumerate(call.inputs))
    return _inferred(replace(call, inputs=inputs))


def _carriers(call: Call) -> set[int]:
    """Numbers of the inputs whose first dimension counts rows."""
    packet = call.op.split(".")[1]
    if packet in _ROWS_IN:
        given = (call.args[p] for p in _ROWS_IN[packet] if p < len(call.args))
        return {slot.index for slot in given if isinstance(slot, Slot) and call.inputs[slot.index].shape}
    rank = max((len(spec.shape) for spec in call.inputs), default=0)
    if rank == 0:
        return set()
    length = max(call.inputs, key=lambda spec: (len(spec.shape), spec.numel)).shape[0]
    least = 3 if "attention" in packet else rank
    return {i for i, s in enumerate(call.inputs) if len(s.shape) >= least and s.shape[0] == length}


def _cut(spec: TensorSpec, rows: int) -> TensorSpec:
    """The type of a tensor with fewer rows, in the same order of dimensions and without the gap."""
    length, step = spec.shape[0], spec.strides[0]
    span = length * step

    def stride(old: int) -> int:
        return old // span * rows * step if span and old >= span and old % span == 0 else old

    cut = replace(spec, shape=(rows, *spec.shape[1:]), strides=(step, *map(stride, spec.strides[1:])))
    return replace(cut, storage_bytes=cut.nbytes, alias_of=None, offset=0)


def _inferred(call: Call) -> Call | None:
    """The call with the outputs that the operator gives for its inputs; None when it refuses them."""
    try:
        function: Callable[..., Any] = overload(call.op)
        with FakeTensorMode(), torch.no_grad():
            tensors = [torch.empty_strided(s.shape, s.strides, dtype=torch_dtype(s.dtype)) for s in call.inputs]
            args, kwargs = arguments(call, tensors)
            made = pytree.tree_leaves(function(*args, **kwargs), is_leaf=lambda leaf: leaf is None)
    except _REFUSALS:
        return None
    if len(made) != len(call.outputs):
        return None
    outputs: list[TensorSpec | None] = []
    for tensor, old in zip(made, call.outputs):
        if old is None or not isinstance(tensor, torch.Tensor):
            outputs.append(None)
        else:
            outputs.append(replace(spec_of(tensor, old.alias_of, old.writes), device=old.device))
    return replace(call, outputs=tuple(outputs))
