"""Regions as loops: whole results allocated once, parts one after the other, written or accumulated in place.

before   h = f(x);  y = g(h)                      (x, y whole; h whole)
after    y = allocate();  for each part: h' = f(slice of x);  y[slice] = g(h')
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from magis.fission.parts import CannotSplitError, Infer, Part, Scope, loops_of, part
from magis.fission.region import boundary
from magis.fission.tree import Fission, sections
from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call, Graph, NodeId, TensorSpec, Value, contiguous_strides
from magis.lower.routine import (
    Accumulate,
    Allocate,
    Compute,
    Free,
    Instruction,
    Loop,
    Piece,
    Register,
    Slice,
    Write,
)
from magis.ops.loop import Axis, Concat, Reduce, Same, inner
from magis.ops.registry import rule_for

_START = {"sum": 0.0, "average": 0.0, "max": float("-inf"), "min": float("inf")}
_HALF = (DType.F16, DType.BF16)

Number = Callable[[Value | None], Register]
"""Gives a new register, for a value of the graph or for what only a loop needs."""


@dataclass
class _Frame:
    """Registers of the values of one body, and how often each is still read in it."""

    registers: dict[Value, Register] = field(default_factory=dict)
    slices: dict[tuple[Value, Axis], Register] = field(default_factory=dict)
    left: Counter[Register] = field(default_factory=Counter)


def lower_region(
    fission: Fission,
    scope: Scope,
    order: Sequence[NodeId],
    outside: Mapping[Value, Register],
    number: Number,
    infer: Infer,
) -> tuple[list[Instruction], dict[Value, Register]]:
    """The instructions of a region whose nodes run in `order`, and the registers of its results. `outside` has the
    registers of what it reads. Raises CannotSplitError."""
    return _Region(fission, scope, order, outside, number, infer).run()


class _Region:
    def __init__(
        self,
        fission: Fission,
        scope: Scope,
        order: Sequence[NodeId],
        outside: Mapping[Value, Register],
        number: Number,
        infer: Infer,
    ) -> None:
        self.fission, self.scope, self.order = fission, scope, order
        self.outside, self.number, self.infer = outside, number, infer
        self.graph: Graph = scope.graph
        self.outputs = boundary(self.graph, fission.region).outputs
        self.loops = loops_of(fission, scope)
        self.units = units(fission.children, order)
        self.whole: dict[Value, Register] = {}
        self.specs: dict[Value, TensorSpec] = {}

    def run(self) -> tuple[list[Instruction], dict[Value, Register]]:
        body: list[Instruction] = []
        for value in self.outputs:
            body += self._allocate(value)
        before = 0
        length = self._length()
        for count, size in sections(length, min(self.fission.parts, length)):
            body.append(Loop(count, tuple(self._part(size, before)), self._label()))
            before += count * size
        results = {}
        for value in self.outputs:
            more, results[value] = self._finish(value)
            body += more
        return body, results

    def _label(self) -> str:
        return self.fission.dimension

    def _length(self) -> int:
        return next(iter(self.loops.values())).length

    def _role(self, value: Value) -> Concat | Reduce | Same:
        role = self.loops[value.node].roles[value.output]
        if not isinstance(role, (Concat, Reduce, Same)):
            raise CannotSplitError(f"parts of %{value.node} do not give what is read outside")
        return role

    def _allocate(self, value: Value) -> list[Instruction]:
        role, spec = self._role(value), self.scope.spec(value)
        fill: float | None = None
        if isinstance(role, Reduce):
            fill = _START[role.by]
            spec = replace(spec, strides=contiguous_strides(spec.shape))
            if self.fission.wide and spec.dtype in _HALF:
                spec = replace(spec, dtype=DType.F32)
        spec = replace(spec, storage_bytes=spec.nbytes, alias_of=None, writes=False, offset=0)
        register = self.whole[value] = self.number(value)
        self.specs[value] = spec
        if self.loops[value.node].once is not None:
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

    def _part(self, size: int, before: int) -> list[Instruction]:
        """The body for parts of one size, the first of which starts at position `before`."""
        found = part(self.fission, self.scope, size, self.infer, self.loops)
        return _Body(self, found, before).run()


class _Body:
    """One part's instructions."""

    def __init__(self, region: _Region, found: Part, before: int) -> None:
        self.region, self.part, self.before = region, found, before
        self.graph = region.graph
        self.inside = found.inside(region.scope) if region.fission.children else None
        self.frame = _Frame()
        self.left: Counter[Value] = Counter()
        self.slices_left: Counter[tuple[Value, Axis]] = Counter()
        self.whole_outputs = set(region.outputs)
        for unit in region.units:
            for value, axis in self._reads(unit):
                if value.node in region.fission.region:
                    self.left[value] += 1
                elif axis is not None:
                    self.slices_left[value, axis] += 1

    def _reads(self, unit: NodeId | Fission) -> list[tuple[Value, Axis | None]]:
        """What a node, or a region inside, reads: values, each with the axis along which it is sliced."""
        if isinstance(unit, Fission):
            found: dict[tuple[Value, Axis | None], None] = {}
            for node_id in sorted(unit.region):
                node = self.graph.nodes[node_id]
                for value, axis in zip(node.inputs, self.region.loops[node_id].inputs):
                    if value.node not in unit.region:
                        found[value, axis] = None
            return list(found)
        return list(zip(self.graph.nodes[unit].inputs, self.region.loops[unit].inputs))

    def run(self) -> list[Instruction]:
        body: list[Instruction] = []
        for unit in self.region.units:
            registers = []
            for value, axis in self._reads(unit):
                more, register = self._operand(value, axis)
                body += more
                registers.append(register)
            body += self._nested(unit, registers) if isinstance(unit, Fission) else self._node(unit, registers)
            dead = self._dead(unit)
            if dead:
                body.append(Free(tuple(dead)))
        return body

    def _operand(self, value: Value, axis: Axis | None) -> tuple[list[Instruction], Register]:
        if value.node in self.region.fission.region:
            return [], self.frame.registers[value]
        register = self.region.outside[value]
        if axis is None:
            return [], register
        key = (value, axis)
        if key in self.frame.slices:
            return [], self.frame.slices[key]
        found = self.frame.slices[key] = self.region.number(value)
        spec = self.part.slices[key]
        piece = piece_of(self.region.scope.spec(value), axis, self.part.length, self.before)
        return [Slice(found, register, spec, piece)], found

    def _dead(self, unit: NodeId | Fission) -> list[Register]:
        dead = []
        for value, axis in self._reads(unit):
            if value.node in self.region.fission.region:
                self.left[value] -= 1
                if not self.left[value]:
                    dead.append(self.frame.registers[value])
            elif axis is not None:
                self.slices_left[value, axis] -= 1
                if not self.slices_left[value, axis]:
                    dead.append(self.frame.slices[value, axis])
        for value in self._made(unit):
            if not self.left[value] and value in self.frame.registers:
                dead.append(self.frame.registers[value])
        return dead

    def _made(self, unit: NodeId | Fission) -> list[Value]:
        if isinstance(unit, Fission):
            return list(boundary(self.graph, unit.region).outputs)
        outputs = self.part.calls[unit].outputs
        return [Value(unit, i) for i, spec in enumerate(outputs) if spec is not None]

    def _node(self, node_id: NodeId, registers: list[Register]) -> list[Instruction]:
        node, call, loop = self.graph.nodes[node_id], self.part.calls[node_id], self.region.loops[node_id]
        if loop.once is not None:
            call, _ = rule_for(node.op).without_bias(call, loop)
            registers = [*registers[: loop.once], *registers[loop.once + 1 :]]
        into = self._accumulated(node_id, call, registers)
        if into is not None:
            return [into]
        outputs: list[Register | None] = []
        for i, spec in enumerate(call.outputs):
            outputs.append(None if spec is None else self.region.number(Value(node_id, i)))
        for value, register in ((Value(node_id, i), r) for i, r in enumerate(outputs)):
            if register is not None:
                self.frame.registers[value] = register
        compute = Compute(node_id, call, tuple(registers), tuple(outputs), node.origin)
        return [compute, *(i for v in self._made(node_id) if v in self.whole_outputs for i in self._hand_out(v))]

    def _accumulated(self, node_id: NodeId, call: Call, registers: list[Register]) -> Compute | None:
        """The node as one that adds its partial sums straight into the accumulator, where its operator can."""
        value = Value(node_id)
        if value not in self.whole_outputs or self.left[value] or len(call.outputs) != 1:
            return None
        role, spec = self.region.loops[node_id].roles[0], self.region.specs[value]
        into = rule_for(call.op).adding(call) if role == Reduce("sum") else None
        if into is None or call.outputs[0] is None or spec.dtype is not call.outputs[0].dtype:
            return None
        op, args, kwargs = into
        result = replace(spec, storage_bytes=0, alias_of=len(call.inputs), writes=True)
        adding = Call(op, args, kwargs, (*call.inputs, spec), (result,))
        node = self.graph.nodes[node_id]
        made = self.region.number(value)
        self.frame.registers[value] = made
        return Compute(node_id, adding, (*registers, self.region.whole[value]), (made,), node.origin)

    def _hand_out(self, value: Value) -> list[Instruction]:
        """Puts a part of a result where it belongs."""
        source, target = self.frame.registers[value], self.region.whole[value]
        role, whole = self.region._role(value), self.region.specs[value]
        if isinstance(role, Concat):
            return [Write(target, source, piece_of(whole, role.axis, self.part.length, self.before))]
        if isinstance(role, Same):
            shape = whole.shape
            return [Write(target, source, Piece(0, shape[0], step=0))] if shape else []
        if role.by == "average":
            return [Accumulate(target, source, scale=self.part.length / self.region._length())]
        return [Accumulate(target, source, role.by)]

    def _nested(self, fission: Fission, registers: list[Register]) -> list[Instruction]:
        assert self.inside is not None
        reads = [value for value, _ in self._reads(fission)]
        if len(set(reads)) < len(reads):
            raise CannotSplitError(
                f"a region inside reads one tensor along two dimensions ({self.region.fission.dimension})"
            )
        order = [n for n in self.region.order if n in fission.region]
        outside = dict(zip(reads, registers))
        scope = self._with_slices(fission)
        body, results = lower_region(fission, scope, order, outside, self.region.number, self.region.infer)
        self.frame.registers.update(results)
        for value in results:
            if value in self.whole_outputs:
                body += self._hand_out(value)
        return body

    def _with_slices(self, fission: Fission) -> Scope:
        """The sizes in this part, as a region inside sees them: what both read from outside is this part's slice."""
        assert self.inside is not None
        return self.inside.seeing(
            {
                value: self.part.slices[value, axis]
                for value, axis in self._reads(fission)
                if axis is not None and value.node not in self.region.fission.region
            }
        )


def units(regions: Sequence[Fission], order: Sequence[NodeId]) -> list[NodeId | Fission]:
    """What runs in turn: nodes, and each region where its first node stands in the order."""
    region_of = {node: region for region in regions for node in region.region}
    found: list[NodeId | Fission] = []
    seen: set[int] = set()
    for node in order:
        region = region_of.get(node)
        if region is None:
            found.append(node)
        elif id(region) not in seen:
            seen.add(id(region))
            found.append(region)
    return found


def piece_of(whole: TensorSpec, axis: Axis, length: int, before: int) -> Piece:
    """The current part's elements along an axis, in a loop whose first part starts at position `before`."""
    factor = inner(whole.shape, axis)
    return Piece(axis.dim, length * factor, before * factor, axis.outer)


def _tensor(call: Call) -> TensorSpec:
    spec = call.outputs[0]
    assert spec is not None
    return spec
