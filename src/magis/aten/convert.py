"""Between PyTorch objects and the core's torch-free ones: dtypes, literals, tensor types, operator names."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from magis.errors import PlanError
from magis.ir.args import Arg, Slot, Symbol
from magis.ir.dtype import DType
from magis.ir.graph import TensorSpec

_TORCH_NAMES = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8E4M3FN: "float8_e4m3fn",
    DType.F8E5M2: "float8_e5m2",
    DType.C64: "complex64",
    DType.C128: "complex128",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I16: "int16",
    DType.I8: "int8",
    DType.U64: "uint64",
    DType.U32: "uint32",
    DType.U16: "uint16",
    DType.U8: "uint8",
    DType.BOOL: "bool",
}
_TO_TORCH = {dtype: getattr(torch, name) for dtype, name in _TORCH_NAMES.items()}
_FROM_TORCH = {torch_dtype: dtype for dtype, torch_dtype in _TO_TORCH.items()}


def torch_dtype(dtype: DType) -> torch.dtype:
    """PyTorch's element type."""
    return _TO_TORCH[dtype]  # type: ignore[no-any-return]


def core_dtype(dtype: torch.dtype) -> DType:
    """The core's element type. Raises KeyError for types that no operator of a step computes with."""
    return _FROM_TORCH[dtype]


def literal(value: Any) -> Arg:
    """A non-tensor argument as the core writes it. Raises TypeError for objects that have no literal form."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(literal(item) for item in value)
    if isinstance(value, torch.dtype):
        return core_dtype(value)
    if isinstance(value, torch.device):
        return Symbol("device", str(value))
    if isinstance(value, (torch.layout, torch.memory_format)):
        kind = "layout" if isinstance(value, torch.layout) else "memory_format"
        return Symbol(kind, str(value).removeprefix("torch."))
    raise TypeError(f"no literal form for {type(value).__name__}")


def python_literal(value: Arg) -> Any:
    """A literal back as the PyTorch object; slots must have been substituted before."""
    if isinstance(value, DType):
        return torch_dtype(value)
    if isinstance(value, Symbol):
        return torch.device(value.name) if value.kind == "device" else getattr(torch, value.name)
    if isinstance(value, tuple):
        return [python_literal(item) for item in value]
    assert not isinstance(value, Slot)
    return value


def spec_of(tensor: torch.Tensor, alias_of: int | None = None, writes: bool = False) -> TensorSpec:
    """The type and memory of a real or fake tensor."""
    return TensorSpec(
        shape=tuple(map(int, tensor.shape)),
        strides=tuple(map(int, tensor.stride())),
        dtype=core_dtype(tensor.dtype),
        storage_bytes=0 if alias_of is not None else int(tensor.untyped_storage().nbytes()),
        alias_of=alias_of,
        writes=writes,
        offset=int(tensor.storage_offset()),
        device=str(tensor.device),
    )


@cache
def overload(op: str) -> Any:
    """The PyTorch operator of a name such as `aten.mm.default`, through PyTorch's registry.

    Raises PlanError when this PyTorch has no such operator."""
    namespace, _, rest = op.partition(".")
    packet, _, name = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), name)
    except (AttributeError, RuntimeError):
        raise PlanError(f"this PyTorch ({torch.__version__}) has no operator {op}") from None


def op_name(op: Any) -> str:
    """The name under which the core knows a PyTorch operator overload."""
    return str(op)
