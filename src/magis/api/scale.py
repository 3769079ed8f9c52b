"""The scale of the proof: how large the terms are that were summed into each result, and how many.

A result's rounding error grows with the terms of its last reduction, not with its own size: some gradients
are zero by mathematics, sums of large terms that cancel. So each result is traced back, through operators
that only move, scale or add values, to the reductions that made it; their squared terms are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch

from magis.aten.convert import overload
from magis.backend.operands import arguments
from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.ops.registry import rule_for

_MOVES = {
    "aten._to_copy.default",
    "aten.clone.default",
    "aten.neg.default",
    "aten.copy_.default",
}
_SCALES = {"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"}
_ADDS = {"aten.add.Tensor", "aten.add_.Tensor", "aten.sub.Tensor", "aten.sub_.Tensor"}


@dataclass(frozen=True, slots=True)
class Scale:
    """`size` is the root of the sum of squared terms (largest element), `terms` their number, `dtype` the
    type in which they are summed. Where the result is a caller's tensor plus a change, `change` is the scale of the
    change alone: a weight is much larger than its update, and may not hide that the update is missing."""

    size: float
    terms: int
    dtype: DType
    change: Scale | None = None

    def tolerance(self, eps: float) -> float:
        """8 * size * (eps(result) + eps(sums) * sqrt(terms)): what rounding may change."""
        return 8.0 * self.size * (eps + self.dtype.eps * sqrt(self.terms))


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: Value
    factor: float


def scales(graph: Graph, values: Mapping[str, Value], inputs: Sequence[torch.Tensor]) -> dict[str, Scale]:
    """The scale of each named value, by running the captured graph operator by operator on `inputs`.

    Overwrites what the step overwrites; draws from the generator as the step does."""
    leaves = {name: _leaves(graph, value) for name, value in values.items()}
    wanted = {leaf.value for found in leaves.values() for leaf in found}
    sizes = _run(graph, wanted, inputs)
    return {name: _combined(graph, found, sizes) for name, found in leaves.items()}


def _combined(graph: Graph, leaves: Sequence[_Leaf], sizes: Mapping[Value, float]) -> Scale:
    squares = sum(leaf.factor**2 * sizes[leaf.value] for leaf in leaves)
    terms = sum(_terms(graph, leaf.value) for leaf in leaves)
    dtype = max((_sum_dtype(graph, leaf.value) for leaf in leaves), key=lambda d: d.eps)
    made = [leaf for leaf in leaves if not graph.nodes[leaf.value.node].is_input]
    change = _combined(graph, made, sizes) if 0 < len(made) < len(leaves) else None
    return Scale(sqrt(squares), max(terms, 1), dtype, change)


def _terms(graph: Graph, value: Value) -> int:
    node = graph.nodes[value.node]
    return 1 if node.is_input else rule_for(node.op).terms(graph.call(node), value.output)


def _sum_dtype(graph: Graph, value: Value) -> DType:
    """Half-precision operators add up in float32 and round once; that rounding is the result's own."""
    dtype = graph.spec(value).dtype
    return DType.F32 if dtype in (DType.F16, DType.BF16) else dtype


def _leaves(graph: Graph, result: Value) -> list[_Leaf]:
    """The values whose terms make up a result, each with the factor that it enters with."""
    found: list[_Leaf] = []
    todo = [_Leaf(result, 1.0)]
    while todo:
        leaf = todo.pop()
        parts = _parts(graph, leaf)
        if parts and len(found) + len(todo) < 64:
            todo += parts
        else:
            found.append(leaf)
    return found


def _parts(graph: Graph, leaf: _Leaf) -> list[_Leaf]:
    node = graph.nodes[leaf.value.node]
    if node.is_input:
        return []
    spec = graph.spec(leaf.value)
    if spec.alias_of is not None and not spec.writes:
        return [_Leaf(node.inputs[spec.alias_of], leaf.factor)]
    if node.op == "aten.copy_.default":
        return [_Leaf(node.inputs[-1], leaf.factor)]
    if node.op in _MOVES:
        return [_Leaf(node.inputs[0], leaf.factor)]
    if node.op in _SCALES:
        return _scaled(node, leaf)
    if node.op in _ADDS:
        alpha = dict(node.kwargs).get("alpha", 1)
        weights = [1.0, float(alpha) if isinstance(alpha, (int, float)) else 1.0]
        return [_Leaf(value, leaf.factor * weight) for value, weight in zip(node.inputs, weights)]
    return []


def _scaled(node: Node, leaf: _Leaf) -> list[_Leaf]:
    by = node.args[1]
    if isinstance(by, Slot) or not isinstance(by, (int, float)):
        return []
    factor = float(by) if ".mul." in node.op else 1.0 / float(by)
    return [_Leaf(node.inputs[0], leaf.factor * factor)]


def _run(graph: Graph, wanted: set[Value], inputs: Sequence[torch.Tensor]) -> dict[Value, float]:
    """Runs the graph in its order and takes the size of the wanted values on the way."""
    tensors: dict[Value, torch.Tensor] = {}
    last = _last_use(graph)
    sizes: dict[Value, float] = {}
    given = iter(inputs)
    with torch.no_grad():
        for node in graph.nodes.values():
            if node.is_input:
                tensors[Value(node.id)] = next(given)
                operands: list[torch.Tensor] = []
            else:
                operands = [tensors[value] for value in node.inputs]
                wants = [i for i in range(len(node.outputs)) if Value(node.id, i) in wanted]
                squares = {i: _squares(graph, node, operands, i) for i in wants}
                for output, tensor in enumerate(_call(graph, node, operands)):
                    if isinstance(tensor, torch.Tensor):
                        tensors[Value(node.id, output)] = tensor
                sizes |= {Value(node.id, i): size for i, size in squares.items() if size is not None}
            for output in range(len(node.outputs)):
                value = Value(node.id, output)
                if value in wanted and value not in sizes:
                    sizes[value] = _largest(tensors[value]) ** 2
            for value in last.get(node.id, ()):
                tensors.pop(value, None)
    return sizes


def _call(graph: Graph, node: Node, tensors: Sequence[torch.Tensor]) -> Sequence[object]:
    args, kwargs = arguments(graph.call(node), list(tensors))
    result = overload(node.op)(*args, **kwargs)
    return result if isinstance(result, (tuple, list)) else (result,)


def _squares(graph: Graph, node: Node, tensors: Sequence[torch.Tensor], output: int) -> float | None:
    """Largest sum of squared terms of a reduction's result; None when nothing is reduced."""
    call = graph.call(node)
    rule = rule_for(node.op)
    if rule.terms(call, output) <= 1:
        return None
    doubles = [t.double() if t.is_floating_point() else t for t in tensors]
    squares = rule.squared_terms(torch, call, doubles, output)
    return None if squares is None else _largest(squares)


def _largest(tensor: torch.Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    size = tensor.double().abs().max().item()
    return size if size == size else 0.0


def _last_use(graph: Graph) -> dict[NodeId, list[Value]]:
    """For each node the values that nobody needs after it."""
    last: dict[Value, NodeId] = {}
    for node in graph.nodes.values():
        for output in range(len(node.outputs)):
            last[Value(node.id, output)] = node.id
        for value in node.inputs:
            last[value] = node.id
    found: dict[NodeId, list[Value]] = {}
    for value, node_id in last.items():
        found.setdefault(node_id, []).append(value)
    return found
