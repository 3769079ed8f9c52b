"""Loosens what ties all parts of a batch together, so that a region may contain it (ADR 9).

    before   loss, total = nll_loss(x, y, mean);  dx = nll_loss_backward(g, x, y, mean, total)
    after    total = sum(y != ignored);  loss = nll_loss(x, y, sum) / total;  dx = nll_loss_backward(..., total)

    before   dx = mse_loss_backward(g, x, y, mean)
    after    dx = mse_loss_backward(g / N, x, y, sum)

    before   noise = bernoulli(empty like x) / p        (4 bytes an element, drawn for the whole batch)
    after    mask = bernoulli(empty bytes);  noise = mask / p

A mean becomes a sum and one division outside; a normaliser that depends on the data is counted from the labels; random
masks are drawn whole, as bytes, and turned into numbers where they are used. Trades a few small operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Arg, Slot
from magis.ir.dtype import DType
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, Node, NodeId, TensorSpec, Value, contiguous_strides
from magis.ops.arguments import int_at
from magis.ops.loss import MEAN, SUM
from magis.ops.rule import argument, dense
from magis.rules.base import Change, Latency, Site, changed
from magis.schedule.incremental import Scheduled

_NLL = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_GRADIENTS = {
    "aten.mse_loss_backward.default": 3,
    "aten.smooth_l1_loss_backward.default": 3,
    "aten.huber_loss_backward.default": 3,
    "aten.soft_margin_loss_backward.default": 3,
    "aten.binary_cross_entropy_backward.default": 4,
}
"""Gradients of mean losses, and where their reduction stands."""


class Loosen:
    """Site: the nodes to rewrite."""

    name: ClassVar[str] = "loosen"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """All of them at once, if there are any."""
        found = loose_ends(state.flat.graph)
        if found:
            yield found

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Rewrites the nodes. None when one of them is not there or no such operator."""
        graph = program.graph
        edit = GraphEdit(graph)
        for number in site:
            node = graph.nodes.get(NodeId(number))
            rewrite = None if node is None else _rewrite(graph, node)
            if node is None or rewrite is None:
                return None
            rewrite(edit, graph, node)
        return changed(program, edit) if site else None


def loose_ends(graph: Graph) -> Site:
    """The nodes that the rule rewrites, by id."""
    return tuple(node.id for node in graph.nodes.values() if _rewrite(graph, node) is not None)


def _rewrite(graph: Graph, node: Node) -> Callable[[GraphEdit, Graph, Node], None] | None:
    if node.op in _NLL and int_at(graph.call(node), 3, "reduction", MEAN) == MEAN:
        return _separate_normaliser
    place = _GRADIENTS.get(node.op)
    if place is not None and int_at(graph.call(node), place, "reduction", MEAN) == MEAN:
        return _divide_gradient
    if node.op == "aten.bernoulli.p" and _is_noise(graph, node):
        return _draw_bytes
    return None


def _separate_normaliser(edit: GraphEdit, graph: Graph, node: Node) -> None:
    call = graph.call(node)
    labels, weights = _input(node, call.args[1]), _input(node, argument(call, 2, "weight"))
    ignored = int_at(call, 4, "ignore_index", -100)
    total_spec = graph.spec(Value(node.id, 1))
    total = _count(edit, graph, labels, weights, ignored, total_spec, node)
    summed = (*call.args[:3], SUM, *call.args[4:])
    edit.replace_node(replace(node, args=summed))
    loss = graph.spec(Value(node.id, 0))
    mean = edit.add("aten.div.Tensor", (Value(node.id), total), (loss,), (Slot(0), Slot(1)), origin=node.origin)
    edit.redirect_all(Value(node.id, 0), Value(mean), keep=lambda reader: reader == mean)
    edit.redirect_all(Value(node.id, 1), total, keep=lambda reader: reader == mean)


def _count(
    edit: GraphEdit,
    graph: Graph,
    labels: Value | None,
    weights: Value | None,
    ignored: int,
    total: TensorSpec,
    node: Node,
) -> Value:
    """The number of labels that count, or the sum of their weights."""
    assert labels is not None
    shape = graph.spec(labels).shape
    flags = dense(shape, DType.BOOL)
    counted = edit.add("aten.ne.Scalar", (labels,), (flags,), (Slot(0), ignored), origin=node.origin)
    options = (("dtype", total.dtype),)
    if weights is None:
        found = edit.add("aten.sum.default", (Value(counted),), (total,), (Slot(0),), options, origin=node.origin)
        return Value(found)
    spec = graph.spec(labels)
    safe = edit.add(
        "aten.mul.Tensor",
        (labels, Value(counted)),
        (dense(shape, spec.dtype),),
        (Slot(0), Slot(1)),
        origin=node.origin,
    )
    picked = dense(shape, total.dtype)
    each = edit.add("aten.index.Tensor", (weights, Value(safe)), (picked,), (Slot(0), (Slot(1),)), origin=node.origin)
    kept = edit.add("aten.mul.Tensor", (Value(each), Value(counted)), (picked,), (Slot(0), Slot(1)), origin=node.origin)
    found = edit.add("aten.sum.default", (Value(kept),), (total,), (Slot(0),), options, origin=node.origin)
    return Value(found)


def _divide_gradient(edit: GraphEdit, graph: Graph, node: Node) -> None:
    call, place = graph.call(node), _GRADIENTS[node.op]
    gradient = _input(node, call.args[0])
    assert gradient is not None
    count = graph.spec(Value(node.id)).numel
    spec = graph.spec(gradient)
    owned = replace(spec, storage_bytes=spec.nbytes, alias_of=None, offset=0, strides=contiguous_strides(spec.shape))
    share = edit.add("aten.div.Scalar", (gradient,), (owned,), (Slot(0), count), origin=node.origin)
    slot = call.args[0]
    assert isinstance(slot, Slot)
    inputs = tuple(Value(share) if i == slot.index else v for i, v in enumerate(node.inputs))
    edit.replace_node(replace(node, inputs=inputs, args=(*call.args[:place], SUM, *call.args[place + 1 :])))


def _is_noise(graph: Graph, node: Node) -> bool:
    """A draw of float32 numbers into memory that nobody else reads, all readers of which divide it."""
    spec = graph.spec(Value(node.id))
    source = graph.nodes[node.inputs[0].node]
    handed_back = any(value.node in (node.id, source.id) for value in graph.outputs)
    return (
        spec.dtype is DType.F32
        and spec.is_contiguous
        and source.op in ("aten.empty_like.default", "aten.empty.memory_format")
        and len(graph.users[source.id]) == 1
        and all(graph.nodes[user].op == "aten.div.Scalar" for user in graph.users[node.id])
        and not handed_back
    )


def _draw_bytes(edit: GraphEdit, graph: Graph, node: Node) -> None:
    """The same draws, as flags: the generator gives the same numbers whatever type they are kept in."""
    spec = graph.spec(Value(node.id))
    flags = replace(dense(spec.shape, DType.BOOL), device=spec.device)
    source = graph.nodes[node.inputs[0].node]
    memory = edit.add(
        "aten.empty.memory_format", (), (flags,), (spec.shape,), (("dtype", DType.BOOL),), origin=node.origin
    )
    edit.replace_node(replace(node, inputs=(Value(memory),), outputs=(flags,)))
    edit.remove(source.id)


def _input(node: Node, value: Arg) -> Value | None:
    return node.inputs[value.index] if isinstance(value, Slot) else None
