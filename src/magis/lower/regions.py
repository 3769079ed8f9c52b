"""Regions as loops: whole results allocated once, parts one after the other, written or accumulated in place.

before   h = f(x);  y = g(h)                      (x, y whole; h whole)
after    y = allocate();  for each part: h' = f(slice of x);  y[slice] = g(h')
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from magis.fission.parts import CannotSplitError, Infer, Part, Scope, loops_of, part
from magis.fission.region import boundary
from magis.fission.tree import Fission, sections
from magis.ir.graph import Call, Graph, NodeId, Value
from magis.lower.halo import lower_halo
from magis.lower.results import Number, Results, piece_of
from magis.lower.routine import (
    Compute,
    Free,
    Instruction,
    Loop,
    Register,
    Slice,
    Wait,
    Write,
)
from magis.lower.transfers import Transfers, is_view
from magis.ops.loop import Axis, Reduce
from magis.ops.registry import rule_for
from magis.ops.swap import LOAD, STORE


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
    if fission.halo:
        return lower_halo(fission, scope, order, outside, number, infer)
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
        self.loops = loops_of(fission, scope)
        self.units = units(fission.children, order)
        self.results = Results(fission, scope, self.loops, outside, number, infer)

    def run(self) -> tuple[list[Instruction], dict[Value, Register]]:
        body: list[Instruction] = []
        before = 0
        length = self._length()
        for number, (count, size) in enumerate(sections(length, min(self.fission.parts, length))):
            found = part(self.fission, self.scope, size, self.infer, self.loops)
            if not number:
                begun = self.results.begun(found)
                body += self.results.allocate(begun)
                if begun:
                    body += map(_standing, _Body(self, found, before, begun).run())
                    count, before = count - 1, size
            if count:
                body.append(Loop(count, tuple(_Body(self, found, before).run()), self.fission.dimension))
                before += count * size
        more, registers = self.results.finish()
        return [*body, *more], registers

    def _length(self) -> int:
        return next(iter(self.loops.values())).length


def _standing(instruction: Instruction) -> Instruction:
    """An instruction outside of the region's loop: its piece does not move with a loop further out."""
    if isinstance(instruction, (Slice, Write)):
        return replace(instruction, piece=replace(instruction.piece, step=0))
    return instruction


class _Body:
    """The instructions of parts of one size, the first of which starts at position `before`. Of those values that are
    `begun`, its results are the sums that later parts add to."""

    def __init__(self, region: _Region, found: Part, before: int, begun: frozenset[Value] = frozenset()) -> None:
        self.region, self.part, self.before, self.begun = region, found, before, begun
        self.graph = region.graph
        with_bias = frozenset(value.node for value in begun)
        self.inside = found.inside(region.scope, with_bias) if region.fission.children else None
        self.frame = _Frame()
        self.left: Counter[Value] = Counter()
        self.slices_left: Counter[tuple[Value, Axis]] = Counter()
        self.whole_outputs = set(region.results.outputs)
        nodes = region.scope.graph.nodes
        self.transfers = Transfers(nodes[unit] for unit in region.units if not isinstance(unit, Fission))
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
            if isinstance(unit, Fission):
                body += [*self.transfers.before(registers), *self._nested(unit, registers)]
            else:
                body += self._node(unit, registers)
            dead = self.transfers.free(self._dead(unit))
            if dead:
                body.append(Free(dead))
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
            if not self.left[value] and value in self.frame.registers and value not in self.begun:
                dead.append(self.frame.registers[value])
        return dead

    def _made(self, unit: NodeId | Fission) -> list[Value]:
        if isinstance(unit, Fission):
            return list(boundary(self.graph, unit.region).outputs)
        outputs = self.part.calls[unit].outputs
        return [Value(unit, i) for i, spec in enumerate(outputs) if spec is not None]

    def _node(self, node_id: NodeId, registers: list[Register]) -> list[Instruction]:
        node, call, loop = self.graph.nodes[node_id], self.part.calls[node_id], self.region.loops[node_id]
        if call.op == STORE:
            return [Wait(self.frame.registers[Value(node_id)])]
        waits = [] if is_view(call) or call.op == LOAD else self.transfers.before(registers)
        adds = loop if loop.once is not None and Value(node_id) not in self.begun else None
        adds = adds or self.region.scope.without_bias(node_id)
        if adds is not None and adds.once is not None:
            call, _ = rule_for(node.op).without_bias(call, adds)
            registers = [*registers[: adds.once], *registers[adds.once + 1 :]]
        into = self._accumulated(node_id, call, registers)
        if into is not None:
            return [*waits, into]
        outputs: list[Register | None] = []
        for i, spec in enumerate(call.outputs):
            outputs.append(None if spec is None else self.region.number(Value(node_id, i)))
        for value, register in ((Value(node_id, i), r) for i, r in enumerate(outputs)):
            if register is not None:
                self.frame.registers[value] = register
        if call.op == LOAD:
            return [self.transfers.load(node_id, call, registers[0], self.frame.registers[Value(node_id)])]
        if is_view(call):
            self.transfers.looked_at(registers, outputs)
        compute = Compute(node_id, call, tuple(registers), tuple(outputs), node.origin)
        handed_out = (i for v in self._made(node_id) if v in self.whole_outputs for i in self._hand_out(v))
        return [*waits, compute, *self._stores(node_id), *handed_out]

    def _stores(self, node_id: NodeId) -> Iterator[Instruction]:
        """Begins to store what a node made."""

        def register_of(value: Value) -> Register:
            register = self.frame.registers[value] = self.region.number(value)
            return register

        made = {value: self.frame.registers[value] for value in self._made(node_id)}
        return self.transfers.after(made, register_of, lambda node: self.part.calls[node.id])

    def _accumulated(self, node_id: NodeId, call: Call, registers: list[Register]) -> Compute | None:
        """The node as one that adds its partial sums straight into the accumulator, where its operator can."""
        value = Value(node_id)
        if value not in self.whole_outputs or self.left[value] or len(call.outputs) != 1 or value in self.begun:
            return None
        role, spec = self.region.loops[node_id].roles[0], self.region.results.specs[value]
        into = rule_for(call.op).adding(call) if role == Reduce("sum") else None
        if into is None or call.outputs[0] is None or spec.dtype is not call.outputs[0].dtype:
            return None
        op, args, kwargs = into
        result = replace(spec, storage_bytes=0, alias_of=len(call.inputs), writes=True)
        adding = Call(op, args, kwargs, (*call.inputs, spec), (result,))
        node = self.graph.nodes[node_id]
        made = self.region.number(value)
        self.frame.registers[value] = made
        return Compute(node_id, adding, (*registers, self.region.results.whole[value]), (made,), node.origin)

    def _hand_out(self, value: Value) -> list[Instruction]:
        """Puts a part of a result where it belongs."""
        if value in self.begun:
            self.region.results.begin(value, self.frame.registers[value])
            return []
        return self.region.results.hand_out(value, self.frame.registers[value], self.part.length, self.before)

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
