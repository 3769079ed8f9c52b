"""Copies of what lies in that order already are left out, and so is what changes nothing.

    before   c = clone(x, contiguous);  y = f(view(c))        (x is contiguous)
    after    y = f(view(x))

    before   y = f(pow(x, 1));  z = g(x + 0, x * 1)           (gradients of squares, numbers of positions)
    after    y = f(x);  z = g(x, x)

Such copies are left where another rewrite gave a tensor a new layout: an attention that is put together gives its
results in the order in which the next product reads them. Trades nothing but that x stays until c's last reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Slot
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.rules.base import Change, Latency, Site
from magis.rules.rewrite.products import Calculation, all_then_each, in_turns, number, overwritten
from magis.schedule.incremental import Scheduled


class WithoutCopy:
    """Site: the copies that go."""

    name: ClassVar[str] = "without copy"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """All of them at once, then each alone, the slowest first."""
        yield from all_then_each(state.flat.graph, latency_s, _copy)

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Leaves them out. None when one of them is not there or is needed."""
        return in_turns(program, site, infer, _copy)


@dataclass(frozen=True)
class _Copy:
    """A copy, and who reads it."""

    node: Node
    readers: tuple[NodeId, ...]

    @property
    def touched(self) -> set[NodeId]:
        """The copy, what it copies and its readers."""
        return {self.node.id, self.node.inputs[0].node, *self.readers}

    def do(self, rewriting: Calculation) -> None:
        """Its readers read the original."""
        rewriting.replace(Value(self.node.id), self.node.inputs[0])


_NEUTRAL = {
    "aten.add.Scalar": 0,
    "aten.add.Tensor": 0,
    "aten.div.Scalar": 1,
    "aten.div.Tensor": 1,
    "aten.mul.Scalar": 1,
    "aten.mul.Tensor": 1,
    "aten.pow.Tensor_Scalar": 1,
    "aten.sub.Scalar": 0,
    "aten.sub.Tensor": 0,
}
"""Operators, and the number for which they change nothing."""


def _copy(graph: Graph, node: Node) -> _Copy | None:
    """The copy; None for other operators, where the order differs, and where the caller gets it."""
    if len(node.inputs) != 1 or node.args[:1] != (Slot(0),) or not graph.users[node.id]:
        return None
    (source,) = node.inputs
    before, after = graph.spec(source), node.outputs[0]
    if after is None or (before.dtype, before.device, before.strides) != (after.dtype, after.device, after.strides):
        return None
    if not (node.op == "aten.clone.default" and before.is_contiguous) and not _changes_nothing(node):
        return None
    if overwritten(graph, source) or any(graph.root(value) == Value(node.id) for value in graph.outputs):
        return None
    return _Copy(node, graph.users[node.id])


def _changes_nothing(node: Node) -> bool:
    literal = number(node.args[1]) if len(node.args) == 2 else None
    return literal is not None and literal == _NEUTRAL.get(node.op)
