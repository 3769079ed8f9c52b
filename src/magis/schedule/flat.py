"""A graph as arrays indexed by node id: what a scheduler asks for many times (ADR 7).

Memory is the simulator's: a storage lives from the start of the operator that makes it to the end of the last
one that takes it or any view of it; one that nobody takes dies with its maker, one handed back lives to the end;
the caller's tensors stay and count nowhere here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

from magis.ir.graph import Call, Graph, Node, NodeId, Schedule, Value
from magis.ir.structure import predecessors
from magis.sim.timeline import no_workspace

RESIDENT = -1
"""Storage number of everything that takes no memory of the step: the caller's tensors, tensors of 0 bytes."""


@dataclass(eq=False)
class Flat:
    """Lists have an entry per node id, inputs and removed nodes included (these are empty); `readers`, `nbytes`
    and `maker` have one per storage. Orders contain operators only: the graph's inputs are no operators.

    `before` and `after` are the neighbours over data, write and draw edges. `roots` has for each output of a node
    the value that owns its storage and how often that was overwritten. `taken` are the storages that a node makes
    or takes, each once; `extra` its workspace in bytes. `kept` are storages handed back to the caller. `writers` has
    the node that overwrites a version of a value's storage, `draws` the first node of each random draw.
    `resident_bytes` are those of the caller's tensors, each storage once.
    """

    graph: Graph
    workspace_bytes: Callable[[Call], int]
    is_operator: list[bool]
    before: list[tuple[NodeId, ...]]
    after: list[tuple[NodeId, ...]]
    roots: list[tuple[tuple[Value, int] | None, ...]]
    taken: list[tuple[int, ...]]
    extra: list[int]
    storage_of: dict[Value, int]
    maker: list[NodeId]
    nbytes: list[int]
    readers: list[tuple[NodeId, ...]]
    kept: frozenset[int]
    writers: dict[tuple[Value, int], NodeId]
    draws: dict[int, NodeId]
    resident_bytes: int

    @cached_property
    def operators(self) -> Schedule:
        """Every operator, by id."""
        return tuple(map(NodeId, compress(range(len(self.is_operator)), self.is_operator)))


def flatten(graph: Graph, workspace_bytes: Callable[[Call], int] = no_workspace) -> Flat:
    """The arrays of a verified graph. `workspace_bytes` is what a call allocates beyond its results."""
    size = max(graph.nodes, default=-1) + 1
    nothing: list[tuple[NodeId, ...]] = [()] * size
    residents = [spec for node in graph.inputs for spec in node.outputs if spec is not None]
    flat = Flat(
        graph=graph,
        workspace_bytes=workspace_bytes,
        is_operator=[False] * size,
        before=nothing,
        after=list(nothing),
        roots=[()] * size,
        taken=[()] * size,
        extra=[0] * size,
        storage_of={},
        maker=[],
        nbytes=[],
        readers=[],
        kept=frozenset(),
        writers={},
        draws={},
        resident_bytes=sum(spec.storage_bytes for spec in residents if spec.alias_of is None),
    )
    after: list[list[NodeId]] = [[] for _ in range(size)]
    inputs = {node.id for node in graph.inputs}
    before = predecessors(graph)
    for node in graph.nodes_in_order():
        flat.roots[node.id] = output_roots(flat, node)
        if node.is_input:
            continue
        describe(flat, node)
        if node.stream is not None:
            flat.draws[node.stream] = min(node.id, flat.draws.get(node.stream, node.id))
        flat.before[node.id] = tuple(p for p in before[node.id] if p not in inputs)
        for earlier in flat.before[node.id]:
            after[earlier].append(node.id)
    readers: list[list[NodeId]] = [[] for _ in flat.maker]
    for operator in flat.operators:
        for storage in flat.taken[operator]:
            if flat.maker[storage] != operator:
                readers[storage].append(operator)
    flat.readers = [tuple(nodes) for nodes in readers]
    flat.after = [tuple(sorted(nodes)) for nodes in after]
    flat.kept = kept_storages(flat)
    return flat


def describe(flat: Flat, node: Node) -> None:
    """Fills in what follows from an operator itself and from where its inputs lie; adds the storages it makes."""
    flat.is_operator[node.id] = True
    storages = dict.fromkeys(flat.storage_of.get(root, RESIDENT) for root, _ in input_roots(flat, node))
    for output, spec in enumerate(node.outputs):
        if spec is None or spec.alias_of is not None or not spec.memory_bytes:
            continue
        value = Value(node.id, output)
        if value not in flat.storage_of:
            flat.storage_of[value] = len(flat.maker)
            flat.maker.append(node.id)
            flat.nbytes.append(spec.storage_bytes)
            flat.readers.append(())
        storages[flat.storage_of[value]] = None
    storages.pop(RESIDENT, None)
    flat.taken[node.id] = tuple(storages)
    if flat.workspace_bytes is not no_workspace:
        flat.extra[node.id] = flat.workspace_bytes(flat.graph.call(node))
    for index in node.written():
        value = node.inputs[index]
        root = flat.roots[value.node][value.output]
        assert root is not None
        flat.writers[root] = node.id


def output_roots(flat: Flat, node: Node) -> tuple[tuple[Value, int] | None, ...]:
    """For each output, the value that owns its storage and how often that was overwritten; None for no tensor."""
    found: list[tuple[Value, int] | None] = []
    for output, spec in enumerate(node.outputs):
        if spec is None:
            found.append(None)
        elif spec.alias_of is None:
            found.append((Value(node.id, output), 0))
        else:
            value = node.inputs[spec.alias_of]
            base = flat.roots[value.node][value.output]
            assert base is not None
            found.append((base[0], base[1] + spec.writes))
    return tuple(found)


def input_roots(flat: Flat, node: Node) -> list[tuple[Value, int]]:
    """For each input, the value that owns its storage and the version that it reads."""
    found = []
    for value in node.inputs:
        root = flat.roots[value.node][value.output]
        assert root is not None, f"%{node.id} reads %{value.node}.{value.output}, which is not a tensor"
        found.append(root)
    return found


def kept_storages(flat: Flat) -> frozenset[int]:
    """Storages handed back to the caller."""
    roots = (flat.roots[value.node][value.output] for value in flat.graph.outputs)
    found = (flat.storage_of.get(root[0], RESIDENT) for root in roots if root is not None)
    return frozenset(storage for storage in found if storage != RESIDENT)


def topological(flat: Flat, preferred: Iterable[NodeId]) -> Schedule:
    """The operators in `preferred`, in that order but for what must come earlier: each node is preceded by those
    of its predecessors in `preferred` that have not run. So a copy that comes late in `preferred` lands right
    before its first reader."""
    wanted = list(preferred)
    waiting = set(wanted)
    rank = {node: i for i, node in enumerate(wanted)}
    order: list[NodeId] = []
    for node in wanted:
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [p for p in flat.before[top] if p in waiting]
            if missing and top in waiting:
                stack += sorted(missing, key=rank.__getitem__, reverse=True)
                continue
            stack.pop()
            if top in waiting:
                waiting.remove(top)
                order.append(top)
    return tuple(order)


def live_bytes(flat: Flat, order: Sequence[NodeId]) -> list[int]:
    """Bytes live while each operator of a complete order runs, residents left out (exactly the simulator's)."""
    left = [len(readers) for readers in flat.readers]
    for storage in flat.kept:
        left[storage] += 1
    maker, nbytes, taken, extra = flat.maker, flat.nbytes, flat.taken, flat.extra
    live, found = 0, []
    for node in order:
        freed = 0
        for storage in taken[node]:
            if maker[storage] == node:
                live += nbytes[storage]
            else:
                left[storage] -= 1
            if not left[storage]:
                freed += nbytes[storage]
        found.append(live + extra[node])
        live -= freed
    return found


def peak_bytes(flat: Flat, order: Sequence[NodeId]) -> int:
    """Everything live at the worst moment of a complete order, residents included."""
    return flat.resident_bytes + max(live_bytes(flat, order), default=0)
