"""Arguments of a call by position or keyword, as plain Python types; and names of overloads in bulk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magis.ir.args import Arg, Slot
from magis.ir.graph import Call, TensorSpec
from magis.ops.rule import argument, tensor_argument


def overloads(names: str) -> tuple[str, ...]:
    """The overloads of PyTorch's own operators in a text: `mm.default` becomes `aten.mm.default`."""
    return tuple(f"aten.{name}" for name in names.split())


def ints(value: Arg) -> tuple[int, ...]:
    """A list of integers that may be written as one integer; empty for None."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, tuple) else (int(value),)  # type: ignore[arg-type]


def ints_at(call: Call, position: int, name: str) -> tuple[int, ...]:
    """A list of integers; empty when absent."""
    return ints(argument(call, position, name))


def int_at(call: Call, position: int, name: str, default: int = 0) -> int:
    """One integer."""
    value = argument(call, position, name, default)
    return value if isinstance(value, int) else default


def number_at(call: Call, position: int, name: str, default: float = 1.0) -> float:
    """One number; the default also stands for None."""
    value = argument(call, position, name, default)
    return float(value) if isinstance(value, (int, float)) else default


def flag_at(call: Call, position: int, name: str, default: bool = False) -> bool:
    """One flag; the default also stands for None."""
    value = argument(call, position, name)
    return default if value is None else bool(value)


def input_at(call: Call, position: int, name: str) -> TensorSpec:
    """The type of a tensor argument that is always there."""
    spec = tensor_argument(call, position, name)
    assert spec is not None, f"{call.op} has no tensor {name}"
    return spec


def output_at(call: Call, index: int) -> TensorSpec:
    """The type of a result that is a tensor."""
    spec = call.outputs[index]
    assert spec is not None, f"result {index} of {call.op} is not a tensor"
    return spec


def given(call: Call, tensors: Sequence[Any], position: int, name: str) -> Any:
    """The tensor itself that stands at an argument; None when it is absent."""
    value = argument(call, position, name)
    return tensors[value.index] if isinstance(value, Slot) else None


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of tensors of these shapes together."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*padded))


def wrapped(dims: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Dimensions counted from the end turned into dimensions counted from the start."""
    return tuple(dim % rank if rank else 0 for dim in dims)
