"""Operator calls and literals as Python text, and the globals that the text needs.

Security: nothing of a plan is copied into the text. Operators resolve through PyTorch's registry and appear under
identifiers made here, keyword names must be those of the operator, strings are printed by `repr`, and every other
literal by its type.
"""

from __future__ import annotations

import keyword
import math
import re
from typing import Any

import torch

from magis.aten.convert import overload, python_literal
from magis.backend import naming
from magis.backend.random_state import random_state, set_random_state
from magis.errors import PlanError
from magis.ir.args import Arg, Slot, Symbol
from magis.ir.dtype import DType
from magis.ir.graph import Call

_RESERVED = {
    "torch",
    "range",
    "complex",
    "inf",
    "nan",
    "inputs",
    "step",
    "current",
    "store",
    "load",
    "wait",
    "_",
    *keyword.kwlist,
}
_TAKEN = re.compile(r"part\d*|draw\d+|.*_\d+")  # loop counters, generator states, registers


class Printer:
    """Prints calls; `names` are the globals for the text printed so far."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {
            "torch": torch,
            "inf": math.inf,
            "nan": math.nan,
            "random_state": random_state,
            "set_random_state": set_random_state,
        }
        self._operators: dict[str, tuple[str, str, frozenset[str]]] = {}

    def call(self, call: Call, tensors: list[str]) -> str:
        """The call as an expression; `tensors` are the expressions of its inputs."""
        name, _, keywords = self._operator(call.op)
        written = [self.literal(value, tensors) for value in call.args]
        for key, value in call.kwargs:
            if key not in keywords:
                raise PlanError(f"{call.op} takes no argument named {key!r:.80}")
            written.append(f"{key}={self.literal(value, tensors)}")
        return f"{name}({', '.join(written)})"

    def returns(self, op: str) -> str:
        """What a call of the operator gives: "one" tensor or number, "many" in a tuple or list, or "nothing"."""
        return self._operator(op)[1]

    def literal(self, value: Arg, tensors: list[str]) -> str:
        """A literal, or the expression of the tensor in a slot."""
        match value:
            case Slot(index):
                return tensors[index]
            case tuple():
                return f"[{', '.join([self.literal(item, tensors) for item in value])}]"
            case DType():
                return str(python_literal(value))
            case Symbol():
                return self._symbol(value)
            case complex():
                return f"complex({value.real!r}, {value.imag!r})"
            case None | bool() | int() | float() | str():
                return repr(value)
        raise PlanError(f"no literal form for an argument of type {type(value).__name__}")

    def device(self, name: str) -> str:
        """A device as a global, so that it is made once."""
        try:
            device = torch.device(name)
        except RuntimeError:
            raise PlanError(f"this PyTorch knows no device {name!r:.80}") from None
        alias = naming.identifier(str(device))
        self.names[alias] = device
        return alias

    def _symbol(self, symbol: Symbol) -> str:
        if symbol.kind == "device":
            return self.device(symbol.name)
        constant = getattr(torch, symbol.name, None)
        if not isinstance(constant, (torch.layout, torch.memory_format)):
            raise PlanError(f"this PyTorch has no {symbol.kind} {symbol.name!r:.80}")
        return str(constant)

    def _operator(self, op: str) -> tuple[str, str, frozenset[str]]:
        known = self._operators.get(op)
        if known is None:
            found: Any = overload(op)
            if not isinstance(found, torch._ops.OpOverload):
                raise PlanError(f"{op!r:.80} is not an operator that a step can run")
            alias = self._alias(op)
            # The overload's own callable: what OpOverload.__call__ forwards to, without the Python frame.
            self.names[alias] = getattr(found, "_op", found)
            keywords = frozenset(str(argument.name) for argument in found._schema.arguments)
            known = self._operators[op] = (alias, _returns(found), keywords)
        return known

    def _alias(self, op: str) -> str:
        _, _, rest = op.partition(".")
        packet, _, name = rest.partition(".")
        for candidate in (packet, f"{packet}_{name}", op):
            alias = naming.identifier(candidate)
            alias += "_" if packet.endswith("_") and candidate == packet else ""  # add_ writes in place
            if alias not in self.names and alias not in _RESERVED and not _TAKEN.fullmatch(alias):
                return alias
        return f"{naming.identifier(op)}_op{len(self._operators)}"


def _returns(op: Any) -> str:
    results = op._schema.returns
    if len(results) != 1:
        return "many" if results else "nothing"
    return "many" if str(results[0].type).startswith("List[") else "one"
