"""Graph-level dimensions for people: batch, sequence, heads, hidden, vocabulary, channels, height ... (ADR 9).

A name is read off what a component of the D-Graph runs through: the batch's own dimensions, attention, convolutions,
the classes of a loss, activations. It decides nothing: regions follow from the component alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from magis.fission.dim_graph import DimGraph, Vertex, dim_graph, window_graph
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.ops.arguments import int_at, ints_at, wrapped
from magis.ops.loop import Axis, Concat
from magis.ops.registry import rule_for

NAMES = (
    "batch",
    "sequence",
    "height",
    "width",
    "depth",
    "length",
    "vocabulary",
    "classes",
    "heads",
    "channels",
    "hidden",
    "features",
)
OTHER = "other"
SPACE = ("height", "width", "depth", "length")
_SPACE = {3: ("length",), 4: ("height", "width"), 5: ("depth", "height", "width")}
_ACTIVATIONS = ("gelu", "relu", "silu", "tanh", "sigmoid", "leaky_relu", "threshold")


@dataclass(frozen=True)
class Dimension:
    """A dimension of the graph: its name, its length, the strict components of the D-Graph that it consists of, the
    operators that it runs through, and the bytes of their results that lie along it."""

    name: str
    length: int
    components: tuple[tuple[Vertex, ...], ...]
    operators: int
    nbytes: int
    dims: DimGraph

    @property
    def halo(self) -> bool:
        """Whether it is read through windows anywhere, so that parts overlap."""
        return any(self.dims.loop(v).loop.window is not None for component in self.components for v in component)


def all_dimensions(graph: Graph) -> list[Dimension]:
    """All dimensions of a graph, those that cover most bytes first. A dimension of space is taken as a whole, with the
    windows through which it is read, where more lies along it then."""
    found = {(each.name, each.length): each for each in dimensions(dim_graph(graph))}
    for each in dimensions(window_graph(graph)):
        plain = found.get((each.name, each.length))
        if each.name in SPACE and (plain is None or plain.nbytes < each.nbytes):
            found[each.name, each.length] = each
    return sorted(found.values(), key=lambda d: (-d.nbytes, d.name, d.length))


def dimensions(dims: DimGraph) -> list[Dimension]:
    """All dimensions of a D-Graph by name and length, those that cover most bytes first."""
    names = component_names(dims)
    grouped: dict[tuple[str, int], list[tuple[Vertex, ...]]] = {}
    for component in dims.strict_components:
        if any(not dims.graph.nodes[vertex.node].is_input for vertex in component):
            length = max(dims.loop(vertex).loop.length for vertex in component)
            grouped.setdefault((names[component[0]], length), []).append(component)
    found = []
    for (name, length), components in grouped.items():
        vertices = [vertex for component in components for vertex in component]
        operators = {vertex.node for vertex in vertices if not dims.graph.nodes[vertex.node].is_input}
        nbytes = covered_bytes(dims, vertices)
        found.append(Dimension(name, length, tuple(components), len(operators), nbytes, dims))
    return sorted(found, key=lambda d: (-d.nbytes, d.name, d.length))


def covered_bytes(dims: DimGraph, vertices: Iterable[Vertex]) -> int:
    """Bytes of all results that lie along a dimension: what parts make smaller. Inputs of the graph left out."""
    values: set[Value] = set()
    for vertex in vertices:
        if not dims.graph.nodes[vertex.node].is_input:
            roles = dims.loop(vertex).loop.roles
            values.update(Value(vertex.node, i) for i, role in enumerate(roles) if isinstance(role, Concat))
    return sum(dims.graph.spec(value).storage_bytes for value in values)


def component_names(dims: DimGraph) -> Mapping[Vertex, str]:
    """The name of every vertex's dimension; worked out once for each D-Graph."""
    known = dims.__dict__.get("_names")
    if isinstance(known, dict):
        return known
    found: dict[Vertex, str] = {}
    dims.__dict__["_names"] = found
    tables = {
        dims.graph.spec(node.inputs[0]).shape[0]
        for node in dims.graph.nodes.values()
        if node.op == "aten.embedding.default"
    }
    for component in dims.components:
        hints = {hint for vertex in component for hint in _hints(dims, vertex, tables)}
        name = next((name for name in NAMES if name in hints), OTHER)
        found.update(dict.fromkeys(component, name))
    return found


def _hints(dims: DimGraph, vertex: Vertex, tables: set[int]) -> Iterator[str]:
    node = dims.graph.nodes[vertex.node]
    loop = dims.loop(vertex).loop
    if node.is_input:
        role = loop.roles[0]
        assert isinstance(role, Concat)
        if node.kind == "batch":
            yield from _of_batch(dims.graph, node, role.axis)
        return
    family = rule_for(node.op).family
    shapes = [dims.graph.spec(value).shape for value in node.inputs]
    for shape, axis in zip(shapes, loop.inputs):
        if axis is not None:
            yield from _of_operand(node, family, shape, axis)
    last = len(shapes[0]) - 1 if shapes else 0
    activated = any(word in node.op for word in _ACTIVATIONS) and last < 3
    if activated and any(axis is not None and axis.dim == last for axis in loop.inputs):
        yield "hidden"
    yield from _classes(dims, node, loop.roles, tables)


def _of_batch(graph: Graph, node: Node, axis: Axis) -> Iterator[str]:
    spec = graph.spec(Value(node.id))
    rank = len(spec.shape)
    if axis.dim == 0 and axis.outer == 1:
        yield "batch"
    elif not spec.dtype.is_floating or rank == 3:
        yield "sequence" if axis.dim == 1 else "features"
    elif rank in _SPACE and axis.dim >= 2:
        yield _SPACE[rank][axis.dim - 2]


def _of_operand(node: Node, family: str, shape: tuple[int, ...], axis: Axis) -> Iterator[str]:
    rank = len(shape)
    if rank in _SPACE and family in ("convolution", "pool", "upsample", "batch_norm") and axis.outer == 1:
        if axis.dim == 1:
            yield "channels"
        elif axis.dim >= 2:
            yield _SPACE[rank][axis.dim - 2]
    if rank == 4 and family in ("attention", "softmax") and axis.dim in (1, 2):
        yield "heads" if axis.dim == 1 else "sequence"
    if rank in (2, 3) and family in ("normalize", "matmul") and axis.dim == rank - 1:
        yield "features"


def _classes(dims: DimGraph, node: Node, roles: Sequence[object], tables: set[int]) -> Iterator[str]:
    """Whether the loop's result is what a softmax of the loss runs over."""
    for output, role in enumerate(roles):
        if not isinstance(role, Concat):
            continue
        value = Value(node.id, output)
        for user in dims.graph.users[node.id]:
            reader = dims.graph.nodes[user]
            if value in reader.inputs and role.axis.dim in _compared(dims.graph, reader):
                yield "vocabulary" if role.axis.length in tables else "classes"


def _compared(graph: Graph, reader: Node) -> tuple[int, ...]:
    """The dimension of which a loss takes a softmax, or, where that is open, the maximum."""
    call = graph.call(reader)
    rank = len(call.inputs[0].shape)
    if reader.op == "aten._log_softmax.default":
        return wrapped((int_at(call, 1, "dim", -1),), rank)
    return wrapped(ints_at(call, 1, "dim"), rank) if reader.op == "aten.amax.default" else ()


def modules_of(graph: Graph, nodes: Iterable[NodeId]) -> list[str]:
    """The modules of some operators, in the order of the graph."""
    return list(dict.fromkeys(graph.nodes[n].origin.module for n in sorted(nodes) if graph.nodes[n].origin.module))
