"""Figure 6: heat and score over the dominator tree, the candidates chosen by bands, and their tree."""

from __future__ import annotations

import pytest
from examples import EXAMPLES, drawn, in_order

from magis.fission.analyze import Analyzer, Scored, dominator_tree, entries, hot_bytes, nested, select
from magis.fission.dim_graph import dim_graph
from magis.fission.tree import Program
from magis.ir.graph import Graph, NodeId, Value
from magis.lower.lower import lower
from magis.sim.timeline import timeline

FIGURE = EXAMPLES["fig6_ftree"]
UNIT = 12
"""Positions of every tensor; the figure's tensors have size 1."""


def example() -> Graph:
    """Node 0 comes from outside, so it belongs to no region. It lives to the end, as it does in the figure."""
    graph, _ = drawn(FIGURE["edges"], FIGURE["nodes"], UNIT, resident=[0])
    return graph


def analyzer(graph: Graph) -> Analyzer:
    hot = [n for n in FIGURE["hotspots"] if n != 0]
    return Analyzer(dim_graph(graph), hot_bytes(graph, [Value(NodeId(n)) for n in hot]))


def scored(graph: Graph) -> list[Scored]:
    (component,) = dim_graph(graph).strict_components
    assert {vertex.node for vertex in component} == set(FIGURE["nodes"])
    return analyzer(graph).scores(component)


def test_hotspots() -> None:
    graph = example()
    order = in_order(graph)
    assert list(order) == FIGURE["order"]
    found = timeline(lower(Program(graph), tuple(order)))
    assert found.peak_bytes == FIGURE["peak"] * UNIT
    assert [found.nodes[step] for step in found.peak_steps] == FIGURE["peak_steps"]
    assert {value.node for value in found.hotspots} | {0} == set(FIGURE["hotspots"])


def test_dominator_tree() -> None:
    graph = example()
    assert entries(graph) == [0]
    parents = {str(node): above for node, above in dominator_tree(graph, [NodeId(0)]).parent.items() if node != 0}
    assert parents == FIGURE["dominator_tree_parent"]


def test_heat_and_score() -> None:
    found = {str(each.node): each for each in scored(example()) if each.node is not None}
    assert {node: each.memory_heat / UNIT for node, each in found.items()} == FIGURE["heat"]
    assert {node: each.fission_score / UNIT for node, each in found.items()} == FIGURE["score"]
    for printed, computed in (("heat_printed", "heat"), ("score_printed", "score")):
        assert FIGURE[printed].items() <= FIGURE[computed].items()


@pytest.mark.parametrize(
    ("levels", "dominators"),
    [(FIGURE["L"], FIGURE["selected_dominators"])] + [(int(n), d) for n, d in FIGURE["selected_for_other_L"].items()],
)
def test_selected(levels: int, dominators: list[int]) -> None:
    graph = example()
    found = select(scored(graph), dominator_tree(graph, entries(graph)), levels)
    assert sorted(each.node for each in found if each.node is not None) == dominators
    assert len({each.below for each in found}) == len(found) == len(dominators)


def test_bands() -> None:
    graph = example()
    best, levels = max(FIGURE["score"].values()), FIGURE["L"]
    band = {node: int(levels * score / best) for node, score in FIGURE["score"].items() if score > 0}
    tree = dominator_tree(graph, entries(graph))
    for level, given in FIGURE["bands"].items():
        assert [int(node) for node, each in band.items() if each == int(level)] == given["nodes"]
        chosen = select([s for s in scored(graph) if s.node in (*given["nodes"], 0)], tree, levels)
        assert {s.node for s in chosen} == {*given["kept"], 0}


def test_candidates_and_their_tree() -> None:
    found = analyzer(example()).candidates(FIGURE["L"])
    named = {name: frozenset(nodes) for name, nodes in FIGURE["candidates"].items()}
    assert {each.region for each in found} == set(named.values())
    assert len(found) == len(named)
    assert {each.length for each in found} == {UNIT}
    (root,) = nested(found)
    name = {region: name for name, region in named.items()}
    parents = {name[root.region]: None}
    for each in root.walk():
        parents.update({name[child.region]: name[each.region] for child in each.children})
    assert parents == FIGURE["tree_parent"]
