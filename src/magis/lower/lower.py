"""Program and order to routine: one operator call per node, every register freed right after its last use."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from magis.errors import InvalidGraphError, UsageError
from magis.fission.tree import Program
from magis.ir.graph import Call, Graph, Node, NodeId, Schedule, TensorSpec, Value
from magis.lower.routine import Compute, Free, Instruction, Register, Routine


def lower(program: Program, schedule: Schedule) -> Routine:
    """The routine that runs the program's nodes in the given order (inputs in it are skipped).

    Raises UsageError for an enabled region (`parts` > 1), InvalidGraphError("ordered") when a node comes
    before the producer of what it reads. Writes and draws are ordered by `verify(graph, schedule)`."""
    if any(fission.enabled for fission in program.ftree):
        raise UsageError("regions that run in parts cannot be lowered: disable them (parts=1) first")
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
        draw = (None, False, False) if node.stream is None else self._draw(node.stream)
        compute = Compute(node.id, call, tuple(inputs), tuple(outputs), node.origin, *draw)
        return [compute, Free(tuple(dead))] if dead else [compute]

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
