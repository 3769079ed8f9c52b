"""Attention written out is PyTorch's own, which keeps no scores, and so is its gradient.

    before   s = bmm(q, k') / 8;  p = softmax(s);  o = bmm(p, v);  ...
             dv = bmm(p', g);  ds = softmax_backward(bmm(g, v'), p) / 8;  dq = bmm(ds, k);  dk = bmm(ds', q)
    after    o, sums = attention(q, k, v, scale=1/8);  ...
             dq, dk, dv = attention_backward(g, q, k, v, o, sums, scale=1/8)

Saves all passes over scores, and one tensor of their size that waits for the backward pass; queries, keys and values
are read where they are, without copies that bring the heads together. Trades the scores' second computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isclose
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Kwargs, Slot
from magis.ir.dtype import DType
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.rules.base import Change, Latency, Site
from magis.rules.rewrite.products import (
    Calculation,
    Product,
    all_then_each,
    in_turns,
    overwritten,
    product_of,
    sole_reader,
)
from magis.rules.rewrite.scale import scale_of
from magis.schedule.incremental import Scheduled

_SOFTMAX, _BACKWARD = "aten._softmax.default", "aten._softmax_backward_data.default"
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
_VIEWS = ("aten._unsafe_view.default", "aten.reshape.default", "aten.view.default")
_SAME = ("aten.alias.default", "aten.clone.default", "aten.detach.default", "aten.expand.default")
_TYPES = (DType.F32, DType.F64)
"""Where the operator computes in the type of its operands."""


class WholeAttention:
    """Site: the softmax in the middle of each attention."""

    name: ClassVar[str] = "whole attention"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """All of them at once, then each alone, the slowest first."""
        yield from all_then_each(state.flat.graph, latency_s, _attention)

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Puts them together. None where there is no such attention."""
        change = in_turns(program, site, infer, _attention)
        if change is None or any(n in change.program.graph.nodes for n in site):
            return None
        return change


@dataclass(frozen=True)
class _Seen:
    """A tensor with each of its matrices as it is, or turned, and times a number."""

    value: Value
    turned: bool = False
    factor: float = 1.0


def _before(graph: Graph, seen: _Seen) -> _Seen | None:
    """The tensor of which this one is a view, a copy or a multiple; None when it is none."""
    node = graph.nodes[seen.value.node]
    scaled = scale_of(graph, node)
    if scaled is not None:
        return _Seen(scaled[0], seen.turned, seen.factor * scaled[1])
    if len(node.inputs) != 1 or node.args[:1] != (Slot(0),):
        return None
    return _across(graph, node, seen, node.inputs[0])


def _across(graph: Graph, node: Node, seen: _Seen, other: Value) -> _Seen | None:
    """What `seen` is on the other side of a view or copy; None where matrices do not stay matrices."""
    before, after = graph.spec(node.inputs[0]), graph.spec(Value(node.id))
    if node.op in _SAME and before.shape == after.shape:
        return _Seen(other, seen.turned, seen.factor)
    if node.op in _VIEWS and len(before.shape) > 2 and before.shape[-2:] == after.shape[-2:] and len(after.shape) > 2:
        return _Seen(other, seen.turned, seen.factor)
    if node.op == "aten.transpose.int" and {d % len(after.shape) for d in node.args[1:] if isinstance(d, int)} == {
        len(after.shape) - 2,
        len(after.shape) - 1,
    }:
        return _Seen(other, not seen.turned, seen.factor)
    return None


def _source(graph: Graph, value: Value, turned: bool) -> Value | None:
    """The first tensor [batch, heads, length, width] of which this one is a view or copy (`turned`: with each matrix
    turned), its rows dense."""
    found: Value | None = None
    seen: _Seen | None = _Seen(value)
    while seen is not None and seen.factor == 1:
        spec = graph.spec(seen.value)
        if (
            len(spec.shape) == 4
            and seen.turned == turned
            and spec.strides[-1] == 1
            and not overwritten(graph, seen.value)
        ):
            found = seen.value
        seen = _before(graph, seen)
    return found


def _made_by(graph: Graph, value: Value) -> tuple[Node, Product, float] | None:
    """The product behind a tensor that nobody else reads, and the number by which it is multiplied."""
    seen: _Seen | None = _Seen(value)
    while seen is not None and not seen.turned and sole_reader(graph, seen.value):
        node = graph.nodes[seen.value.node]
        product = _bare(graph, node)
        if product is not None:
            return node, product, seen.factor * product.alpha
        seen = _before(graph, seen)
    return None


def _bare(graph: Graph, node: Node) -> Product | None:
    product = product_of(graph, node)
    return product if product is not None and product.batched and product.bias is None else None


def _readers(graph: Graph, value: Value) -> list[tuple[Node, _Seen]] | None:
    """Who reads a tensor, through views, copies and scales, and as what; None when the caller gets it."""
    found = []
    todo = [_Seen(value)]
    for seen in todo:
        if seen.value in graph.outputs:
            return None
        for node in (graph.nodes[n] for n in graph.users[seen.value.node] if seen.value in graph.nodes[n].inputs):
            after = _across(graph, node, seen, Value(node.id)) if len(node.inputs) == 1 else None
            scaled = scale_of(graph, node)
            if scaled is not None:
                after = _Seen(Value(node.id), seen.turned, seen.factor * scaled[1])
            if after is None:
                found.append((node, seen))
            else:
                todo.append(after)
    return found


@dataclass(frozen=True)
class _Gradient:
    """The backward pass: the gradient given, and the products that make those of q, k and v; `turned`: that of k is."""

    given: Value
    dq: Node
    dk: Node
    dv: Node
    turned: bool


@dataclass(frozen=True)
class _Attention:
    """An attention: its operands, its scale, the product that makes its result, and its backward pass."""

    graph: Graph
    softmax: Node
    q: Value
    k: Value
    v: Value
    scale: float
    result: Node
    gradient: _Gradient | None

    @property
    def touched(self) -> set[NodeId]:
        """The operators whose results are replaced, their readers, and the operands."""
        nodes = {self.softmax.id, self.result.id}
        values = [self.q, self.k, self.v]
        if self.gradient is not None:
            nodes |= {self.gradient.dq.id, self.gradient.dk.id, self.gradient.dv.id}
            values.append(self.gradient.given)
        return nodes.union((value.node for value in values), *(self.graph.users[n] for n in nodes))

    def do(self, rewriting: Calculation) -> None:
        """The operator takes the place of all results."""
        scale: Kwargs = (("scale", self.scale),)
        origin = self.softmax.origin
        inputs = (self.q, self.k, self.v)
        slots = tuple(map(Slot, range(6)))
        made = rewriting.call(f"{_ATTENTION}.default", inputs, *slots[:3], kwargs=scale, outputs=2, origin=origin)
        _put(rewriting, self.result, Value(made))
        gradient = self.gradient
        if gradient is None:
            return
        given = (gradient.given, *inputs, Value(made), Value(made, 1))
        origin = gradient.dq.origin
        back = rewriting.call(
            f"{_ATTENTION}_backward.default", given, *slots, 0.0, False, kwargs=scale, outputs=3, origin=origin
        )
        _put(rewriting, gradient.dq, Value(back))
        _put(rewriting, gradient.dk, Value(back, 1), gradient.turned)
        _put(rewriting, gradient.dv, Value(back, 2))


def _put(rewriting: Calculation, product: Node, new: Value, turned: bool = False) -> None:
    """Puts a tensor with heads in the place of a product without."""
    graph, old = rewriting.graph, Value(product.id)
    if turned:
        new = rewriting.add("aten.transpose.int", (new,), Slot(0), -1, -2, origin=product.origin)
    shape = rewriting.spec(new).shape
    (reader, *others) = graph.users[product.id] or (None,)
    if reader is not None and not others and old not in graph.outputs:
        node = graph.nodes[reader]
        if node.op in _VIEWS and graph.spec(Value(reader)).shape == shape:
            rewriting.replace(Value(reader), new)
            return
    dense = rewriting.contiguous(new)
    rewriting.replace(old, rewriting.add("aten.view.default", (dense,), Slot(0), graph.spec(old).shape))


def _attention(graph: Graph, softmax: Node) -> _Attention | None:
    """The attention around a softmax; None when there is none."""
    if softmax.op != _SOFTMAX or graph.spec(Value(softmax.id)).dtype not in _TYPES or not _last(graph, softmax, 1):
        return None
    if graph.spec(Value(softmax.id)).device != "cpu" or softmax.args[2:] != (False,):
        return None
    scores = _made_by(graph, softmax.inputs[0])
    readers = _readers(graph, Value(softmax.id))
    if scores is None or readers is None or any(seen.factor != 1 for _, seen in readers):
        return None
    q, k = _source(graph, scores[1].a, turned=False), _source(graph, scores[1].b, turned=True)
    products = {seen.turned: (node, _bare(graph, node)) for node, seen in readers if _bare(graph, node) is not None}
    result, weighted = products.get(False, (None, None))
    if q is None or k is None or result is None or weighted is None or weighted.alpha != 1:
        return None
    if not _reads(readers, result, weighted.a):
        return None
    v = _source(graph, weighted.b, turned=False)
    if v is None or len({graph.spec(x).shape[:2] for x in (q, k, v)}) != 1:
        return None
    whole = _Attention(graph, softmax, q, k, v, scores[2], result, None)
    if len(readers) == 1:
        return whole
    gradient = _gradient(graph, whole, readers, products.get(True, (None, None))[0])
    return None if gradient is None else replace(whole, gradient=gradient)


def _reads(readers: list[tuple[Node, _Seen]], node: Node, value: Value) -> bool:
    """Whether a node is among the readers once, and takes the tensor from there."""
    return [seen.value for reader, seen in readers if reader.id == node.id] == [value]


def _last(graph: Graph, node: Node, place: int) -> bool:
    """Whether the dimension given at a place of the call is the last one."""
    dim, rank = node.args[place], len(graph.spec(Value(node.id)).shape)
    return isinstance(dim, int) and dim % rank == rank - 1


def _gradient(graph: Graph, whole: _Attention, readers: list[tuple[Node, _Seen]], dv: Node | None) -> _Gradient | None:
    """The backward pass that reads the weights besides the result; None where somebody else does."""
    back = next((node for node, _ in readers if node.op == _BACKWARD), None)
    if len(readers) != 3 or back is None or dv is None or not _last(graph, back, 2) or len(back.inputs) != 2:
        return None
    summed, wanted = _bare(graph, dv), _made_by(graph, back.inputs[0])
    if summed is None or not _reads(readers, dv, summed.a) or not _reads(readers, back, back.inputs[1]):
        return None
    given = _source(graph, summed.b, turned=False)
    if wanted is None or given is None or summed.alpha != 1 or wanted[2] != 1:
        return None
    if _source(graph, wanted[1].a, False) != given or _source(graph, wanted[1].b, True) != whole.v:
        return None
    found = _of_scores(graph, whole, back)
    return None if found is None else _Gradient(given, found[0], found[1], dv, found[2])


def _of_scores(graph: Graph, whole: _Attention, back: Node) -> tuple[Node, Node, bool] | None:
    """The products of the gradient of the scores with k, and with q, and whether the latter is turned."""
    readers = _readers(graph, Value(back.id))
    dq: Node | None = None
    dk: tuple[Node, bool] | None = None
    for node, seen in readers or ():
        product = _bare(graph, node)
        if product is None or not isclose(seen.factor * product.alpha, whole.scale, rel_tol=1e-12):
            return None
        left = product.a == seen.value
        other = product.b if left else product.a
        if left and not seen.turned and _source(graph, other, turned=False) == whole.k:
            dq = node
        elif left and seen.turned and _source(graph, other, turned=False) == whole.q:
            dk = node, False
        elif not left and not seen.turned and _source(graph, other, turned=True) == whole.q:
            dk = node, True
        else:
            return None
    return (dq, *dk) if readers is not None and len(readers) == 2 and dq is not None and dk is not None else None
