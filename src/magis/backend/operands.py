"""Real tensors on which a call can be measured: the right layout, and integers that are valid for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch

from magis.aten.convert import overload, python_literal, torch_dtype
from magis.ir.args import Arg, Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call, TensorSpec
from magis.ops.rule import argument, tensor_argument

_ALIGNMENT = 16  # an offset is kept up to this many elements: what it does to alignment, not where it points
_POOL = 1 << 20


def extent(spec: TensorSpec) -> int:
    """Elements from the tensor's first to its last, gaps included: what has to be allocated for it."""
    if spec.numel == 0:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(spec.shape, spec.strides))


def operand_bytes(call: Call) -> int:
    """Bytes that a measurement of the call allocates, for its inputs and its own outputs."""
    inputs = sum(extent(spec) * spec.dtype.nbytes for spec in call.inputs)
    return inputs + sum(spec.nbytes for spec in call.outputs if spec is not None and spec.alias_of is None)


def operands(call: Call, device: str = "cpu") -> list[torch.Tensor]:
    """A tensor for each input: uniform in (-1, 1), random booleans, integers below `index_bound`.

    The same call gets the same values each time; the caller's random generator is left as it is."""
    generator = torch.Generator().manual_seed(0)
    return [_tensor(spec, index_bound(call, i), device, generator) for i, spec in enumerate(call.inputs)]


def arguments(call: Call, tensors: list[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments with the tensors in their slots and literals as PyTorch has them."""

    def real(value: Arg) -> Any:
        if isinstance(value, Slot):
            return tensors[value.index]
        if isinstance(value, tuple):
            return [real(item) for item in value]
        return python_literal(value)

    return [real(value) for value in call.args], {name: real(value) for name, value in call.kwargs}


def _tensor(spec: TensorSpec, bound: int, device: str, generator: torch.Generator) -> torch.Tensor:
    offset = spec.offset % _ALIGNMENT
    flat = torch.empty(extent(spec) + offset, dtype=torch_dtype(spec.dtype))
    _fill(flat, bound, generator)
    return flat.to(device).as_strided(spec.shape, spec.strides, offset)


def _fill(flat: torch.Tensor, bound: int, generator: torch.Generator) -> None:
    """Random values, drawn for at most the first million elements and repeated from there on."""
    head = flat[:_POOL]
    if flat.dtype.is_floating_point and flat.dtype.itemsize > 1:
        head.uniform_(-1, 1, generator=generator)
    elif flat.dtype.is_floating_point or flat.dtype.is_complex:
        head.copy_(torch.empty(head.shape).uniform_(-1, 1, generator=generator))
    else:
        head.copy_(torch.randint(bound, head.shape, generator=generator))
    whole = len(flat) // _POOL * _POOL
    if whole:
        flat[:whole].view(-1, _POOL)[1:].copy_(head)
        flat[whole:].copy_(head[: len(flat) - whole])


def index_bound(call: Call, number: int) -> int:
    """Exclusive upper bound of the values of an integer input.

    2 for booleans and what is not known to be an index, except that unknown operators get only 0, which is
    valid wherever anything is."""
    spec = call.inputs[number]
    if spec.dtype is DType.BOOL:
        return 2
    packet = call.op.split(".")[1]
    rule = _BOUNDS.get(packet)
    bound = rule(call, number) if rule else 2 if is_pointwise(call.op) else 1
    return max(1, min(bound, _largest(spec.dtype)))


@cache
def is_pointwise(op: str) -> bool:
    """Whether PyTorch tags the operator as pointwise."""
    return torch.Tag.pointwise in overload(op).tags


def _largest(dtype: DType) -> int:
    return 1 << min(8 * dtype.nbytes - (dtype.value[0] == "i"), 31)


def _int(value: Arg) -> int:
    return int(value) if isinstance(value, int) else 0


def _rows_of(position: int) -> Callable[[Call, int], int]:
    """Bound: the first dimension of the tensor at that position."""

    def bound(call: Call, number: int) -> int:
        table = tensor_argument(call, position, "")
        return table.shape[0] if table is not None and table.shape else 1

    return bound


def _along(position: int) -> Callable[[Call, int], int]:
    """Bound: the length of argument 0 along the dimension given at `position`."""

    def bound(call: Call, number: int) -> int:
        source = tensor_argument(call, 0, "self")
        return source.shape[_int(argument(call, position, "dim"))] if source is not None and source.shape else 1

    return bound


def _classes(position: int) -> Callable[[Call, int], int]:
    """Bound: how many classes the scores at that position have."""

    def bound(call: Call, number: int) -> int:
        scores = tensor_argument(call, position, "self")
        return scores.shape[1 if len(scores.shape) > 1 else 0] if scores is not None and scores.shape else 1

    return bound


def _indexed(call: Call, number: int) -> int:
    """Bound of an index of `x[i, j, :]`: the length of the dimension that it selects from."""
    source, indices = tensor_argument(call, 0, "self"), argument(call, 1, "indices")
    if source is None or not isinstance(indices, tuple) or Slot(number) not in indices:
        return 1
    return source.shape[indices.index(Slot(number))]


def _scattered(call: Call, number: int) -> int:
    """Bound of the indices into the table whose gradient is made."""
    return _int(argument(call, 2, "num_weights"))


def _pooled(call: Call, number: int) -> int:
    """Bound of positions inside one image."""
    image = tensor_argument(call, 1, "self")
    return prod(image.shape[-2:]) if image is not None else 1


_BOUNDS: dict[str, Callable[[Call, int], int]] = {
    "embedding": _rows_of(0),
    "embedding_dense_backward": _scattered,
    "gather": _along(1),
    "scatter": _along(1),
    "scatter_add": _along(1),
    "scatter_reduce": _along(1),
    "index_select": _along(1),
    "index_add": _along(1),
    "index_copy": _along(1),
    "index_fill": _along(1),
    "index": _indexed,
    "_unsafe_index": _indexed,
    "index_put": _indexed,
    "_unsafe_index_put": _indexed,
    "nll_loss_forward": _classes(0),
    "nll_loss2d_forward": _classes(0),
    "nll_loss_backward": _classes(1),
    "nll_loss2d_backward": _classes(1),
    "max_pool2d_with_indices_backward": _pooled,
}
