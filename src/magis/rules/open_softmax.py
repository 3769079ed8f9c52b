"""Opens the softmax of a cross-entropy, so that a region may run along its classes: a vocabulary (ADR 9).

    before   p = log_softmax(x);  loss = nll(p, y);  g = nll_backward(..., p, y);  dx = log_softmax_backward(g, p)
    after    m = max(x);  s = log(sum(exp(x - m))) + m;  loss = sum(kept * (s - sum(x where class = y)))
             dx = r * (exp(x - s) - (class = y)),  r the gradient of each row's loss

The classes meet only in a maximum and in sums, which parts may accumulate; of all tensors as large as x only x is
kept whole. Trades more elementwise operators for two or three tensors of that size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Arg, Slot, Symbol
from magis.ir.dtype import DType
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, Node, NodeId, Origin, TensorSpec, Value
from magis.ops.arguments import int_at
from magis.ops.loss import MEAN, SUM
from magis.ops.rule import dense
from magis.rules.base import Change, Latency, Site, changed, remove_unread
from magis.schedule.incremental import Scheduled

_SOFTMAX, _SOFTMAX_BACKWARD = "aten._log_softmax.default", "aten._log_softmax_backward_data.default"
_NLL, _NLL_BACKWARD = "aten.nll_loss_forward.default", "aten.nll_loss_backward.default"


@dataclass(frozen=True)
class _Loss:
    """A cross-entropy over classes, forward and backward."""

    softmax: Node
    nll: Node
    nll_backward: Node
    softmax_backward: Node


class OpenSoftmax:
    """Site: the softmax nodes to open. Their losses are summed, not averaged: see `magis.rules.loosen`."""

    name: ClassVar[str] = "open softmax"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """None: it pays only where a region along the classes follows."""
        return iter(())

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Opens them. None when one is not the softmax of such a loss."""
        graph = program.graph
        edit = GraphEdit(graph)
        for number in site:
            found = _loss(graph, NodeId(number))
            if found is None:
                return None
            _Opening(edit, graph, found).run()
            parts = (found.softmax, found.nll, found.nll_backward, found.softmax_backward)
            remove_unread(edit, program, {node.id for node in parts})
        return changed(program, edit) if site else None


def openable(graph: Graph) -> Site:
    """The softmax nodes that the rule opens, by id."""
    return tuple(node.id for node in graph.nodes.values() if node.op == _SOFTMAX and _loss(graph, node.id) is not None)


def _loss(graph: Graph, softmax: NodeId) -> _Loss | None:
    node = graph.nodes.get(softmax)
    if node is None or node.op != _SOFTMAX or any(value.node == softmax for value in graph.outputs):
        return None
    spec = graph.spec(Value(softmax))
    readers = {graph.nodes[user].op: graph.nodes[user] for user in graph.users[softmax]}
    wanted = {_NLL, _NLL_BACKWARD, _SOFTMAX_BACKWARD}
    if len(spec.shape) != 2 or len(graph.users[softmax]) != 3 or readers.keys() != wanted:
        return None
    if int_at(graph.call(node), 1, "dim", -1) % 2 != 1 or graph.spec(node.inputs[0]).dtype is not spec.dtype:
        return None
    found = _Loss(node, readers[_NLL], readers[_NLL_BACKWARD], readers[_SOFTMAX_BACKWARD])
    return found if _is_plain(graph, found) else None


def _is_plain(graph: Graph, found: _Loss) -> bool:
    """Whether the loss is a sum without weights whose gradient only the softmax's backward reads."""
    forward, backward = graph.call(found.nll), graph.call(found.nll_backward)
    return (
        int_at(forward, 3, "reduction", MEAN) == SUM
        and forward.args[2] is None
        and backward.args[3] is None
        and graph.users[found.nll_backward.id] == (found.softmax_backward.id,)
        and not any(value == Value(found.nll.id, 1) for node in graph.nodes.values() for value in node.inputs)
        and not any(value.node == found.nll_backward.id for value in graph.outputs)
    )


class _Opening:
    def __init__(self, edit: GraphEdit, graph: Graph, found: _Loss) -> None:
        self.edit, self.graph, self.found = edit, graph, found
        self.x = found.softmax.inputs[0]
        self.dtype = graph.spec(self.x).dtype
        self.rows, self.classes = graph.spec(self.x).shape
        self.origin: Origin = found.softmax.origin

    def run(self) -> None:
        forward, backward = self.found.nll, self.found.nll_backward
        labels, ignored = _taken(forward, 1), int_at(self.graph.call(forward), 4, "ignore_index", -100)
        row, all_ = (self.rows, 1), (self.rows, self.classes)
        y = self._add("aten.unsqueeze.default", (labels,), self._view(labels, row), Slot(0), 1)
        kept = self._add("aten.ne.Scalar", (y,), dense(row, DType.BOOL), Slot(0), ignored)
        most = self._add("aten.amax.default", (self.x,), dense(row, self.dtype), Slot(0), (1,), True)
        less = self._add("aten.sub.Tensor", (self.x, most), dense(all_, self.dtype), Slot(0), Slot(1))
        each = self._add("aten.exp.default", (less,), dense(all_, self.dtype), Slot(0))
        total = self._add("aten.sum.dim_IntList", (each,), dense(row, self.dtype), Slot(0), (1,), True)
        log = self._add("aten.log.default", (total,), dense(row, self.dtype), Slot(0))
        sums = self._add("aten.add.Tensor", (log, most), dense(row, self.dtype), Slot(0), Slot(1))
        loss = self._loss(y, kept, sums)
        self.edit.redirect_all(Value(forward.id), loss)
        self.origin = backward.origin
        gradient = self._gradient(y, kept, sums)
        self.edit.redirect_all(Value(self.found.softmax_backward.id), gradient)

    def _loss(self, y: Value, kept: Value, sums: Value) -> Value:
        row, all_ = (self.rows, 1), (self.rows, self.classes)
        own = self._add("aten.mul.Tensor", (self.x, self._is_own(y)), dense(all_, self.dtype), Slot(0), Slot(1))
        picked = self._add("aten.sum.dim_IntList", (own,), dense(row, self.dtype), Slot(0), (1,), True)
        each = self._add("aten.sub.Tensor", (sums, picked), dense(row, self.dtype), Slot(0), Slot(1))
        counted = self._add("aten.mul.Tensor", (each, kept), dense(row, self.dtype), Slot(0), Slot(1))
        return self._add("aten.sum.default", (counted,), dense((), self.dtype), Slot(0))

    def _gradient(self, y: Value, kept: Value, sums: Value) -> Value:
        """`r * (exp(x - s) - own)`; r is the loss's gradient, divided by the number of rows for a mean, or 0."""
        backward = self.found.nll_backward
        row, all_ = (self.rows, 1), (self.rows, self.classes)
        share = _taken(backward, 0)
        if int_at(self.graph.call(backward), 4, "reduction", MEAN) == MEAN:
            share = self._add("aten.div.Tensor", (share, _taken(backward, 6)), dense((), self.dtype), Slot(0), Slot(1))
        rate = self._add("aten.mul.Tensor", (kept, share), dense(row, self.dtype), Slot(0), Slot(1))
        less = self._add("aten.sub.Tensor", (self.x, sums), dense(all_, self.dtype), Slot(0), Slot(1))
        each = self._add("aten.exp.default", (less,), dense(all_, self.dtype), Slot(0))
        rest = self._add("aten.sub.Tensor", (each, self._is_own(y)), dense(all_, self.dtype), Slot(0), Slot(1))
        return self._add("aten.mul.Tensor", (rest, rate), dense(all_, self.dtype), Slot(0), Slot(1))

    def _is_own(self, y: Value) -> Value:
        """1 for each row's own class."""
        classes = dense((1, self.classes), DType.I64)
        device = (("device", Symbol("device", self.graph.spec(self.x).device)),)
        numbers = self._add("aten.arange.default", (), dense((self.classes,), DType.I64), self.classes, kwargs=device)
        across = self._add("aten.unsqueeze.default", (numbers,), _as_view(classes), Slot(0), 0)
        flags = dense((self.rows, self.classes), DType.BOOL)
        same = self._add("aten.eq.Tensor", (y, across), flags, Slot(0), Slot(1))
        options = (("dtype", self.dtype),)
        return self._add("aten._to_copy.default", (same,), dense(flags.shape, self.dtype), Slot(0), kwargs=options)

    def _view(self, value: Value, shape: tuple[int, ...]) -> TensorSpec:
        return _as_view(dense(shape, self.graph.spec(value).dtype))

    def _add(
        self,
        op: str,
        inputs: tuple[Value, ...],
        result: TensorSpec,
        *args: Arg,
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> Value:
        spec = replace(result, device=self.graph.spec(self.x).device)
        return Value(self.edit.add(op, inputs, (spec,), args, kwargs, origin=self.origin))


def _taken(node: Node, place: int) -> Value:
    value = node.args[place]
    assert isinstance(value, Slot)
    return node.inputs[value.index]


def _as_view(spec: TensorSpec) -> TensorSpec:
    """The type of a view of the first input."""
    return replace(spec, storage_bytes=0, alias_of=0)
