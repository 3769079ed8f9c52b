"""Regions with a halo as straight code and loops: parts that are alike follow each other in one loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from magis.fission.halo import Rows, read, rows_of_parts
from magis.fission.parts import CannotInferError, CannotSplitError, Infer, Scope, loops_of
from magis.fission.tree import Fission
from magis.ir.args import Slot
from magis.ir.graph import Call, Node, NodeId, TensorSpec, Value
from magis.lower.results import Number, Results
from magis.lower.routine import Accumulate, Compute, Free, Instruction, Loop, Piece, Register, Slice, Write
from magis.ops.loop import Axis, Concat
from magis.ops.loop import Loop as OpLoop
from magis.ops.registry import rule_for


def lower_halo(
    fission: Fission,
    scope: Scope,
    order: Sequence[NodeId],
    outside: Mapping[Value, Register],
    number: Number,
    infer: Infer,
) -> tuple[list[Instruction], dict[Value, Register]]:
    """The instructions of a region with a halo, and the registers of its results. Raises CannotSplitError."""
    loops = loops_of(fission, scope)
    results = Results(fission, scope, loops, outside, number, infer)
    body = results.allocate()
    parts = rows_of_parts(scope.graph, fission, loops)
    written = []
    for rows in parts:
        try:
            written.append(_Part(scope, order, loops, outside, infer, results, rows).run())
        except CannotInferError as error:
            raise CannotSplitError(f"a part with a halo cannot run: {error}") from None
    for count, lines in _grouped(written):
        body.append(Loop(count, tuple(_numbered(lines.instructions, lines.values, number)), fission.dimension))
    more, found = results.finish()
    return [*body, *more], found


@dataclass
class _Lines:
    """One part's instructions. Registers that it makes are numbered from -1 downwards; `values` are what they hold."""

    instructions: list[Instruction] = field(default_factory=list)
    values: list[Value | None] = field(default_factory=list)
    specs: dict[Register, TensorSpec] = field(default_factory=dict)

    def register(self, value: Value | None, spec: TensorSpec) -> Register:
        """A new one."""
        self.values.append(value)
        made = -len(self.values)
        self.specs[made] = spec
        return made

    def starts(self) -> list[int]:
        """Where the pieces of whole tensors start."""
        return [i.piece.start for i in self.instructions if _moves(i)]  # type: ignore[union-attr]

    def shape(self) -> list[Instruction]:
        """The instructions without where the pieces of whole tensors start."""
        return [
            replace(i, piece=replace(i.piece, start=0)) if isinstance(i, (Slice, Write)) and _moves(i) else i
            for i in self.instructions
        ]


def _moves(instruction: Instruction) -> bool:
    """Whether it takes a piece of a tensor outside of the loop, which moves from part to part."""
    return (isinstance(instruction, Slice) and instruction.source >= 0) or isinstance(instruction, Write)


def _grouped(parts: Sequence[_Lines]) -> Iterable[tuple[int, _Lines]]:
    """Neighbouring parts that differ only by how far they have moved on, each piece by the same step: how many, and the
    instructions of the first with these steps."""
    at = 0
    while at < len(parts):
        first = parts[at]
        steps: list[int] | None = None
        end = at + 1
        while end < len(parts) and parts[end].shape() == first.shape():
            moved = [b - a for a, b in zip(parts[end - 1].starts(), parts[end].starts())]
            if steps is not None and moved != steps:
                break
            steps = moved
            end += 1
        moving = iter(steps or [0] * len(first.starts()))
        lines = [
            replace(i, piece=replace(i.piece, step=next(moving))) if isinstance(i, (Slice, Write)) and _moves(i) else i
            for i in first.instructions
        ]
        yield end - at, replace(first, instructions=lines)
        at = end


def _numbered(
    instructions: Iterable[Instruction], values: Sequence[Value | None], number: Number
) -> Iterable[Instruction]:
    """The instructions with real registers."""
    real = {-i: number(value) for i, value in enumerate(values, start=1)}

    def of(register: Register) -> Register:
        return real.get(register, register)

    for instruction in instructions:
        match instruction:
            case Compute():
                outputs = tuple(None if r is None else of(r) for r in instruction.outputs)
                yield replace(instruction, inputs=tuple(map(of, instruction.inputs)), outputs=outputs)
            case Free(registers):
                yield Free(tuple(map(of, registers)))
            case Slice():
                yield replace(instruction, register=of(instruction.register), source=of(instruction.source))
            case Write() | Accumulate():
                yield replace(instruction, target=of(instruction.target), source=of(instruction.source))


class _Part:
    """Writes one part. Every node's result is held for the positions that it computes; readers take slices of it."""

    def __init__(
        self,
        scope: Scope,
        order: Sequence[NodeId],
        loops: Mapping[NodeId, OpLoop],
        outside: Mapping[Value, Register],
        infer: Infer,
        results: Results,
        rows: Rows,
    ) -> None:
        self.scope, self.order, self.loops, self.outside = scope, order, loops, outside
        self.infer, self.results, self.rows = infer, results, rows
        self.graph = scope.graph
        self.lines = _Lines()
        self.held: dict[Value, Register] = {}
        self.left: Counter[Value] = Counter()
        for node_id in order:
            self.left.update(v for v in self.graph.nodes[node_id].inputs if v.node in rows.computed)

    def run(self) -> _Lines:
        for node_id in self.order:
            self._node(self.graph.nodes[node_id])
        return self.lines

    def _node(self, node: Node) -> None:
        loop, rows = self.loops[node.id], self.rows.computed[node.id]
        rule, around = rule_for(node.op), self.scope.calls[node.id]
        wanted = read(loop, rows)
        pads, value, skip, keep = (0, 0), 0.0, 0, len(rows)
        if loop.window is None:
            args, kwargs = rule.part(around, loop, len(rows))
        else:
            found = rule.windowed(around, loop, rows)
            wanted, pads, value = found.reads, found.pads, found.pad_value
            args, kwargs, skip, keep = found.args, found.kwargs, found.skip, found.keep
        registers, passing = [], []
        for source, axis in zip(node.inputs, loop.inputs):
            register, temporary = self._operand(node, source, axis, wanted, pads, value)
            registers.append(register)
            passing += temporary
        specs = tuple(self._spec(register, source) for register, source in zip(registers, node.inputs))
        call = Call(node.op, args, kwargs, specs, around.outputs)
        call = replace(call, outputs=self.infer(call))
        adds = self.scope.without_bias(node.id)
        if adds is not None and adds.once is not None:
            call, _ = rule.without_bias(call, adds)
            del registers[adds.once]
        outputs = [
            None if spec is None else self.lines.register(Value(node.id, i), spec)
            for i, spec in enumerate(call.outputs)
        ]
        self.lines.instructions.append(Compute(node.id, call, tuple(registers), tuple(outputs), node.origin))
        self._free(passing)
        for i, made in enumerate(outputs):
            if made is not None:
                self._made(Value(node.id, i), made, skip, keep)
        self._forget(node)

    def _operand(
        self, node: Node, source: Value, axis: Axis | None, wanted: range, pads: tuple[int, int], value: float
    ) -> tuple[Register, list[Register]]:
        """The register that a node reads, and those that are only needed for it."""
        if axis is None:
            return (self.held[source] if source in self.held else self.outside[source]), []
        temporary = []
        if source in self.held:
            register, offset = self.held[source], wanted.start - self.rows.computed[source.node].start
            length = self.lines.specs[register].shape[axis.dim]
        else:
            register, offset, length = self.outside[source], wanted.start, axis.length
        if offset or length != len(wanted) or source not in self.held:
            register = self._slice(source, register, axis.dim, offset, len(wanted))
            temporary.append(register)
        if pads != (0, 0):
            register = self._padded(node, source, register, axis.dim, pads, value)
            temporary.append(register)
        return register, temporary

    def _slice(self, value: Value, source: Register, dim: int, start: int, length: int) -> Register:
        whole = self._spec(source, value)
        shape = (*whole.shape[:dim], length, *whole.shape[dim + 1 :])
        spec = replace(whole, shape=shape, storage_bytes=0, alias_of=0, writes=False)
        made = self.lines.register(value, spec)
        self.lines.instructions.append(Slice(made, source, spec, Piece(dim, length, start, step=0)))
        return made

    def _padded(
        self, node: Node, value: Value, source: Register, dim: int, pads: tuple[int, int], fill: float
    ) -> Register:
        spec = self.lines.specs[source]
        sides = (0, 0) * (len(spec.shape) - 1 - dim) + pads
        call = Call(
            "aten.constant_pad_nd.default", (Slot(0), sides, fill), (), (spec,), (replace(spec, alias_of=None),)
        )
        call = replace(call, outputs=self.infer(call))
        padded = call.outputs[0]
        assert padded is not None
        made = self.lines.register(value, padded)
        self.lines.instructions.append(Compute(node.id, call, (source,), (made,), node.origin))
        return made

    def _made(self, value: Value, register: Register, skip: int, keep: int) -> None:
        """Holds a result, without the positions that nobody wants, and hands out what leaves the region."""
        role = self.loops[value.node].roles[value.output]
        wanted = self.left[value] or value in self.rows.shares
        if not wanted:
            self._free([register])
            return
        if isinstance(role, Concat) and (skip or self.lines.specs[register].shape[role.axis.dim] != keep):
            kept = self._slice(value, register, role.axis.dim, skip, keep)
            self._free([register])
            register = kept
        self.held[value] = register
        share = self.rows.shares.get(value)
        if share is None:
            return
        source, temporary = register, []
        rows = self.rows.computed[value.node]
        if isinstance(role, Concat) and share != rows:
            source = self._slice(value, register, role.axis.dim, share.start - rows.start, len(share))
            temporary.append(source)
        self.lines.instructions += self.results.hand_out(value, source, len(share), share.start)
        self._free(temporary)
        if not self.left[value]:
            self._free([self.held.pop(value)])

    def _forget(self, node: Node) -> None:
        for value in node.inputs:
            if value.node in self.rows.computed:
                self.left[value] -= 1
                if not self.left[value]:
                    self._free([self.held.pop(value)])

    def _spec(self, register: Register, value: Value) -> TensorSpec:
        return self.lines.specs[register] if register < 0 else self.scope.spec(value)

    def _free(self, registers: Sequence[Register]) -> None:
        if registers:
            self.lines.instructions.append(Free(tuple(registers)))
