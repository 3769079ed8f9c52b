"""What is added to a matrix product becomes its bias.

    before   m = mm(x, w);  y = add(r, view(m))
    after    m = addmm(view(r), x, w);  y = view(m)

So for a residual connection, and for the sum of gradients of a tensor that several products read, one product after
the other. Saves a pass over three tensors, and one of them while the sum is made. The product has to wait for what is
added to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Slot
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.ops.rule import argument
from magis.rules.base import Change, Latency, Site
from magis.rules.rewrite.products import (
    Calculation,
    Product,
    all_then_each,
    in_turns,
    number,
    product_of,
    same_elements,
    sole_reader,
)
from magis.schedule.incremental import Scheduled

_SIGNS = {"aten.add.Tensor": 1.0, "aten.sub.Tensor": -1.0}


class AddToProduct:
    """Site: the sums that go. Those that share a neighbour go one after the other."""

    name: ClassVar[str] = "add to product"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """All of them at once, then each alone, the slowest first."""
        yield from all_then_each(state.flat.graph, latency_s, _sum)

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Makes them biases. None when one of them is not there or adds nothing to a product."""
        return in_turns(program, site, infer, _sum)


@dataclass(frozen=True)
class _Sum:
    """A sum of a tensor and a product: `beta` of the tensor, `product` with its factor, made by `maker` and seen
    as `seen`."""

    node: Node
    added: Value
    beta: float
    seen: Value
    maker: Node
    product: Product
    touched: frozenset[NodeId]

    def do(self, rewriting: Calculation) -> None:
        """The product with the other term as its bias takes the sum's place."""
        spec = rewriting.spec(Value(self.maker.id))
        bias = self.added
        if rewriting.spec(bias).shape != spec.shape:
            origin = self.node.origin
            bias = rewriting.add("aten.view.default", (bias,), Slot(0), spec.shape, origin=origin)
        rewriting.put_product(self.maker, replace(self.product, bias=bias, beta=self.beta))
        rewriting.replace(Value(self.node.id), self.seen)


def _sum(graph: Graph, node: Node) -> _Sum | None:
    """The sum, with the product that comes last, or is written last, as the one that stays."""
    sign = _SIGNS.get(node.op)
    if sign is None or len(node.inputs) != 2 or node.args[:2] != (Slot(0), Slot(1)):
        return None
    alpha = number(argument(graph.call(node), 2, "alpha"), 1)
    specs = [graph.spec(value) for value in (*node.inputs, Value(node.id))]
    if alpha is None or len({(spec.shape, spec.dtype) for spec in specs}) != 1 or Value(node.id) in graph.outputs:
        return None
    if not all(spec.is_contiguous for spec in specs):
        return None
    first, second = node.inputs
    terms = [(first, 1.0, second, sign * alpha), (second, sign * alpha, first, 1.0)]
    found = [_with(graph, node, *term) for term in sorted(terms, key=lambda term: -term[2].node)]
    return next((one for one in found if one is not None), None)


def _with(graph: Graph, node: Node, added: Value, beta: float, seen: Value, factor: float) -> _Sum | None:
    passed = {node.id, *graph.users[node.id]}
    value = seen
    while sole_reader(graph, value):
        maker = graph.nodes[value.node]
        passed.add(maker.id)
        if same_elements(graph, maker):
            value = maker.inputs[0]
            continue
        product = product_of(graph, maker)
        if product is None or product.bias is not None:
            return None
        product = replace(product, alpha=product.alpha * factor)
        return _Sum(node, added, beta, seen, maker, product, frozenset(passed))
    return None
