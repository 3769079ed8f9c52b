"""A tensor that is cast and then put in another order: both in one pass.

    before   h = _to_copy(x, bf16);  c = clone(permute(h), contiguous)
    after    c = _to_copy(permute(x), bf16, contiguous)

So where attention in float32 stands between layers in half precision. Saves a pass and a tensor; trades nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Slot, Symbol
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.rules.base import Change, Latency, Site
from magis.rules.rewrite.products import Calculation, all_then_each, in_turns, is_layout, overwritten, sole_reader
from magis.schedule.incremental import Scheduled

_COPY, _CAST = "aten.clone.default", "aten._to_copy.default"
_ORDER = ("memory_format", Symbol("memory_format", "contiguous_format"))


class CastInOrder:
    """Site: the copies that become casts."""

    name: ClassVar[str] = "cast in order"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """All of them at once, then each alone, the slowest first."""
        yield from all_then_each(state.flat.graph, latency_s, _ordered)

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Casts in order. None where what is copied is no cast that only the copy reads."""
        return in_turns(program, site, infer, _ordered)


@dataclass(frozen=True)
class _Ordered:
    """A copy, the cast whose result it copies, and the views between, from the cast on."""

    copy: Node
    cast: Node
    views: tuple[Node, ...]
    readers: tuple[NodeId, ...]

    @property
    def touched(self) -> set[NodeId]:
        """All of them, what is cast, and what reads the copy."""
        views = (node.id for node in self.views)
        return {self.copy.id, self.cast.id, self.cast.inputs[0].node, *views, *self.readers}

    def do(self, rewriting: Calculation) -> None:
        """The views of what is cast, and the cast of those."""
        (value,) = self.cast.inputs
        for view in self.views:
            value = rewriting.add(view.op, (value,), *view.args, kwargs=view.kwargs, origin=view.origin)
        named = (*self.cast.kwargs, _ORDER)
        made = rewriting.add(_CAST, (value,), Slot(0), kwargs=named, origin=self.cast.origin)
        rewriting.replace(Value(self.copy.id), made)


def _ordered(graph: Graph, node: Node) -> _Ordered | None:
    """The copy with its cast; None for other operators, and where the cast's result lies in order already."""
    if node.op != _COPY or node.kwargs != (_ORDER,):
        return None
    value, views = node.inputs[0], list[Node]()
    while sole_reader(graph, value):
        maker = graph.nodes[value.node]
        if maker.op == _CAST:
            break
        if not is_layout(maker) or maker.op == _COPY:
            return None
        views.append(maker)
        value = maker.inputs[0]
    else:
        return None
    named = dict(maker.kwargs)
    if (
        maker.args != (Slot(0),)
        or "dtype" not in named
        or "memory_format" in named
        or overwritten(graph, maker.inputs[0])
    ):
        return None
    if graph.spec(node.inputs[0]).is_contiguous or graph.spec(value).numel != graph.spec(Value(node.id)).numel:
        return None
    return _Ordered(node, maker, tuple(reversed(views)), graph.users[node.id])
