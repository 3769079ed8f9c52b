"""The inverse of re-materialisation: it undoes it, merges nothing that differs, and leaves all results as they are."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import build, programs
from rule_graphs import known, letters, random_site
from schedule_graphs import drawn

from builder import Recorded, record
from magis.backend.runtime import compile_routine
from magis.fission.tree import Program
from magis.ir.fingerprint import digest, fingerprint, update_fingerprint
from magis.ir.graph import Graph, NodeId
from magis.ir.structure import topological_order
from magis.ir.verify import verify
from magis.lower.lower import lower
from magis.rules.base import Change
from magis.rules.registry import rewrites, rules
from magis.rules.remat import Rematerialise, recomputable, site
from magis.rules.unremat import Unrematerialise
from magis.schedule.incremental import Scheduled

RULE = Unrematerialise()
SEEDS = st.integers(0, 10**6)


def merged(graph: Graph, kept: int, copy: int) -> Change | None:
    return RULE.apply(Program(graph), (kept, copy))


def again(graph: Graph, segment: list[int], readers: list[int]) -> Graph:
    change = Rematerialise().apply(Program(graph), site(map(NodeId, segment), map(NodeId, readers)))
    assert change is not None
    return change.program.graph


def test_all_rules_are_found_by_name() -> None:
    expected = ["keep", "loosen", "open softmax", "parts", "recompute", "split", "stay", "swap"]
    assert [name for name in rules() if name not in rewrites()] == expected


@pytest.mark.parametrize("edges", [("XA", "AB", "AC"), ("XA", "YA", "AB", "AC")])
def test_the_pictures_backwards(edges: tuple[str, ...]) -> None:
    names = "XYABC"
    graph = known(drawn(edges, names))
    change = merged(again(graph, [2], [3]), 2, 5)
    assert change is not None
    assert letters(change.program, names) == set(edges)
    assert change.program.graph == graph


def test_the_copy_may_be_kept_as_well() -> None:
    graph = again(known(drawn(("XA", "AB", "AC"), "XABC")), [1], [2])
    change = merged(graph, 4, 1)
    assert change is not None
    assert letters(change.program, "XABC") == {"Xa", "aB", "aC"}


def test_a_chain_goes_with_its_last_copy() -> None:
    graph = known(drawn(("XA", "AB", "BC", "BD"), "XABCD"))
    change = merged(again(graph, [1, 2], [4]), 2, 6)
    assert change is not None
    assert change.program.graph == graph


@given(programs(), SEEDS)
@settings(deadline=None, max_examples=150)
def test_there_and_back(program: Recorded, seed: int) -> None:
    """One copied operator whose original stays, in storages that the caller does not get."""
    graph, chosen = program.graph, random.Random(seed)
    returned = {graph.root(value).node for value in graph.outputs}
    sites = [
        (node.id, reader)
        for node in graph.nodes.values()
        for reader in graph.users[node.id]
        if recomputable(node) and all(graph.root(v).node not in returned for v in graph.nodes[reader].inputs)
    ]
    if not sites:
        return
    node, reader = chosen.choice(sites)
    there = Rematerialise().apply(Program(graph), site([node], [reader]))
    assert there is not None
    middle = there.program.graph
    if node not in middle.nodes:
        return
    back = merged(middle, node, max(middle.nodes))
    assert back is not None
    assert digest(back.program.graph) == digest(graph)
    known_hash = update_fingerprint(fingerprint(graph), graph, middle, there.old_nodes, there.new_nodes)
    found = update_fingerprint(known_hash, middle, back.program.graph, back.old_nodes, back.new_nodes)
    assert found == fingerprint(graph)


def test_copies_of_a_draw_merge_but_the_first_stays() -> None:
    graph = build([(3, 4)], [("dropout", 0, 0), ("tanh", 1, 0), ("relu", 1, 0)], [2, 3], [], False).graph
    draw = next(n.id for n in graph.nodes.values() if n.stream is not None)
    middle = again(graph, [draw], [graph.users[draw][0]])
    assert merged(middle, max(middle.nodes), draw) is None
    back = merged(middle, draw, max(middle.nodes))
    assert back is not None
    assert back.program.graph == graph


def test_what_differs_is_not_merged() -> None:
    def code(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        early = w.exp()
        w.add_(x)
        halves = x.chunk(2)
        draws = [torch.native_dropout(x, 0.5, True)[0] for _ in range(2)]
        return early, w.exp(), halves[0].tanh(), halves[1].tanh(), x.sum(0), x.sum(1), *draws

    graph = record(code, [torch.ones(2, 2), torch.ones(2, 2)]).graph
    nodes = list(graph.nodes)
    assert all(merged(graph, one, other) is None for one in nodes for other in nodes)


def test_what_is_handed_back_is_not_merged() -> None:
    graph = record(lambda x: (x.tanh(), x.tanh()), [torch.ones(2)]).graph
    assert merged(graph, 1, 2) is None


@pytest.mark.parametrize("where", [(), (1,), (1, 1), (1, 4, 4), (1, 99), (99, 4), (0, 0), (0, 4), (1, 2), (-1, 4)])
def test_what_is_no_site_is_refused(where: tuple[int, ...]) -> None:
    graph = again(known(drawn(("XA", "AB", "AC"), "XABC")), [1], [2])
    assert RULE.apply(Program(graph), where) is None


def test_sites_save_the_most_time_for_a_byte_first() -> None:
    graph = again(known(drawn(("XA", "AB", "AC", "XD", "DB", "DC"), "XADBC")), [1, 2], [4])
    state = Scheduled.of(graph, topological_order(graph))
    assert list(RULE.sites(state, lambda node: float(node))) == [(2, 6), (1, 5)]


@given(programs(), SEEDS)
@settings(deadline=None, max_examples=80)
def test_all_results_stay_bit_by_bit(program: Recorded, seed: int) -> None:
    chosen = random.Random(seed)
    state = Scheduled.of(program.graph, topological_order(program.graph))
    rule, found = Rematerialise(), 0
    for _ in range(8):
        graph = state.flat.graph
        sites = list(RULE.sites(state, lambda node: 1.0)) if chosen.random() < 0.5 else []
        where = chosen.choice(sites) if sites else random_site(graph, chosen)
        change = (RULE if sites else rule).apply(Program(graph), where)
        if change is not None:
            found += bool(sites)
            verify(change.program.graph)
            state = state.edited(change.program.graph, change.old_nodes, change.new_nodes)
    left = []
    with torch.no_grad():
        for now, order in ((program.graph, topological_order(program.graph)), (state.flat.graph, state.schedule)):
            torch.manual_seed(1)
            inputs = program.fresh_inputs()
            results = compile_routine(lower(Program(now), order))(list(inputs))
            left.append([*results, *inputs, torch.default_generator.get_state()])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
