"""Graphs without PyTorch for scheduling: small ones by their edges, random ones with all that storages can do."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from magis.errors import InvalidGraphError
from magis.fission.tree import Program
from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, NodeId, Schedule, TensorSpec, Value
from magis.ir.structure import predecessors, topological_order
from magis.ir.verify import verify
from magis.lower.lower import lower
from magis.sim.timeline import timeline

EMPTY = Graph({}, ())


def tensor(nbytes: int) -> TensorSpec:
    """A tensor of so many bytes."""
    return TensorSpec((nbytes,), (1,), DType.U8, nbytes)


def view(of: TensorSpec, alias_of: int = 0, writes: bool = False) -> TensorSpec:
    """All of another tensor, in its storage."""
    return TensorSpec(of.shape, of.strides, of.dtype, 0, alias_of, writes)


def drawn(edges: Iterable[str], order: str, sizes: dict[str, int] | None = None) -> Graph:
    """Operators named by letters, "AB" an edge; ids count in `order`. Each has one tensor, of 1 byte unless `sizes`
    says otherwise, and none is an input of the graph."""
    number = {name: NodeId(i) for i, name in enumerate(order)}
    edit = GraphEdit(EMPTY)
    for name in order:
        inputs = [Value(number[edge[0]]) for edge in edges if edge[1] == name]
        edit.add(f"test.{name}", inputs, [tensor((sizes or {}).get(name, 1))], slots(len(inputs)))
    return edit.finish()


def slots(count: int) -> tuple[Slot, ...]:
    """Arguments that take each input once."""
    return tuple(map(Slot, range(count)))


def peak(graph: Graph, order: Schedule) -> int:
    """The simulator's peak, after checking that the order is valid."""
    verify(graph, order)
    return timeline(lower(Program(graph), order)).peak_bytes


@dataclass
class _Random:
    """Builds a graph operator by operator from a pool of values."""

    chosen: random.Random
    edit: GraphEdit = field(default_factory=lambda: GraphEdit(EMPTY))
    pool: dict[Value, TensorSpec] = field(default_factory=dict)
    root: dict[Value, Value] = field(default_factory=dict)
    weights: list[Value] = field(default_factory=list)
    draws: int = 0

    def inputs(self) -> None:
        for number in range(2):
            spec = tensor(self.chosen.randint(1, 8))
            value = Value(self.edit.add("input", [], [spec], ("parameter", f"w{number}")))
            self.pool[value], self.root[value] = spec, value
            self.weights.append(value)

    def operator(self) -> None:
        kind = self.chosen.choice(["compute"] * 6 + ["view"] * 3 + ["draw", "write"])
        if kind == "write" and self.weights:
            self._write()
        elif kind == "view":
            value = self._some(1)[0]
            made = Value(self.edit.add("test.view", [value], [view(self.pool[value])], slots(1)))
            self.pool[made], self.root[made] = view(self.pool[value]), self.root[value]
        else:
            self._compute(draws=kind == "draw")

    def _compute(self, draws: bool) -> None:
        values = self._some(self.chosen.randint(1, 3))
        specs: list[TensorSpec | None] = [tensor(self.chosen.choice([0, 1, 1, 2, 3, 5, 8, 13]))]
        if self.chosen.random() < 0.25:
            specs += [None, tensor(self.chosen.randint(1, 6))]
        stream = None
        if draws:
            stream, self.draws = self.draws, self.draws + 1
        node = self.edit.add("test.compute", values, specs, slots(len(values)), stream=stream)
        for output, spec in enumerate(specs):
            if spec is not None:
                value = Value(node, output)
                self.pool[value], self.root[value] = spec, value

    def _write(self) -> None:
        """Overwrites an input; nothing made later reads the old version."""
        weight = self.weights.pop()
        values = list(dict.fromkeys((weight, *self._some(1))))
        spec = view(self.pool[weight], writes=True)
        written = Value(self.edit.add("test.write_", values, [spec], slots(len(values))))
        for value in [v for v in self.pool if self.root[v] == self.root[weight]]:
            del self.pool[value]
        self.pool[written], self.root[written] = spec, weight

    def _some(self, count: int) -> list[Value]:
        values = list(self.pool)
        recent = values[-6:] if self.chosen.random() < 0.7 else values
        return self.chosen.sample(recent, min(count, len(recent)))


def random_graph(seed: int, operators: int) -> Graph:
    """Operators with several outputs, views, draws, writes into inputs; some values handed back."""
    build = _Random(random.Random(seed))
    build.inputs()
    for _ in range(operators):
        build.operator()
    outputs = build.chosen.sample(list(build.pool), min(2, len(build.pool)))
    build.edit.set_outputs(outputs, [f"out{i}" for i in range(len(outputs))])
    return build.edit.finish()


def random_order(graph: Graph, seed: int) -> Schedule:
    """Any valid order."""
    chosen = random.Random(seed)
    return topological_order(graph, {node: chosen.random() for node in graph.nodes})


def graphs(least: int = 1, most: int = 12) -> st.SearchStrategy[Graph]:
    """Random graphs with so many operators."""
    return st.builds(random_graph, st.integers(0, 10**6), st.integers(least, most))


def random_edit(graph: Graph, seed: int) -> tuple[Graph, set[NodeId], set[NodeId]] | None:
    """The graph with one node re-computed for one of its readers, two equal nodes merged into one, or a reader made
    to take another tensor; None if there is none, or if what came out were no graph."""
    chosen = random.Random(seed)
    edit = GraphEdit(graph)
    kind = chosen.choice([_recompute, _merge, _redirect])
    if not kind(graph, edit, chosen):
        return None
    changed = edit.finish()
    try:
        verify(changed)
    except InvalidGraphError:
        return None
    return changed, edit.old_nodes, edit.new_nodes


def _recompute(graph: Graph, edit: GraphEdit, chosen: random.Random) -> bool:
    sites = [(v, n.id) for n in graph.nodes.values() for v in n.inputs if not graph.nodes[v.node].is_input]
    sites = [(v, n) for v, n in sites if not graph.nodes[v.node].writes and not graph.nodes[n].writes]
    if not sites:
        return False
    value, reader = chosen.choice(sites)
    edit.redirect(reader, value, Value(edit.copy(value.node, "copy of"), value.output))
    return True


def _merge(graph: Graph, edit: GraphEdit, chosen: random.Random) -> bool:
    nodes = [n for n in graph.nodes.values() if not n.is_input and not n.writes]
    pairs = [
        (a, b)
        for a in nodes
        for b in nodes
        if a.id < b.id and (a.op, a.inputs, a.outputs, a.stream) == (b.op, b.inputs, b.outputs, b.stream)
    ]
    if not pairs:
        return False
    one, other = chosen.choice(pairs)
    if chosen.random() < 0.5 and one.stream is None:
        one, other = other, one
    for output in range(len(one.outputs)):
        edit.redirect_all(Value(other.id, output), Value(one.id, output))
    edit.remove(other.id)
    return True


def _redirect(graph: Graph, edit: GraphEdit, chosen: random.Random) -> bool:
    values = [Value(n.id, o) for n in graph.nodes.values() for o, spec in enumerate(n.outputs) if spec is not None]
    sites = [(n.id, v) for n in graph.nodes.values() if not n.is_input for v in n.inputs]
    if not sites:
        return False
    reader, old = chosen.choice(sites)
    spec = graph.spec(old)
    alike = [
        v for v in values if graph.spec(v).shape == spec.shape and v != old and v not in graph.nodes[reader].inputs
    ]
    if not alike:
        return False
    edit.redirect(reader, old, chosen.choice(alike))
    return True


def least_peak(graph: Graph) -> int:
    """The least peak of any order, from the definition alone: all sets of operators that can have run, one by one."""
    operators = [node for node in graph.nodes.values() if not node.is_input]
    number = {node.id: i for i, node in enumerate(operators)}
    needs = [sum(1 << number[p] for p in before if p in number) for before in map(predecessors(graph).get, number)]
    users: dict[Value, int] = {}
    for node in operators:
        made = [Value(node.id, o) for o, spec in enumerate(node.outputs) if spec is not None and spec.alias_of is None]
        for value in {graph.root(v) for v in node.inputs}.union(made):
            users[value] = users.get(value, 0) | 1 << number[node.id]
    users = {v: nodes for v, nodes in users.items() if not graph.nodes[v.node].is_input}
    kept = {graph.root(value) for value in graph.outputs}

    def live(ran: int, running: int) -> int:
        """Bytes while node `running`, the last of `ran`, runs."""
        found = 0
        for value, nodes in users.items():
            made = ran >> number[value.node] & 1
            if made and (value in kept or nodes >> running & 1 or nodes & ~ran):
                found += graph.spec(value).storage_bytes
        return found

    best = {0: 0}
    for _ in operators:
        following: dict[int, int] = {}
        for ran, value in best.items():
            for i, need in enumerate(needs):
                if not ran >> i & 1 and not need & ~ran:
                    together = ran | 1 << i
                    reached = max(value, live(together, i))
                    following[together] = min(reached, following.get(together, reached))
        best = following
    residents = (graph.spec(Value(node.id)) for node in graph.inputs)
    return best[(1 << len(operators)) - 1] + sum(s.storage_bytes for s in residents if s.alias_of is None)
