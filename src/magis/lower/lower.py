"""Program and order to routine: one operator call per node, every register freed right after its last use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from magis.errors import InvalidGraphError
from magis.fission.parts import Infer, Scope, no_infer
from magis.fission.region import boundary, check
from magis.fission.tree import Fission, Program
from magis.ir.graph import Call, Graph, Node, NodeId, Schedule, TensorSpec, Value
from magis.lower.regions import lower_region, units
from magis.lower.routine import Compute, Free, Instruction, Register, Routine, Wait
from magis.lower.transfers import Transfers, is_view
from magis.ops.swap import LOAD, STORE


def lower(program: Program, schedule: Schedule, infer: Infer = no_infer) -> Routine:
    """The routine that runs the program's nodes in the given order (inputs in it are skipped); the nodes of a region
    follow each other in it. `infer` is asked for the types of resized calls, when regions run in parts.

    Raises CannotSplitError for a region that may not be split or whose parts cannot run, InvalidGraphError("ordered")
    when a node comes before the producer of what it reads. Writes and draws: see `verify(graph, schedule)`."""
    if program.enabled:
        return _SplitLowering(program, schedule, infer).run()
    return _Lowering(program.graph, schedule).run()


class _Lowering:
    """Registers are numbered in order of execution: a node's outputs follow each other from `first[node]` on."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.inputs = graph.inputs
        nodes = graph.nodes
        self.computed = [node for node in map(nodes.__getitem__, schedule) if not node.is_input]
        self.first: dict[NodeId, Register] = {}
        self.specs: list[TensorSpec | None] = []
        for node in chain(self.inputs, self.computed):
            self.first[node.id] = len(self.specs)
            self.specs += node.outputs
        self.reads_left = [0] * len(self.specs)
        for node in self.computed:
            for value in node.inputs:
                self.reads_left[self._register(value)] += 1
        self.outputs = tuple(map(self._register, graph.outputs))
        for register in (*range(len(self.inputs)), *self.outputs):
            self.reads_left[register] += 1  # never counted down: these live to the end
        self.sharers = Counter(node.stream for node in self.computed if node.stream is not None)
        self.drawn: set[int] = set()
        self.transfers = Transfers(self.computed)

    def run(self) -> Routine:
        body: list[Instruction] = []
        for node in self.computed:
            body += self._compute(node)
        graph = self.graph
        inputs = [Value(node.id) for node in self.inputs]
        return Routine(
            name=graph.name,
            inputs=tuple(map(self._register, inputs)),
            input_specs=tuple(map(graph.spec, inputs)),
            input_roots=tuple(self._register(graph.root(value)) for value in inputs),
            body=tuple(body),
            outputs=self.outputs,
            output_names=graph.output_names,
            values=self._values(),
            input_names=tuple(node.name for node in self.inputs),
        )

    def _register(self, value: Value) -> Register:
        return self.first[value.node] + value.output

    def _compute(self, node: Node) -> list[Instruction]:
        first, left, specs = self.first, self.reads_left, self.specs
        start = first[node.id]
        inputs, read, dead = [], [], []
        for value in node.inputs:
            register = first[value.node] + value.output
            spec = specs[register]
            if register >= start or spec is None:
                raise InvalidGraphError("ordered", f"%{node.id} runs before %{value.node}, which it must follow")
            inputs.append(register)
            read.append(spec)
            left[register] -= 1
            if not left[register]:
                dead.append(register)
        outputs: list[Register | None] = []
        for register, spec in enumerate(node.outputs, start):
            outputs.append(None if spec is None else register)
            if not left[register] and spec is not None:
                dead.append(register)
        call = Call(node.op, node.args, node.kwargs, tuple(read), node.outputs)
        body = self._run(node, call, inputs, outputs)
        freed = self.transfers.free(dead) if self.transfers.under_way else tuple(dead)
        return [*body, Free(freed)] if freed else body

    def _run(self, node: Node, call: Call, inputs: list[Register], outputs: list[Register | None]) -> list[Instruction]:
        """The call, and what transfers there are around it."""
        transfers, compute = self.transfers, list[Instruction]()
        if call.op == STORE:
            return [Wait(self.first[node.id])]
        if call.op == LOAD:
            compute = [transfers.load(node.id, call, inputs[0], self.first[node.id])]
        else:
            draw = (None, False, False) if node.stream is None else self._draw(node.stream)
            compute = [Compute(node.id, call, tuple(inputs), tuple(outputs), node.origin, *draw)]
            if transfers.under_way:
                if is_view(call):
                    transfers.looked_at(inputs, outputs)
                else:
                    compute = [*transfers.before(inputs), *compute]
        if transfers.stores:
            made = {Value(node.id, i): r for i, r in enumerate(outputs) if r is not None}
            compute += transfers.after(made, self._register, self.graph.call)
        return compute

    def _draw(self, stream: int) -> tuple[int, bool, bool]:
        """The draw's number, whether this node records the generator state, whether it replays it."""
        replay = stream in self.drawn
        self.drawn.add(stream)
        return stream, not replay and self.sharers[stream] > 1, replay

    def _values(self) -> dict[Register, Value]:
        return {
            register: Value(node.id, output)
            for node in chain(self.inputs, self.computed)
            for output, register in enumerate(range(self.first[node.id], self.first[node.id] + len(node.outputs)))
            if node.outputs[output] is not None
        }


class _SplitLowering:
    """The same for a program with regions, each a unit that reads what its nodes read from outside."""

    def __init__(self, program: Program, schedule: Schedule, infer: Infer) -> None:
        self.graph, self.infer = program.graph, infer
        self.regions = program.enabled
        for region in self.regions:
            for fission in region.walk():
                check(self.graph, fission)
        nodes = self.graph.nodes
        self.order = [node for node in schedule if not nodes[node].is_input]
        self.units = units(self.regions, self.order)
        self.registers: dict[Value, Register] = {}
        self.values: dict[Register, Value] = {}
        self.numbered = 0
        self.left: Counter[Value] = Counter(self.graph.outputs)
        for unit in self.units:
            self.left.update(self._reads(unit))
        self.kept = {Value(node.id) for node in self.graph.inputs}.union(self.graph.outputs)
        streams = (nodes[unit].stream for unit in self.units if not isinstance(unit, Fission))
        self.sharers = Counter(stream for stream in streams if stream is not None)
        self.drawn: set[int] = set()
        self.transfers = Transfers(nodes[unit] for unit in self.units if not isinstance(unit, Fission))

    def run(self) -> Routine:
        graph = self.graph
        inputs = [Value(node.id) for node in graph.inputs]
        for value in inputs:
            self.registers[value] = self._number(value)
        body: list[Instruction] = []
        for unit in self.units:
            body += self._region(unit) if isinstance(unit, Fission) else self._compute(graph.nodes[unit])
            dead = self.transfers.free(self._dead(unit))
            if dead:
                body.append(Free(dead))
        return Routine(
            name=graph.name,
            inputs=tuple(self.registers[value] for value in inputs),
            input_specs=tuple(map(graph.spec, inputs)),
            input_roots=tuple(self.registers[graph.root(value)] for value in inputs),
            body=tuple(body),
            outputs=tuple(self.registers[value] for value in graph.outputs),
            output_names=graph.output_names,
            values=self.values,
            input_names=tuple(node.name for node in graph.inputs),
        )

    def _number(self, value: Value | None) -> Register:
        register = self.numbered
        self.numbered += 1
        if value is not None:
            self.values[register] = value
        return register

    def _reads(self, unit: NodeId | Fission) -> tuple[Value, ...]:
        if isinstance(unit, Fission):
            return boundary(self.graph, unit.region).inputs
        return self.graph.nodes[unit].inputs

    def _region(self, region: Fission) -> list[Instruction]:
        order = [node for node in self.order if node in region.region]
        outside = {value: self._operand(value, order[0]) for value in self._reads(region)}
        scope = Scope.whole(self.graph, region.region)
        waits = self.transfers.before(outside.values())
        body, results = lower_region(region, scope, order, outside, self._number, self.infer)
        self.registers.update(results)
        return [*waits, *body, *self._stores(results)]

    def _stores(self, made: Mapping[Value, Register]) -> Iterator[Instruction]:
        def register_of(value: Value) -> Register:
            self.registers[value] = self._number(value)
            return self.registers[value]

        return self.transfers.after(made, register_of, self.graph.call)

    def _operand(self, value: Value, reader: NodeId) -> Register:
        register = self.registers.get(value)
        if register is None:
            raise InvalidGraphError("ordered", f"%{reader} runs before %{value.node}, which it must follow")
        return register

    def _compute(self, node: Node) -> list[Instruction]:
        inputs = tuple(self._operand(value, node.id) for value in node.inputs)
        if node.op == STORE:
            return [Wait(self.registers[Value(node.id)])]
        outputs = [None if spec is None else self._number(Value(node.id, i)) for i, spec in enumerate(node.outputs)]
        made = {Value(node.id, i): r for i, r in enumerate(outputs) if r is not None}
        self.registers.update(made)
        call = self.graph.call(node)
        if node.op == LOAD:
            return [self.transfers.load(node.id, call, inputs[0], made[Value(node.id)])]
        waits: list[Instruction] = []
        if is_view(call):
            self.transfers.looked_at(inputs, outputs)
        else:
            waits = self.transfers.before(inputs)
        draw = (None, False, False) if node.stream is None else self._draw(node.stream)
        compute = Compute(node.id, call, inputs, tuple(outputs), node.origin, *draw)
        return [*waits, compute, *self._stores(made)]

    def _draw(self, stream: int) -> tuple[int, bool, bool]:
        replay = stream in self.drawn
        self.drawn.add(stream)
        return stream, not replay and self.sharers[stream] > 1, replay

    def _dead(self, unit: NodeId | Fission) -> list[Register]:
        dead = []
        for value in self._reads(unit):
            self.left[value] -= 1
            if not self.left[value] and value not in self.kept:
                dead.append(self.registers[value])
        made = boundary(self.graph, unit.region).outputs if isinstance(unit, Fission) else ()
        if not isinstance(unit, Fission):
            made = tuple(Value(unit, i) for i, spec in enumerate(self.graph.nodes[unit].outputs) if spec is not None)
        return dead + [self.registers[v] for v in made if not self.left[v] and v not in self.kept]
