"""Program and order to routine: one operator call per node, every register freed right after its last use."""

from __future__ import annotations

from collections import Counter

from magis.errors import InvalidGraphError, UsageError
from magis.fission.tree import Program
from magis.ir.graph import Graph, Node, NodeId, Schedule, Value
from magis.lower.routine import Compute, Free, Instruction, Register, Routine


def lower(program: Program, schedule: Schedule) -> Routine:
    """The routine that runs the program's nodes in the given order (inputs in it are skipped).

    Raises UsageError for an enabled region (`parts` > 1), InvalidGraphError("ordered") when a node comes
    before the producer of what it reads. Writes and draws are ordered by `verify(graph, schedule)`."""
    if any(fission.enabled for fission in program.ftree):
        raise UsageError("regions that run in parts cannot be lowered: disable them (parts=1) first")
    return _Lowering(program.graph).run(schedule)


class _Lowering:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.register: dict[Value, Register] = {}
        self.instructions: list[Instruction] = []
        nodes = graph.nodes.values()
        self.reads_left = Counter(value for node in nodes for value in node.inputs)
        self.reads_left.update(graph.outputs)  # never counted down: these live to the end
        self.sharers = Counter(node.stream for node in nodes if node.stream is not None)
        self.drawn: set[int] = set()
        self.resident: set[Register] = set()

    def run(self, schedule: Schedule) -> Routine:
        graph = self.graph
        for node in graph.inputs:
            self.resident.add(self._new(Value(node.id)))
        nodes = graph.nodes
        for node_id in schedule:
            if not nodes[node_id].is_input:
                self._compute(nodes[node_id])
        inputs = [Value(node.id) for node in graph.inputs]
        return Routine(
            name=graph.name,
            inputs=tuple(self.register[value] for value in inputs),
            input_specs=tuple(graph.spec(value) for value in inputs),
            input_roots=tuple(self.register[graph.root(value)] for value in inputs),
            body=tuple(self.instructions),
            outputs=tuple(self.register[value] for value in graph.outputs),
            output_names=graph.output_names,
            values={register: value for value, register in self.register.items()},
            input_names=tuple(node.name for node in graph.inputs),
        )

    def _new(self, value: Value) -> Register:
        register = len(self.register)
        self.register[value] = register
        return register

    def _compute(self, node: Node) -> None:
        inputs = tuple(self._read(value, node.id) for value in node.inputs)
        values = [Value(node.id, i) for i in range(len(node.outputs))]
        outputs = tuple(None if spec is None else self._new(value) for value, spec in zip(values, node.outputs))
        record, replay = self._draw(node.stream)
        call = self.graph.call(node)
        self.instructions.append(Compute(node.id, call, inputs, outputs, node.origin, node.stream, record, replay))
        dead = [register for value, register in zip(node.inputs, inputs) if self._is_last_read(value, register)]
        dead += [r for value, r in zip(values, outputs) if r is not None and not self.reads_left[value]]
        if dead:
            self.instructions.append(Free(tuple(dead)))

    def _read(self, value: Value, reader: NodeId) -> Register:
        register = self.register.get(value)
        if register is None:
            detail = f"%{reader} runs before %{value.node}, which it must follow"
            raise InvalidGraphError("ordered", detail)
        return register

    def _is_last_read(self, value: Value, register: Register) -> bool:
        self.reads_left[value] -= 1
        return not self.reads_left[value] and register not in self.resident

    def _draw(self, stream: int | None) -> tuple[bool, bool]:
        """Whether a node records the generator state of its draw, and whether it replays it."""
        if stream is None:
            return False, False
        replay = stream in self.drawn
        self.drawn.add(stream)
        return not replay and self.sharers[stream] > 1, replay
