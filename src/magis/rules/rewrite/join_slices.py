"""Slices that are each filled up with zeros and then added are joined.

    before   a = slice_backward(x, shape, 3, 0, 32);  b = slice_backward(y, shape, 3, 32, 64);  z = a + b
    after    z = cat((x, y), 3)

So in the gradients of rotary embeddings, whose halves are read apart. Saves two tensors full of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Slot
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.ops.arguments import int_at
from magis.ops.layout import slice_range
from magis.rules.base import Change, Latency, Site
from magis.rules.rewrite.products import Calculation, all_then_each, in_turns, sole_reader
from magis.schedule.incremental import Scheduled

_FILL = "aten.slice_backward.default"


class JoinSlices:
    """Site: the sums that become joins."""

    name: ClassVar[str] = "join slices"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """All of them at once, then each alone, the slowest first."""
        yield from all_then_each(state.flat.graph, latency_s, _join)

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Joins them. None where what is added are no slices that make a whole."""
        return in_turns(program, site, infer, _join)


@dataclass(frozen=True)
class _Join:
    """A sum of two filled slices, the slices in their order, and along which dimension they lie."""

    node: Node
    fills: tuple[Node, Node]
    dim: int
    readers: tuple[NodeId, ...]

    @property
    def touched(self) -> set[NodeId]:
        """The sum, what it adds, and what reads it."""
        return {self.node.id, *(fill.id for fill in self.fills), *self.readers}

    def do(self, rewriting: Calculation) -> None:
        """The slices side by side."""
        slices = [fill.inputs[0] for fill in self.fills]
        whole = rewriting.add("aten.cat.default", slices, (Slot(0), Slot(1)), self.dim, origin=self.node.origin)
        rewriting.replace(Value(self.node.id), whole)


def _join(graph: Graph, node: Node) -> _Join | None:
    """The sum of two filled slices that leave nothing out and do not overlap; None for other sums."""
    if node.op != "aten.add.Tensor" or len(node.inputs) != 2 or node.args != (Slot(0), Slot(1)) or node.kwargs:
        return None
    fills = [graph.nodes[value.node] for value in node.inputs]
    if any(fill.op != _FILL or not sole_reader(graph, Value(fill.id)) for fill in fills):
        return None
    whole = graph.spec(Value(node.id))
    specs = [graph.spec(Value(fill.id)) for fill in fills]
    if any((spec.shape, spec.dtype) != (whole.shape, whole.dtype) for spec in specs):
        return None
    dims = {int_at(graph.call(fill), 2, "dim") % len(whole.shape) for fill in fills}
    if len(dims) != 1:
        return None
    (dim,) = dims
    ranges = [slice_range(graph.call(fill), whole.shape[dim], 3) for fill in fills]
    first, second = sorted(zip(ranges, fills), key=lambda pair: pair[0].start)
    if [*first[0], *second[0]] != [*range(whole.shape[dim])]:
        return None
    return _Join(node, (first[1], second[1]), dim, graph.users[node.id])
