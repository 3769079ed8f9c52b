"""F-Trans: when a region of the graph may run in parts (paper section 4.2), and the convex pieces of a dimension."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from magis.fission.parts import CannotSplitError
from magis.fission.tree import Fission
from magis.ir.graph import Graph, Node, NodeId, TensorSpec, Value
from magis.ir.structure import predecessors
from magis.ops.loop import Axis, Concat, Loop, Lost, Reduce, Same


@dataclass(frozen=True)
class Boundary:
    """`inputs`: values from outside that a region reads; `outputs`: its values that are read outside or handed back
    to the caller. Both in the order of the graph."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def boundary(graph: Graph, region: frozenset[NodeId]) -> Boundary:
    """inps(S) and outs(S) of the paper."""
    inputs: dict[Value, None] = {}
    for node_id in sorted(region):
        inputs.update((v, None) for v in graph.nodes[node_id].inputs if v.node not in region)
    outputs = {value for value in graph.outputs if value.node in region}
    for node_id in region:
        for user in graph.users[node_id]:
            if user not in region:
                outputs.update(v for v in graph.nodes[user].inputs if v.node == node_id)
    return Boundary(tuple(sorted(inputs)), tuple(sorted(outputs)))


def is_view(node: Node) -> bool:
    """Whether all its results lie in storages of its inputs, and it writes nothing."""
    specs = [spec for spec in node.outputs if spec is not None]
    return bool(specs) and not node.writes and all(spec.alias_of is not None for spec in specs)


def check(graph: Graph, fission: Fission) -> None:
    """Whether a region may be split: connected, convex, and every node independent along its loop, nothing computed
    twice. Raises CannotSplitError naming the condition and the node."""
    loops = {node_id: _checked_loop(graph, fission, node_id) for node_id in sorted(fission.region)}
    if len(list(connected(graph, fission.region))) != 1:
        raise CannotSplitError("not connected: the region falls into parts that exchange nothing")
    crossing = between(predecessors(graph), fission.region)
    if crossing:
        node = graph.nodes[min(crossing)]
        raise CannotSplitError(f"not convex: %{node.id} ({node.op}) outside lies on a path from the region to itself")
    for node_id, loop in loops.items():
        for value, axis in zip(graph.nodes[node_id].inputs, loop.inputs):
            if value.node in loops:
                _check_edge(graph, node_id, value, axis, loops[value.node])
    for value in boundary(graph, fission.region).outputs:
        _check_output(graph, value, loops[value.node])


def _checked_loop(graph: Graph, fission: Fission, node_id: NodeId) -> Loop:
    """The loop of a region's node."""
    node = graph.nodes.get(node_id)
    if node is None or node.is_input:
        raise CannotSplitError(f"%{node_id} is no operator of the graph")
    if node.writes or node.stream is not None:
        what = "writes in place" if node.writes else "draws random numbers"
        raise CannotSplitError(f"%{node_id} ({node.op}) {what}: it must stay outside of every region")
    if node_id not in fission.cuts:
        raise CannotSplitError(f"not independent: no loop is given for %{node_id} ({node.op})")
    try:
        return fission.cuts[node_id].of(graph.call(node))
    except IndexError:
        raise CannotSplitError(f"not independent: %{node_id} ({node.op}) has no such loop") from None


def _check_edge(graph: Graph, reader: NodeId, value: Value, axis: Axis | None, made: Loop) -> None:
    role = made.roles[value.output]
    if (isinstance(role, Concat) and role.axis == axis) or (isinstance(role, Same) and axis is None):
        return
    producer, node = graph.nodes[value.node], graph.nodes[reader]
    if isinstance(role, Reduce):
        why = f"reads the partial result of %{producer.id} ({producer.op})"
    elif isinstance(role, Lost):
        why = f"reads what parts of %{producer.id} ({producer.op}) do not give"
    elif axis is None:
        why = f"reads %{producer.id} ({producer.op}) whole"
    else:
        why = f"reads %{producer.id} ({producer.op}) along another dimension"
    raise CannotSplitError(f"not independent: %{reader} ({node.op}) {why}")


def _check_output(graph: Graph, value: Value, loop: Loop) -> None:
    node, spec = graph.nodes[value.node], graph.spec(value)
    if isinstance(loop.roles[value.output], Lost):
        raise CannotSplitError(f"not independent: parts of %{node.id} ({node.op}) do not give what is read outside")
    if spec.alias_of is not None:
        raise CannotSplitError(f"%{node.id} ({node.op}) is a view that is read outside: leave it outside")
    if not is_allocatable(spec):
        raise CannotSplitError(f"%{node.id} ({node.op}) gives a tensor with gaps, which parts cannot fill")


def is_allocatable(spec: TensorSpec) -> bool:
    """Whether its elements fill its storage without gaps or overlaps, in some order of the dimensions."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(spec.strides, spec.shape) if n != 1):
        if stride != expected:
            return spec.numel == 0
        expected *= length
    return spec.offset == 0


def connected(graph: Graph, region: Iterable[NodeId]) -> Iterator[frozenset[NodeId]]:
    """The weakly connected components of some nodes, by least node."""
    left = set(region)
    for start in sorted(left):
        if start not in left:
            continue
        found, todo = {start}, [start]
        left.discard(start)
        while todo:
            node_id = todo.pop()
            near = {value.node for value in graph.nodes[node_id].inputs}.union(graph.users[node_id])
            for other in near & left:
                left.discard(other)
                found.add(other)
                todo.append(other)
        yield frozenset(found)


def between(before: Mapping[NodeId, Sequence[NodeId]], region: frozenset[NodeId]) -> set[NodeId]:
    """Nodes outside of a region on paths from it to itself; `before` are each node's predecessors."""
    after: dict[NodeId, list[NodeId]] = {}
    for node_id, earlier in before.items():
        for other in earlier:
            after.setdefault(other, []).append(node_id)
    below = _reach(after, region)
    return below & _reach(before, region)


def _reach(edges: Mapping[NodeId, Sequence[NodeId]], region: frozenset[NodeId]) -> set[NodeId]:
    """Nodes outside of a region that can be reached from it (through outside nodes only)."""
    found: set[NodeId] = set()
    todo = list(region)
    while todo:
        for other in edges.get(todo.pop(), ()):
            if other not in region and other not in found:
                found.add(other)
                todo.append(other)
    return found
