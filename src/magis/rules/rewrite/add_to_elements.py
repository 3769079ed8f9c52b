"""What is added to a product of elements, in one operator with it.

    before   m = mul(x, y);  z = add(r, m)
    after    z = addcmul(r, x, y)

So after a dropout in front of a residual connection, in rotary embeddings and in gradients of norms. Saves the product:
a tensor that is written and read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Kwargs, Slot
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.ops.rule import argument
from magis.rules.base import Change, Latency, Site
from magis.rules.rewrite.products import Calculation, all_then_each, in_turns, number, overwritten, sole_reader
from magis.schedule.incremental import Scheduled

_SIGNS = {"aten.add.Tensor": 1.0, "aten.sub.Tensor": -1.0}
_PRODUCT = "aten.mul.Tensor"


class AddToElements:
    """Site: the sums that take a product in."""

    name: ClassVar[str] = "add to elements"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """All of them at once, then each alone, the slowest first."""
        yield from all_then_each(state.flat.graph, latency_s, _sum)

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Puts sums and products together. None where a sum adds no product that only it reads."""
        return in_turns(program, site, infer, _sum)


@dataclass(frozen=True)
class _Sum:
    """A sum that becomes `added + factor * product`."""

    node: Node
    added: Value
    product: Node
    factor: float
    readers: tuple[NodeId, ...]

    @property
    def touched(self) -> set[NodeId]:
        """The sum, the product, and what reads the sum."""
        return {self.node.id, self.product.id, *self.readers}

    def do(self, rewriting: Calculation) -> None:
        """One operator for both."""
        named: Kwargs = () if self.factor == 1 else (("value", self.factor),)
        inputs = (self.added, *_factors(self.product))
        rewriting.put(self.node, "aten.addcmul.default", inputs, (Slot(0), Slot(1), Slot(2)), named)
        rewriting.unread(self.product.id)


def _sum(graph: Graph, node: Node) -> _Sum | None:
    """The sum, with its second term as the product if both are."""
    sign = _SIGNS.get(node.op)
    if sign is None or len(node.inputs) != 2 or node.args[:2] != (Slot(0), Slot(1)):
        return None
    alpha = number(argument(graph.call(node), 2, "alpha"), 1)
    if alpha is None or not _alike(graph, node, *node.inputs):
        return None
    first, second = node.inputs
    if (product := _product(graph, second)) is not None:
        return _Sum(node, first, product, sign * alpha, graph.users[node.id])
    if sign * alpha == 1 and (product := _product(graph, first)) is not None:
        return _Sum(node, second, product, 1.0, graph.users[node.id])
    return None


def _product(graph: Graph, value: Value) -> Node | None:
    """The product of two tensors behind a value that nobody else reads."""
    node = graph.nodes[value.node]
    if node.op != _PRODUCT or len(_factors(node)) != 2 or not sole_reader(graph, value):
        return None
    if not _alike(graph, node, *node.inputs) or any(overwritten(graph, other) for other in node.inputs):
        return None
    return node


def _factors(node: Node) -> tuple[Value, ...]:
    """The tensors that a product multiplies, one twice if it is squared."""
    return tuple(node.inputs[arg.index] for arg in node.args if isinstance(arg, Slot))


def _alike(graph: Graph, node: Node, *values: Value) -> bool:
    """Whether an operator reads and gives real numbers of one type."""
    types = {graph.spec(value).dtype for value in (*values, Value(node.id))}
    return len(types) == 1 and types.pop().is_floating
