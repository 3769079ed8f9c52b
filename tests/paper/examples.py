"""The worked examples of the paper's figures, and the graphs that they draw."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from einsums import Drawing

from magis.ir.graph import Graph, NodeId, Value
from magis.ir.structure import topological_order

EXAMPLES: dict[str, Any] = json.loads((Path(__file__).parent / "examples.json").read_text(encoding="utf-8"))


def drawn(
    edges: Iterable[Sequence[Any]], order: Sequence[Any], length: int, columns: int = 1, resident: Sequence[Any] = ()
) -> tuple[Graph, dict[Any, NodeId]]:
    """Nodes of one shape [length, columns], one byte an element, and their ids, which count in `order`. Nodes without
    inputs are operators too, but for `resident` ones. The last node is handed back."""
    inputs: dict[Any, list[NodeId]] = {name: [] for name in order}
    build = Drawing(b=length, c=columns)
    ids: dict[Any, NodeId] = {}
    pairs = list(edges)
    for name in order:
        inputs[name] = [ids[tail] for tail, head in pairs if head == name]
        equation = ",".join(["bc"] * len(inputs[name])) + "->bc"
        ids[name] = build.input("bc") if name in resident else build.op(equation, *inputs[name])
    return build.graph(ids[order[-1]]), ids


def in_order(graph: Graph) -> Sequence[NodeId]:
    """The nodes by number."""
    order = topological_order(graph)
    assert list(order) == sorted(order)
    return order


def names(ids: dict[Any, NodeId], values: Iterable[Value | NodeId]) -> set[Any]:
    """The drawn names of nodes."""
    back = {node: name for name, node in ids.items()}
    return {back[v.node if isinstance(v, Value) else v] for v in values}
