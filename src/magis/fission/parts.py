"""One part of a region: every operator's call at the part's size (paper section 4.2; ADR 9).

Types of resized calls come from an `infer` function that is handed in, so that nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from magis.errors import MagisError
from magis.fission.tree import Fission
from magis.ir.graph import Call, Graph, Node, NodeId, TensorSpec, Value, contiguous_strides
from magis.ops.loop import Axis, Concat, Loop, part_shape, shrunk
from magis.ops.registry import rule_for

Infer: TypeAlias = Callable[[Call], tuple[TensorSpec | None, ...]]
"""Outputs of a call whose inputs or arguments were resized. Raises CannotInferError."""


class CannotInferError(MagisError):
    """An operator refuses a part's inputs."""


class CannotSplitError(MagisError):
    """A region that may not, or cannot, run in parts; the message names the condition and the node."""


def no_infer(call: Call) -> tuple[TensorSpec | None, ...]:
    """For programs without regions: nothing is resized."""
    raise CannotInferError(f"{call.op} cannot be resized without PyTorch")


@dataclass(frozen=True)
class Scope:
    """The sizes around a region: every node's call there, and which loops are split around it, to which length."""

    graph: Graph
    calls: Mapping[NodeId, Call]
    splits: tuple[tuple[Mapping[NodeId, Loop], int], ...] = ()
    seen: Mapping[Value, TensorSpec] = field(default_factory=dict)

    @classmethod
    def whole(cls, graph: Graph, nodes: Iterable[NodeId] | None = None) -> Scope:
        """The graph as it is; only these nodes if given."""
        wanted = graph.nodes if nodes is None else nodes
        return cls(graph, {n: graph.call(graph.nodes[n]) for n in wanted})

    def spec(self, value: Value) -> TensorSpec:
        """A value's type at these sizes."""
        if value in self.seen:
            return self.seen[value]
        call = self.calls.get(value.node)
        spec = self.graph.spec(value) if call is None else call.outputs[value.output]
        assert spec is not None, f"%{value.node}.{value.output} is not a tensor"
        return spec

    def seeing(self, slices: Mapping[Value, TensorSpec]) -> Scope:
        """The same, where these values are seen as slices of these types."""
        return replace(self, seen={**self.seen, **slices})

    def without_bias(self, node: NodeId) -> Loop | None:
        """The loop around that adds a node's bias once, so that no part of it in here may."""
        around = (loops[node] for loops, _ in self.splits if node in loops)
        return next((loop for loop in around if loop.once is not None), None)

    def loop(self, node: Node, fission: Fission) -> Loop:
        """The loop of a region's node, at these sizes."""
        loop = fission.cuts[node.id].of(self.graph.call(node))
        for loops, length in self.splits:
            if node.id in loops:
                loop = _shrunk_loop(loop, loops[node.id], length)
        return loop


@dataclass
class Part:
    """A part of a region with `length` of its positions: the calls of its nodes; their loops, which refer to the
    sizes around the region; and what it reads of tensors from outside: per tensor and axis, the slice's type, which
    owns no storage if it is a view."""

    length: int
    loops: Mapping[NodeId, Loop]
    calls: dict[NodeId, Call] = field(default_factory=dict)
    slices: dict[tuple[Value, Axis], TensorSpec] = field(default_factory=dict)

    def inside(self, scope: Scope, with_bias: frozenset[NodeId] = frozenset()) -> Scope:
        """The sizes in this part, for regions inside; `with_bias` are nodes whose bias this part adds."""
        loops = {**self.loops, **{node: replace(self.loops[node], once=None) for node in with_bias}}
        return Scope(scope.graph, {**scope.calls, **self.calls}, (*scope.splits, (loops, self.length)), scope.seen)


def loops_of(fission: Fission, scope: Scope) -> dict[NodeId, Loop]:
    """The loop of every node of a region, at the sizes around it. Raises CannotSplitError."""
    nodes = scope.graph.nodes
    try:
        return {node: scope.loop(nodes[node], fission) for node in sorted(fission.region)}
    except (IndexError, ValueError) as error:
        raise CannotSplitError(f"a node of the region has no such loop: {error}") from None


def part(fission: Fission, scope: Scope, length: int, infer: Infer, loops: Mapping[NodeId, Loop] | None = None) -> Part:
    """The part of a region that has `length` positions. Slices of outside tensors are views; where operators refuse
    them, copies. Raises CannotSplitError when an operator cannot run at that size."""
    found = loops or loops_of(fission, scope)
    try:
        return _Builder(fission, scope, length, infer, copying=False).build(found)
    except CannotInferError:
        try:
            return _Builder(fission, scope, length, infer, copying=True).build(found)
        except CannotInferError as error:
            raise CannotSplitError(f"a part of {length} cannot run: {error}") from None


class _Builder:
    def __init__(self, fission: Fission, scope: Scope, length: int, infer: Infer, copying: bool) -> None:
        self.fission, self.scope, self.length, self.infer = fission, scope, length, infer
        self.copying = copying
        self.copied: set[tuple[Value, Axis]] = set()

    def build(self, loops: Mapping[NodeId, Loop]) -> Part:
        found = Part(self.length, loops)
        graph = self.scope.graph
        for node_id, loop in loops.items():
            self._note_copies(graph.nodes[node_id], loop)
        for node in graph.nodes_in_order():
            if node.id in self.fission.region:
                found.calls[node.id] = self._call(node, loops[node.id], found)
        return found

    def _note_copies(self, node: Node, loop: Loop) -> None:
        """Slices that a kernel would read as if they were contiguous, and are not."""
        for number in rule_for(node.op).contiguous_inputs(self.scope.calls[node.id]):
            value, axis = node.inputs[number], loop.inputs[number]
            if axis is None or value.node in self.fission.region:
                continue
            whole = self.scope.spec(value)
            if _scattered(sliced(whole, axis, self.length), whole):
                self.copied.add((value, axis))

    def _call(self, node: Node, loop: Loop, found: Part) -> Call:
        around = self.scope.calls[node.id]
        rule = rule_for(node.op)
        args, kwargs = rule.part(around, loop, self.length)
        inputs = tuple(self._input(v, axis, found) for v, axis in zip(node.inputs, loop.inputs))
        if any(_scattered(inputs[i], around.inputs[i]) for i in rule.contiguous_inputs(around)):
            raise CannotInferError(f"{node.op} reads its inputs as if they were contiguous")
        call = Call(node.op, args, kwargs, inputs, around.outputs)
        return replace(call, outputs=self.infer(call))

    def _input(self, value: Value, axis: Axis | None, found: Part) -> TensorSpec:
        if value.node in found.calls:
            spec = found.calls[value.node].outputs[value.output]
            assert spec is not None
            return spec
        whole = self.scope.spec(value)
        if axis is None:
            return whole
        key = (value, axis)
        if key not in found.slices:
            found.slices[key] = sliced(whole, axis, self.length, self.copying or key in self.copied)
        return found.slices[key]


def sliced(whole: TensorSpec, axis: Axis, length: int, copying: bool = False) -> TensorSpec:
    """The type of the first part's slice: a view, or a copy of its own for a factor that is not the leading one."""
    shape = part_shape(whole.shape, axis, length)
    if axis.outer == 1 and not copying:
        return replace(whole, shape=shape, storage_bytes=0, alias_of=0, writes=False)
    spec = TensorSpec(shape, contiguous_strides(shape), whole.dtype, 0, device=whole.device)
    return replace(spec, storage_bytes=spec.nbytes)


def _scattered(piece: TensorSpec, whole: TensorSpec) -> bool:
    """Whether a piece has gaps, or another order of its dimensions, where the whole has none."""
    return not piece.is_contiguous and _dense(whole, whole) and not _dense(piece, whole)


def _dense(spec: TensorSpec, like: TensorSpec) -> bool:
    """Whether its elements lie side by side, its dimensions in the order of those of another tensor."""
    expected = 1
    for dim in sorted(range(len(like.shape)), key=lambda dim: (like.strides[dim], -dim)):
        if spec.shape[dim] != 1 and spec.strides[dim] != expected:
            return False
        expected *= spec.shape[dim]
    return True


def _shrunk_loop(loop: Loop, by: Loop, length: int) -> Loop:
    """The loop in a part of an enclosing loop of the same node."""

    def shrink(axis: Axis | None, other: Axis | None) -> Axis | None:
        return axis if axis is None or other is None else shrunk(axis, other, length)

    roles = tuple(
        Concat(shrunk(role.axis, other.axis, length))
        if isinstance(role, Concat) and isinstance(other, Concat)
        else role
        for role, other in zip(loop.roles, by.roles)
    )
    return replace(loop, inputs=tuple(map(shrink, loop.inputs, by.inputs)), roles=roles)
