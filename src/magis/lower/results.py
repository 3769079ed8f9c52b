"""Whole results of a region: allocated once, filled by its parts, and finished after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import TypeAlias

from magis.fission.contract import allocated
from magis.fission.parts import CannotSplitError, Infer, Part, Scope
from magis.fission.region import boundary
from magis.fission.tree import Fission
from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call, NodeId, TensorSpec, Value, contiguous_strides
from magis.lower.routine import Accumulate, Allocate, Compute, Free, Instruction, Piece, Register, Write
from magis.ops.loop import Axis, Concat, Loop, Reduce, Same, inner
from magis.ops.registry import rule_for

_START = {"sum": 0.0, "average": 0.0, "max": float("-inf"), "min": float("inf")}
_HALF = (DType.F16, DType.BF16)

Number: TypeAlias = Callable[[Value | None], Register]
"""Gives a new register, for a value of the graph or for what only a loop needs."""


class Results:
    """The results of a region whose nodes run along `loops`; `outside` has the registers of what it reads."""

    def __init__(
        self,
        fission: Fission,
        scope: Scope,
        loops: Mapping[NodeId, Loop],
        outside: Mapping[Value, Register],
        number: Number,
        infer: Infer,
    ) -> None:
        self.fission, self.scope, self.loops = fission, scope, loops
        self.outside, self.number, self.infer = outside, number, infer
        self.graph = scope.graph
        self.outputs = boundary(self.graph, fission.region).outputs
        self.whole: dict[Value, Register] = {}
        self.specs: dict[Value, TensorSpec] = {}

    def begun(self, found: Part) -> frozenset[Value]:
        """Sums that need no memory before the first part, the given one: its results are added to."""
        return frozenset(value for value in self.outputs if self._may_begin(value, found))

    def _may_begin(self, value: Value, found: Part) -> bool:
        role, whole = self.role(value), self.scope.spec(value)
        made = found.calls[value.node].outputs[value.output]
        if not isinstance(role, Reduce) or role.by == "average" or made is None:
            return False
        if self.fission.wide and whole.dtype in _HALF:
            return False
        own = made.alias_of is None and made.storage_bytes == made.nbytes
        return own and (made.shape, made.dtype) == (whole.shape, whole.dtype) and made.is_contiguous

    def begin(self, value: Value, register: Register) -> None:
        """The first part's result is what later parts are added to."""
        spec = self.scope.spec(value)
        self.whole[value] = register
        self.specs[value] = allocated(replace(spec, strides=contiguous_strides(spec.shape)))

    def allocate(self, begun: Set[Value] = frozenset()) -> list[Instruction]:
        """What precedes the loop, but for sums that a part has begun."""
        return [instruction for value in self.outputs if value not in begun for instruction in self._allocate(value)]

    def finish(self) -> tuple[list[Instruction], dict[Value, Register]]:
        """What follows the loop, and the registers of the results then."""
        body: list[Instruction] = []
        registers = {}
        for value in self.outputs:
            more, registers[value] = self._finish(value)
            body += more
        return body, registers

    def hand_out(self, value: Value, source: Register, length: int, before: int) -> list[Instruction]:
        """Puts a part of a result, of `length` positions, where it belongs: in a loop whose first part starts at
        position `before`."""
        target, whole = self.whole[value], self.specs[value]
        role = self.role(value)
        if isinstance(role, Concat):
            return [Write(target, source, piece_of(whole, role.axis, length, before))]
        if isinstance(role, Same):
            return [Write(target, source, Piece(0, whole.shape[0], step=0))] if whole.shape else []
        if role.by == "average":
            return [Accumulate(target, source, scale=length / self.loops[value.node].length)]
        return [Accumulate(target, source, role.by)]

    def role(self, value: Value) -> Concat | Reduce | Same:
        role = self.loops[value.node].roles[value.output]
        if not isinstance(role, (Concat, Reduce, Same)):
            raise CannotSplitError(f"parts of %{value.node} do not give what is read outside")
        return role

    def _allocate(self, value: Value) -> list[Instruction]:
        role, spec = self.role(value), self.scope.spec(value)
        fill: float | None = None
        if isinstance(role, Reduce):
            fill = _START[role.by]
            spec = replace(spec, strides=contiguous_strides(spec.shape))
            if self.fission.wide and spec.dtype in _HALF:
                spec = replace(spec, dtype=DType.F32)
        spec = replace(spec, storage_bytes=spec.nbytes, alias_of=None, writes=False, offset=0)
        register = self.whole[value] = self.number(value)
        self.specs[value] = spec
        if self.loops[value.node].once is not None and self.scope.without_bias(value.node) is None:
            return [Allocate(register, spec), *self._bias(value)]
        return [Allocate(register, spec, fill)]

    def _bias(self, value: Value) -> list[Instruction]:
        """Starts a sum with the bias, which no part adds then."""
        node, loop = self.graph.nodes[value.node], self.loops[value.node]
        assert loop.once is not None
        source = node.inputs[loop.once]
        register, given, whole = self.outside[source], self.scope.spec(source), self.specs[value]
        _, shape = rule_for(node.op).without_bias(self.scope.calls[node.id], loop)
        body: list[Instruction] = []
        dead = []
        for op, target in (("aten.view.default", shape), ("aten.expand.default", whole.shape)):
            call = Call(op, (Slot(0), target), (), (given,), (replace(given, storage_bytes=0, alias_of=0),))
            call = replace(call, outputs=self.infer(call))
            made = self.number(None)
            body.append(Compute(node.id, call, (register,), (made,), node.origin))
            dead.append(made)
            register, given = made, _tensor(call)
        piece = Piece(0, whole.shape[0], step=0)
        return [*body, Write(self.whole[value], register, piece), Free(tuple(dead))]

    def _finish(self, value: Value) -> tuple[list[Instruction], Register]:
        """What follows the loop: half-precision sums that were kept in float32 are rounded once."""
        register, spec, wanted = self.whole[value], self.specs[value], self.scope.spec(value)
        if spec.dtype is wanted.dtype:
            return [], register
        rounded = replace(spec, dtype=wanted.dtype)
        rounded = replace(rounded, storage_bytes=rounded.nbytes)
        call = Call("aten._to_copy.default", (Slot(0),), (("dtype", wanted.dtype),), (spec,), (rounded,))
        result = self.number(value)
        node = self.graph.nodes[value.node]
        return [Compute(node.id, call, (register,), (result,), node.origin), Free((register,))], result


def piece_of(whole: TensorSpec, axis: Axis, length: int, before: int) -> Piece:
    """The current part's elements along an axis, in a loop whose first part starts at position `before`."""
    factor = inner(whole.shape, axis)
    return Piece(axis.dim, length * factor, before * factor, axis.outer)


def _tensor(call: Call) -> TensorSpec:
    spec = call.outputs[0]
    assert spec is not None
    return spec
