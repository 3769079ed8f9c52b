"""Named invariants of a graph and its order. `verify` raises InvalidGraphError naming the first that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from magis.errors import InvalidGraphError
from magis.ir.args import slots
from magis.ir.graph import INPUT_KINDS, Graph, Node, Schedule, Value
from magis.ir.structure import order_violation, readers_before_write, topological_order


def verify(graph: Graph, schedule: Schedule | None = None) -> None:
    """Checks every invariant; with `schedule`, also that it is a valid order.

    Raises InvalidGraphError with the invariant's name (see `INVARIANTS`) and the offending node."""
    for name, check in INVARIANTS.items():
        for detail in check(graph):
            raise InvalidGraphError(name, detail)
    topological_order(graph)
    if schedule is not None:
        violation = order_violation(graph, schedule)
        if violation is not None:
            late = next(_read_after_write(graph, schedule), None)
            raise InvalidGraphError("no read after write" if late else "ordered", late or violation)


def _read_after_write(graph: Graph, schedule: Schedule) -> Iterator[str]:
    position = {node_id: place for place, node_id in enumerate(schedule)}
    for writer, readers in readers_before_write(graph).items():
        for reader in readers:
            if position.get(reader, -1) > position.get(writer, len(position)):
                yield f"%{reader} runs after %{writer}, which overwrites what it reads"


def _known_values(graph: Graph) -> Iterator[str]:
    def exists(value: Value) -> bool:
        node = graph.nodes.get(value.node)
        return node is not None and value.output < len(node.outputs) and node.outputs[value.output] is not None

    for node in graph.nodes.values():
        for value in node.inputs:
            if not exists(value):
                yield f"%{node.id} reads %{value.node}.{value.output}, which does not exist"
    for value in graph.outputs:
        if not exists(value):
            yield f"the graph hands back %{value.node}.{value.output}, which does not exist"


def _no_data_cycle(graph: Graph) -> Iterator[str]:
    graph.nodes_in_order()
    yield from ()


def _numbered_slots(graph: Graph) -> Iterator[str]:
    for node in graph.nodes.values():
        seen = list(dict.fromkeys(slots(node.args, node.kwargs)))
        if seen != list(range(len(node.inputs))) or len(set(node.inputs)) != len(node.inputs):
            yield f"%{node.id}: slots of {node.op} are not its {len(node.inputs)} distinct inputs in order"


def _described_inputs(graph: Graph) -> Iterator[str]:
    for node in graph.nodes.values():
        described = len(node.args) == 2 + len(node.inputs) and len(node.outputs) == 1
        if node.is_input and not (described and node.args[0] in INPUT_KINDS):
            yield f"%{node.id}: an input has one tensor, a kind of {INPUT_KINDS} and a name"


def _views_own_nothing(graph: Graph) -> Iterator[str]:
    for node in graph.nodes.values():
        for spec in node.outputs:
            if spec is None or spec.alias_of is None:
                if spec is not None and spec.writes:
                    yield f"%{node.id}: a write must alias what it writes"
                continue
            if not 0 <= spec.alias_of < len(node.inputs):
                yield f"%{node.id}: shares the storage of input {spec.alias_of}, which it has not"
            elif spec.storage_bytes != 0:
                yield f"%{node.id}: a view owns no bytes, not {spec.storage_bytes}"


def _inside_storage(graph: Graph) -> Iterator[str]:
    for node in graph.nodes.values():
        for output, spec in enumerate(node.outputs):
            if spec is None or spec.numel == 0:
                continue
            last = spec.offset + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides))
            owner = graph.spec(graph.root(Value(node.id, output)))
            if (last + 1) * spec.dtype.nbytes > owner.storage_bytes:
                yield f"%{node.id}.{output} reaches beyond its storage of {owner.storage_bytes} bytes"


def _writes_residents_only(graph: Graph) -> Iterator[str]:
    for node in graph.nodes.values():
        for index in node.written():
            root = graph.root(node.inputs[index])
            if not graph.nodes[root.node].is_input:
                yield f"%{node.id} writes into %{root.node}, which is not an input of the graph"


def _one_writer_a_version(graph: Graph) -> Iterator[str]:
    seen: dict[tuple[Value, int], Node] = {}
    for node in graph.nodes.values():
        for index in node.written():
            value = node.inputs[index]
            key = graph.root(value), graph.version(value)
            if key in seen:
                yield f"%{seen[key].id} and %{node.id} both overwrite version {key[1]} of %{key[0].node}"
            seen[key] = node


def _one_call_a_draw(graph: Graph) -> Iterator[str]:
    seen: dict[int, Node] = {}
    for node in graph.nodes.values():
        if node.stream is None:
            continue
        first = seen.setdefault(node.stream, node)
        if (first.op, first.args, first.outputs) != (node.op, node.args, node.outputs):
            yield f"%{first.id} and %{node.id} share random draw {node.stream} but are different calls"


def _named_outputs(graph: Graph) -> Iterator[str]:
    if len(graph.output_names) != len(graph.outputs):
        yield f"{len(graph.outputs)} outputs have {len(graph.output_names)} names"


INVARIANTS: dict[str, Callable[[Graph], Iterator[str]]] = {
    "known values": _known_values,
    "acyclic": _no_data_cycle,
    "numbered slots": _numbered_slots,
    "described inputs": _described_inputs,
    "views own nothing": _views_own_nothing,
    "inside storage": _inside_storage,
    "writes residents only": _writes_residents_only,
    "one writer a version": _one_writer_a_version,
    "one call a draw": _one_call_a_draw,
    "named outputs": _named_outputs,
}
