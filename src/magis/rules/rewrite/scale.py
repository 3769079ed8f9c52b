"""Scales go into the products beside them, whose factors `alpha` and `beta` cost nothing.

    before   s = bmm(q, k);  t = s / 8;  p = softmax(t)
    after    t = baddbmm(0, q, k, beta=0, alpha=1/8);  p = softmax(t)

    before   d = softmax_backward(...);  e = d / 8;  dq = bmm(e, k);  dk = bmm(e', q)
    after    d = softmax_backward(...);  dq = baddbmm(0, d, k, beta=0, alpha=1/8);  dk = ...

Backwards to the product that makes what is scaled, or forwards to all that reads it: products, sums with a factor
(`add`, `sub`, `addcmul`, and updates `add_`), other scales; behind sums that leave few elements; before an `expand`
of few elements, also across a product of elements with it. Views and copies between stay.
Saves a pass over the scaled tensor, and a tensor of its size. Trades nothing but a launch that makes a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Arg, Slot
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.ops.rule import argument
from magis.rules.base import Change, Latency, Site
from magis.rules.rewrite.products import (
    Calculation,
    Product,
    all_then_each,
    in_turns,
    is_layout,
    number,
    overwritten,
    product_of,
    sole_reader,
)
from magis.schedule.incremental import Scheduled

_TIMES = ("aten.mul.Tensor", "aten.mul.Scalar")
_OVER = ("aten.div.Tensor", "aten.div.Scalar")
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.add_.Tensor", "aten.sub_.Tensor")
_SUM_OF_ELEMENTS = "aten.addcmul.default"
_TOTALS = ("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default")
FEWER = 8
"""How many times fewer elements a sum must leave, or an expansion start from, for a scale to go to them."""


class MoveScale:
    """Site: the scales that go. Those that share a neighbour go one after the other."""

    name: ClassVar[str] = "move scale"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """All of them at once, then each alone, the slowest first."""
        yield from all_then_each(state.flat.graph, latency_s, _fold)

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Moves them. None when one of them is not there, is no scale or cannot go."""
        return in_turns(program, site, infer, _fold)


def scale_of(graph: Graph, node: Node) -> tuple[Value, float] | None:
    """What the node multiplies by which number, both of one real type; None when it does something else."""
    if len(node.inputs) != 1 or not node.args or node.args[0] != Slot(0):
        return None
    spec, own = graph.spec(node.inputs[0]), node.outputs[0]
    if own is None or own.dtype != spec.dtype or not spec.dtype.is_floating:
        return None
    factor = _factor(node)
    return None if factor is None else (node.inputs[0], factor)


def _factor(node: Node) -> float | None:
    if node.op == "aten.neg.default":
        return -1.0
    given = number(node.args[1]) if len(node.args) == 2 else None
    if not given or not isfinite(given):
        return None
    if node.op in _TIMES:
        return float(given)
    return 1 / given if node.op in _OVER else None


@dataclass(frozen=True)
class _Fold:
    """How a scale goes: the products and other nodes that take its factor, the sums that it goes behind, or the
    expansion that it goes before."""

    scale: Node
    products: dict[NodeId, Product] = field(default_factory=dict)
    calls: dict[NodeId, Node] = field(default_factory=dict)
    behind: dict[NodeId, float] = field(default_factory=dict)
    before: NodeId | None = None
    passed: frozenset[NodeId] = frozenset()

    @property
    def touched(self) -> set[NodeId]:
        """The nodes that change, and those between."""
        before = () if self.before is None else (self.before,)
        return {self.scale.id, *self.passed, *self.products, *self.calls, *self.behind, *before}

    def do(self, rewriting: Calculation) -> None:
        """Puts the factor where it goes; readers of the scale then read what it scaled."""
        graph = rewriting.graph
        for node_id, product in self.products.items():
            rewriting.put_product(graph.nodes[node_id], product)
        for node_id, node in self.calls.items():
            rewriting.put(graph.nodes[node_id], node.op, node.inputs, node.args, node.kwargs)
        for node_id, factor in self.behind.items():
            origin = graph.nodes[node_id].origin
            made = rewriting.add("aten.mul.Tensor", (Value(node_id),), Slot(0), factor, origin=origin)
            rewriting.replace(Value(node_id), made)
        if self.before is not None:
            node = graph.nodes[self.before]
            found = scale_of(graph, self.scale)
            assert found is not None
            few = rewriting.add("aten.mul.Tensor", node.inputs, Slot(0), found[1], origin=self.scale.origin)
            many = rewriting.add(node.op, (few,), *node.args, kwargs=node.kwargs, origin=node.origin)
            rewriting.replace(Value(self.before), many)
        rewriting.replace(Value(self.scale.id), rewriting.edit.node(self.scale.id).inputs[0])


def _fold(graph: Graph, node: Node) -> _Fold | None:
    found = scale_of(graph, node)
    if found is None or not graph.users[node.id] or Value(node.id) in graph.outputs or overwritten(graph, found[0]):
        return None
    return _backwards(graph, node, *found) or _forwards(graph, node, *found) or _before_expand(graph, node, found[0])


def _backwards(graph: Graph, node: Node, source: Value, factor: float) -> _Fold | None:
    """The scale goes into the product that makes what it scales, if nothing else reads that."""
    passed = set(graph.users[node.id])
    while sole_reader(graph, source):
        producer = graph.nodes[source.node]
        if is_layout(producer):
            passed.add(producer.id)
            source = producer.inputs[0]
            continue
        product = product_of(graph, producer)
        if product is None:
            return None
        return _Fold(node, {producer.id: product.scaled(factor)}, passed=frozenset(passed))
    return None


def _forwards(graph: Graph, node: Node, source: Value, factor: float) -> _Fold | None:
    """The scale goes into everything that reads it, through views and copies."""
    scaled = [Value(node.id)]
    readers: dict[NodeId, Node] = {}
    for value in scaled:
        if value in graph.outputs:
            return None
        for user in graph.users[value.node]:
            if is_layout(graph.nodes[user]):
                scaled.append(Value(user))
            else:
                readers[user] = graph.nodes[user]
    fold = _Fold(node, passed=frozenset(value.node for value in scaled))
    pending = set(scaled)
    if not all(_takes(graph, reader, pending, factor, fold) for reader in readers.values()):
        return None
    return fold


def _before_expand(graph: Graph, node: Node, source: Value) -> _Fold | None:
    """The scale goes before an expansion: of what it scales, or of what the only reader multiplies that with."""
    passed = {node.id, *graph.users[node.id]}
    found = _expansion(graph, source, passed) or _expansion_beside(graph, node, passed)
    return None if found is None else _Fold(node, before=found, passed=frozenset(passed))


def _expansion_beside(graph: Graph, node: Node, passed: set[NodeId]) -> NodeId | None:
    """The expansion of few elements with which all that reads a scale multiplies it."""
    (first, *others) = graph.users[node.id]
    reader = graph.nodes[first]
    if others or reader.op != _TIMES[0] or len(reader.inputs) != 2:
        return None
    if len({graph.spec(value).dtype for value in (*reader.inputs, Value(reader.id))}) != 1:
        return None
    (other,) = (value for value in reader.inputs if value.node != node.id)
    return _expansion(graph, other, passed)


def _expansion(graph: Graph, value: Value, passed: set[NodeId]) -> NodeId | None:
    """The expansion of few elements behind a tensor that nobody else reads; the nodes between are added to `passed`."""
    between = set()
    while sole_reader(graph, value):
        node = graph.nodes[value.node]
        between.add(node.id)
        few = graph.spec(node.inputs[0]).numel * FEWER <= graph.spec(value).numel if node.inputs else False
        if node.op == "aten.expand.default" and few:
            passed |= between
            return node.id
        if not is_layout(node) and scale_of(graph, node) is None:
            return None
        value = node.inputs[0]
    return None


def _takes(graph: Graph, reader: Node, scaled: set[Value], factor: float, fold: _Fold) -> bool:
    """Whether a reader can take the factor; if so the fold says how."""
    product = product_of(graph, reader)
    if product is not None:
        alpha = product.alpha * factor ** ((product.a in scaled) + (product.b in scaled))
        beta = product.beta * factor if product.bias in scaled else product.beta
        fold.products[reader.id] = replace(product, alpha=alpha, beta=beta)
        return True
    other = scale_of(graph, reader)
    if other is not None:
        fold.calls[reader.id] = replace(reader, op=_TIMES[0], args=(Slot(0), other[1] * factor), kwargs=())
        return True
    if reader.op in _TOTALS:
        return _goes_behind(graph, reader, scaled, factor, fold)
    call = None
    if reader.op in _SUMS:
        call = _sum(graph, reader, scaled, factor)
    elif reader.op == _SUM_OF_ELEMENTS:
        call = _sum_of_elements(graph, reader, scaled, factor)
    if call is not None:
        fold.calls[reader.id] = call
    return call is not None


def _goes_behind(graph: Graph, reader: Node, scaled: set[Value], factor: float, fold: _Fold) -> bool:
    own, given = graph.spec(Value(reader.id)), graph.spec(reader.inputs[0])
    if own.dtype != given.dtype or own.numel * FEWER > given.numel:
        return False
    fold.behind[reader.id] = factor
    return True


def _sum(graph: Graph, node: Node, scaled: set[Value], factor: float) -> Node | None:
    """The sum with the factor in its `alpha`; None where both terms are scaled, or types differ."""
    alpha = number(argument(graph.call(node), 2, "alpha"), 1)
    if len(node.inputs) != 2 or node.args[:2] != (Slot(0), Slot(1)) or alpha is None:
        return None
    if len({graph.spec(value).dtype for value in (*node.inputs, Value(node.id))}) != 1:
        return None
    first, second = (value in scaled for value in node.inputs)
    if second and not first:
        return _with_alpha(node, node.inputs, alpha * factor)
    if first and not second and node.op == _SUMS[0] and alpha == 1:
        return _with_alpha(node, (node.inputs[1], node.inputs[0]), factor)
    return None


def _sum_of_elements(graph: Graph, node: Node, scaled: set[Value], factor: float) -> Node | None:
    """The sum `r + value * x * y` with the factor of x or y, or of both, in its `value`."""
    value = number(argument(graph.call(node), 3, "value"), 1)
    terms = [node.inputs[arg.index] for arg in node.args if isinstance(arg, Slot)]
    if value is None or len(terms) != 3 or terms[0] in scaled:
        return None
    if len({graph.spec(term).dtype for term in (*terms, Value(node.id))}) != 1:
        return None
    times = sum(term in scaled for term in terms)
    return replace(node, args=node.args[:3], kwargs=(("value", value * factor**times),))


def _with_alpha(node: Node, inputs: tuple[Value, ...], alpha: float) -> Node:
    named: tuple[tuple[str, Arg], ...] = () if alpha == 1 else (("alpha", alpha),)
    return replace(node, inputs=inputs, args=(Slot(0), Slot(1)), kwargs=named)
