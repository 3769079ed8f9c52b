"""The computation graph: frozen nodes and values; aliases and in-place writes are data (ADR 2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import NewType

from magis.errors import InvalidGraphError
from magis.ir.args import Args, Kwargs
from magis.ir.dtype import DType

NodeId = NewType("NodeId", int)
Schedule = tuple[NodeId, ...]
INPUT = "input"
INPUT_KINDS = ("parameter", "buffer", "state", "batch", "constant")


HOST = "host"
"""The device of copies in host memory, to which tensors are swapped: they take no memory of the step's device."""


@dataclass(frozen=True, slots=True, order=True)
class Value:
    """One output of one node; the tail of an edge."""

    node: NodeId
    output: int = 0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type, layout and memory of one tensor.

    `storage_bytes` is what the tensor's own storage occupies: 0 when `alias_of` is set, since views own
    no bytes. `alias_of` is the index, among the node's inputs, of the tensor whose storage it shares.
    `writes` marks an in-place write: this output is the next version of that storage.
    Strides and offset count elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    storage_bytes: int
    alias_of: int | None = None
    writes: bool = False
    offset: int = 0
    device: str = "cpu"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, whether it owns them or not."""
        return self.numel * self.dtype.nbytes

    @property
    def memory_bytes(self) -> int:
        """What its own storage occupies on the step's device."""
        return 0 if self.device == HOST else self.storage_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are those of a dense row-major tensor."""
        return self.strides == contiguous_strides(self.shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a dense tensor of this shape."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from, for people only: never compared, never hashed."""

    module: str = ""
    line: str = ""
    direction: str = "forward"


@dataclass(frozen=True, slots=True)
class Call:
    """An operator call seen from outside: what its rule, its cost and its measurement depend on."""

    op: str
    args: Args
    kwargs: Kwargs
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec | None, ...]
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        """Worked out once: calls are the keys of every cache."""
        if not self._hash:
            found = hash((self.op, self.args, self.kwargs, self.inputs, self.outputs)) or 1
            object.__setattr__(self, "_hash", found)
        return self._hash


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call, or one input of the graph (`op == "input"`, `args == (kind, name)`; a third
    argument is the slot of another input whose storage it shares).

    `outputs` holds None for results that are no tensor. `stream` numbers the draws from the random
    generator in eager's order; None for operators that draw nothing. A recomputed random node keeps its number.
    """

    id: NodeId
    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[TensorSpec | None, ...]
    args: Args = ()
    kwargs: Kwargs = ()
    stream: int | None = None
    origin: Origin = field(default=Origin(), compare=False)

    @property
    def is_input(self) -> bool:
        """Whether it stands for a tensor that the caller hands in."""
        return self.op == INPUT

    @property
    def name(self) -> str:
        """Of an input: the caller's name for it, such as `encoder.layer.0.weight`. Otherwise empty."""
        return str(self.args[1]) if self.is_input else ""

    @property
    def kind(self) -> str:
        """Of an input: one of `INPUT_KINDS`. Otherwise empty."""
        return str(self.args[0]) if self.is_input else ""

    @property
    def writes(self) -> bool:
        """Whether it overwrites any of its inputs."""
        return any(spec is not None and spec.writes for spec in self.outputs)

    def written(self) -> Iterator[int]:
        """Indices of the inputs that it overwrites."""
        for spec in self.outputs:
            if spec is not None and spec.writes and spec.alias_of is not None:
                yield spec.alias_of


@dataclass(frozen=True)
class Graph:
    """A functional graph but for declared writes; built by capture, changed only through `GraphEdit`.

    `nodes` is ordered by id. `outputs` go back to the caller, under `output_names`
    ("loss", "grad:encoder.weight", "output:logits").
    """

    nodes: Mapping[NodeId, Node]
    outputs: tuple[Value, ...]
    output_names: tuple[str, ...] = ()
    name: str = "graph"

    def spec(self, value: Value) -> TensorSpec:
        """Type and layout of a value that is a tensor."""
        spec = self.nodes[value.node].outputs[value.output]
        assert spec is not None, f"%{value.node}.{value.output} is not a tensor"
        return spec

    def call(self, node: Node) -> Call:
        """The node seen from outside."""
        known = self._calls.get(node.id)
        if known is None or known[0] is not node:
            call = Call(node.op, node.args, node.kwargs, tuple(self.spec(v) for v in node.inputs), node.outputs)
            known = self._calls[node.id] = (node, call)
        return known[1]

    @cached_property
    def _calls(self) -> dict[NodeId, tuple[Node, Call]]:
        return {}

    @cached_property
    def users(self) -> Mapping[NodeId, tuple[NodeId, ...]]:
        """For each node, the nodes that read any of its outputs, ascending."""
        found: dict[NodeId, list[NodeId]] = {node_id: [] for node_id in self.nodes}
        for node in self.nodes.values():
            for producer in {value.node for value in node.inputs}:
                found[producer].append(node.id)
        return {producer: tuple(readers) for producer, readers in found.items()}

    @cached_property
    def _roots(self) -> dict[Value, tuple[Value, int]]:
        """Those that were asked for: storage and version."""
        return {}

    def _root(self, value: Value) -> tuple[Value, int]:
        """The value that owns a value's storage, and how many writes that storage has seen."""
        roots, views = self._roots, list[tuple[Value, bool]]()
        while value not in roots:
            node = self.nodes[value.node]
            spec = node.outputs[value.output]
            if spec is None:
                raise KeyError(value)
            if spec.alias_of is None:
                roots[value] = (value, 0)
                break
            views.append((value, spec.writes))
            if len(views) > len(self.nodes):
                raise InvalidGraphError("acyclic", f"%{value.node} reads its own result")
            value = node.inputs[spec.alias_of]
        root, version = roots[value]
        for view, writes in reversed(views):
            version += writes
            roots[view] = (root, version)
        return root, version

    def nodes_in_order(self) -> tuple[Node, ...]:
        """Nodes, each after the producers of its inputs (an edit may give a producer a larger id).

        Raises InvalidGraphError("acyclic") when a node reads its own result."""
        return self._in_order

    @cached_property
    def _in_order(self) -> tuple[Node, ...]:
        if all(value.node < node.id for node in self.nodes.values() for value in node.inputs):
            return tuple(self.nodes.values())
        sorter = TopologicalSorter({n.id: [v.node for v in n.inputs] for n in self.nodes.values()})
        try:
            return tuple(self.nodes[node_id] for node_id in sorter.static_order())
        except CycleError as error:
            raise InvalidGraphError("acyclic", f"%{error.args[1][0]} reads its own result") from None

    def root(self, value: Value) -> Value:
        """The value that owns the storage in which `value` lies."""
        return self._root(value)[0]

    def version(self, value: Value) -> int:
        """How many in-place writes its storage has seen when this value exists."""
        return self._root(value)[1]

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Input nodes, by id."""
        return tuple(node for node in self.nodes.values() if node.is_input)
