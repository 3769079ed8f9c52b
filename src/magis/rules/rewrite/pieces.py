"""A convolution of joined channels is the sum of the convolutions of what is joined.

    before   c = cat((x, y), 1);  z = convolution(c, w);  ...
             dc, dw = convolution_backward(g, c, w);  dx = slice(dc, 1, 0, 64);  dy = slice(dc, 1, 64, 192)
    after    z = convolution(x, w[:, :64]) + convolution(y, w[:, 64:]);  ...
             dx, a = convolution_backward(g, x, w[:, :64]);  dy, b = convolution_backward(g, y, w[:, 64:])
             dw = cat((a, b), 1)

So at the skip connections of U-Nets. Saves the joined tensor, which repeats what waits for the backward pass anyway,
and its gradient. Trades reading and adding results of the convolution, and products with fewer columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.ops.arguments import flag_at, int_at
from magis.ops.layout import slice_range
from magis.rules.base import Change, Latency, Site
from magis.rules.rewrite.products import Calculation, all_then_each, in_turns, overwritten, sole_reader
from magis.schedule.incremental import Scheduled

_JOIN, _SLICE = "aten.cat.default", "aten.slice.Tensor"
_FORWARD, _BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"
_TYPES = (DType.F32, DType.F64)
"""Where a sum of two results rounds as often as a sum of terms."""
WORTH = 3 / 4
"""Which share of the bytes that joining moves the sums may move for the step to get faster: products of few columns
take longer."""


class ConvolutionInPieces:
    """Site: the joins that go."""

    name: ClassVar[str] = "convolution in pieces"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """Those that likely save time at once, then all, then each alone, the slowest first."""
        graph = state.flat.graph
        sites = list(all_then_each(graph, latency_s, _pieces))
        worth = tuple(n for site in sites if len(site) == 1 for n in site if _is_worth(graph, graph.nodes[NodeId(n)]))
        if 1 < len(worth) < len(sites) - 1:
            yield worth
        yield from sites

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Takes them apart. None where something else than convolutions reads what is joined."""
        return in_turns(program, site, infer, _pieces)


@dataclass(frozen=True)
class _Gradient:
    """The gradient of a join: the operator that makes it, and for each slice of it the piece that it belongs to."""

    node: Node
    slices: dict[NodeId, int]


@dataclass(frozen=True)
class _Pieces:
    """A join of channels, what it joins and where that starts and ends, and the convolutions that read it."""

    graph: Graph
    node: Node
    values: tuple[Value, ...]
    bounds: tuple[tuple[int, int], ...]
    forward: tuple[Node, ...]
    backward: tuple[_Gradient, ...]

    @property
    def touched(self) -> set[NodeId]:
        """All of them, what they read, and what reads their results."""
        made = {node.id for node in self.forward}
        for gradient in self.backward:
            made |= {gradient.node.id, gradient.node.inputs[0].node, *gradient.slices}
        readers = {user for n in made for user in self.graph.users[n]}
        return {self.node.id, *made, *readers, *(value.node for value in self.values)}

    def do(self, rewriting: Calculation) -> None:
        """The sums and the gradients of the pieces."""
        for node in self.forward:
            self._sum(rewriting, node)
        for gradient in self.backward:
            self._gradients(rewriting, gradient)

    def _sum(self, rewriting: Calculation, node: Node) -> None:
        total: Value | None = None
        for piece, weight in zip(self.values, self._weights(rewriting, node, node.inputs[1])):
            inputs, args = (piece, weight, *node.inputs[2:]), node.args
            if total is not None:  # the bias is in the first
                inputs, args = inputs[:2], (*args[:2], None, *args[3:])
            made = rewriting.add(_FORWARD, inputs, *args, origin=node.origin)
            if total is not None:
                made = rewriting.add("aten.add.Tensor", (total, made), Slot(0), Slot(1), origin=node.origin)
            total = made
        assert total is not None
        rewriting.replace(Value(node.id), total)

    def _gradients(self, rewriting: Calculation, gradient: _Gradient) -> None:
        node = gradient.node
        given, _, weight = node.inputs
        *args, mask = node.args
        assert isinstance(mask, tuple)
        made = list[NodeId]()
        for piece, part in zip(self.values, self._weights(rewriting, node, weight)):
            wanted = (*mask[:2], bool(mask[2]) and not made)
            inputs = (given, piece, part)
            made.append(rewriting.call(_BACKWARD, inputs, *args, wanted, outputs=3, origin=node.origin))
        if mask[1]:
            slots = tuple(map(Slot, range(len(made))))
            parts = tuple(Value(one, 1) for one in made)
            whole = rewriting.add(_JOIN, parts, slots, 1, origin=node.origin)
            rewriting.replace(Value(node.id, 1), whole)
        if mask[2]:
            rewriting.replace(Value(node.id, 2), Value(made[0], 2))
        for reader, place in gradient.slices.items():
            rewriting.replace(Value(reader), Value(made[place], 0))

    def _weights(self, rewriting: Calculation, node: Node, weight: Value) -> list[Value]:
        """The weights of each piece."""
        return [
            rewriting.add(_SLICE, (weight,), Slot(0), 1, start, end, origin=node.origin) for start, end in self.bounds
        ]


def _pieces(graph: Graph, node: Node) -> _Pieces | None:
    """The join with its convolutions; None for other operators, and where the whole is needed."""
    if not _joins_channels(graph, node) or Value(node.id) in graph.outputs:
        return None
    values = tuple(_joined(graph, node))
    rank = len(graph.spec(Value(node.id)).shape)
    if any(len(graph.spec(value).shape) != rank or overwritten(graph, value) for value in values):
        return None
    ends = list(accumulate((graph.spec(value).shape[1] for value in values), initial=0))
    bounds = list(pairwise(ends))
    readers = [graph.nodes[user] for user in graph.users[node.id]]
    if len(values) < 2 or not readers or not all(_convolves(graph, reader, Value(node.id)) for reader in readers):
        return None
    backward = []
    for reader in readers:
        if reader.op == _BACKWARD:
            slices = _slices(graph, Value(reader.id), 0, bounds)
            if slices is None:
                return None
            backward.append(_Gradient(reader, slices))
    forward = tuple(reader for reader in readers if reader.op == _FORWARD)
    return _Pieces(graph, node, values, tuple(bounds), forward, tuple(backward))


def _joins_channels(graph: Graph, node: Node) -> bool:
    return node.op == _JOIN and _dim(graph, node) == 1


def _dim(graph: Graph, node: Node) -> int:
    """The dimension along which a node joins or slices."""
    return int_at(graph.call(node), 1, "dim") % len(graph.spec(Value(node.id)).shape)


def _joined(graph: Graph, node: Node) -> Iterator[Value]:
    """What is joined, also by joins that only this one reads."""
    for value in _operands(node):
        maker = graph.nodes[value.node]
        if _joins_channels(graph, maker) and sole_reader(graph, value):
            yield from _joined(graph, maker)
        else:
            yield value


def _operands(join: Node) -> list[Value]:
    listed = join.args[0]
    return [join.inputs[arg.index] for arg in listed if isinstance(arg, Slot)] if isinstance(listed, tuple) else []


def _is_worth(graph: Graph, node: Node) -> bool:
    """Whether sums of the convolutions' results move few bytes beside the joins, which read and write each element."""
    found = _pieces(graph, node)
    assert found is not None
    joined, todo = 0, [node]
    for join in todo:
        joined += 2 * graph.spec(Value(join.id)).nbytes
        makers = [graph.nodes[value.node] for value in _operands(join) if value not in found.values]
        todo.extend(makers)
    results = sum(graph.spec(Value(forward.id)).nbytes for forward in found.forward)
    return 3 * (len(found.values) - 1) * results <= WORTH * joined


def _convolves(graph: Graph, node: Node, joined: Value) -> bool:
    """Whether a node is a convolution of the tensor, or its gradient."""
    if node.op == _FORWARD:
        right = node.args[:2] == (Slot(0), Slot(1)) and node.args[2] in (None, Slot(2)) and node.inputs[0] == joined
    else:
        right = node.op == _BACKWARD and node.args[:3] == (Slot(0), Slot(1), Slot(2)) and node.inputs[1] == joined
    if not right or node.inputs.count(joined) != 1:
        return False
    call, first = graph.call(node), 3 if node.op == _FORWARD else 4
    whole = not flag_at(call, first + 3, "transposed") and int_at(call, first + 5, "groups") == 1
    return whole and graph.spec(joined).dtype in _TYPES and not node.kwargs


def _slices(graph: Graph, value: Value, start: int, bounds: list[tuple[int, int]]) -> dict[NodeId, int] | None:
    """The slices of a gradient, by the piece to which they belong; `start` is where the gradient itself starts. None
    where something else reads it."""
    found: dict[NodeId, int] = {}
    if value in graph.outputs:
        return None
    for node in (graph.nodes[user] for user in graph.users[value.node]):
        if value not in node.inputs:
            continue
        if node.op != _SLICE or _dim(graph, node) != 1:
            return None
        channels = slice_range(graph.call(node), graph.spec(value).shape[1], 2)
        place = start + channels.start, start + channels.stop
        if channels.step != 1:
            return None
        if place in bounds:
            found[node.id] = bounds.index(place)
            continue
        inner = _slices(graph, Value(node.id), place[0], bounds)
        if inner is None:
            return None
        found |= inner
    return found
