"""Re-materialisation: what it makes of a program, what it refuses, and that all results stay as they are."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import build, programs
from rule_graphs import FIGURE, known, letters, random_site
from schedule_graphs import drawn, graphs, least_peak, peak, random_order

from builder import Recorded, record
from magis.backend.meters import storage_peak
from magis.backend.runtime import compile_routine
from magis.fission.tree import Program
from magis.ir.graph import Graph, NodeId
from magis.ir.structure import topological_order
from magis.ir.verify import verify
from magis.lower.lower import lower
from magis.rules.remat import Rematerialise, recomputable, site
from magis.schedule.incremental import Scheduled, schedule
from magis.sim.simulate import simulate
from magis.sim.timeline import no_latency

RULE = Rematerialise()
SEEDS = st.integers(0, 10**6)


def applied(graph: Graph, segment: list[int], readers: list[int]) -> Program:
    change = RULE.apply(Program(graph), site(map(NodeId, segment), map(NodeId, readers)))
    assert change is not None
    verify(change.program.graph)
    return change.program


@pytest.mark.parametrize(
    ("edges", "again"),
    [
        (("XA", "AB", "AC"), {"XA", "Xa", "AC", "aB"}),
        (("XA", "YA", "AB", "AC"), {"XA", "YA", "Xa", "Ya", "AC", "aB"}),
    ],
)
def test_one_reader_takes_a_copy(edges: tuple[str, ...], again: set[str]) -> None:
    names = "XYABC"
    program = applied(known(drawn(edges, names)), [names.index("A")], [names.index("B")])
    assert letters(program, names) == again


def test_a_copied_chain_reads_its_own_copies() -> None:
    program = applied(known(drawn(("XA", "AB", "BC", "BD"), "XABCD")), [1, 2], [4])
    assert letters(program, "XABCD") == {"XA", "AB", "BC", "Xa", "ab", "bD"}


def test_the_original_goes_when_nobody_reads_it() -> None:
    program = applied(known(drawn(("XA", "AB", "BC"), "XABC")), [1, 2], [3])
    assert letters(program, "XABC") == {"Xa", "ab", "bC"}


def test_one_more_run_spares_a_tensor() -> None:
    graph = known(drawn(FIGURE, "ABCDEF"))
    assert peak(graph, topological_order(graph)) == least_peak(graph) == 4
    again = applied(graph, [1], [4]).graph
    order = tuple(map(NodeId, (0, 1, 2, 3, 6, 4, 5)))
    assert peak(again, order) == 3
    assert (
        Scheduled.of(graph, topological_order(graph)).edited(again, {NodeId(4)}, {NodeId(4), NodeId(6)}).order == order
    )
    assert peak(again, schedule(again)[0]) == 3


def test_a_site_is_offered_for_what_waits() -> None:
    graph = known(drawn(FIGURE, "ABCDEF"))
    offered = list(RULE.sites(Scheduled.of(graph, topological_order(graph)), lambda node: 1.0))
    assert offered == [
        (1, 1, 4),
        (2, 0, 1, 4),
    ]  # B alone, and with A, which is read at the worst moment but gone after it


@given(graphs(most=25), SEEDS)
@settings(deadline=None, max_examples=150)
def test_sites_apply_and_skip_what_is_busy_at_the_worst_moment(random_graph: Graph, seed: int) -> None:
    graph = known(random_graph)
    state = Scheduled.of(graph, random_order(graph, seed))
    worst = state.live.index(max(state.live))
    waiting = {maker for s, maker in enumerate(state.flat.maker) if s not in state.flat.taken[state.order[worst]]}
    for where in RULE.sites(state, lambda node: 1.0 + node):
        segment, readers = where[1 : where[0] + 1], where[where[0] + 1 :]
        assert all(state.position[n] < worst for n in segment)
        assert all(state.position[n] > worst for n in readers)
        assert not waiting.isdisjoint(segment)
        change = RULE.apply(Program(graph), where)
        assert change is not None
        verify(change.program.graph)
        edited = state.edited(change.program.graph, change.old_nodes, change.new_nodes)
        assert edited.peak_bytes == peak(change.program.graph, edited.schedule)


def test_a_copy_of_a_draw_keeps_its_number() -> None:
    graph = build([(3, 4)], [("dropout", 0, 0), ("tanh", 1, 0), ("relu", 1, 0)], [2, 3], [], False).graph
    draw = next(n for n in graph.nodes.values() if n.stream is not None)
    again = applied(graph, [draw.id], list(graph.users[draw.id])).graph
    assert [n.stream for n in again.nodes.values() if n.op == draw.op] == [draw.stream] * 2  # the first moves the state
    thrice = applied(again, [max(again.nodes)], [graph.users[draw.id][0]]).graph
    assert [n.stream for n in thrice.nodes.values() if n.op == draw.op] == [draw.stream] * 3
    last = applied(thrice, [max(again.nodes)], list(thrice.users[NodeId(max(again.nodes))])).graph
    assert max(again.nodes) not in last.nodes


def _with_a_write() -> Graph:
    def code(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = w.mul_(x)
        return torch.bernoulli(y.abs().clamp(max=1.0)).clone().tanh() + y.cos_().exp()

    return record(code, [torch.ones(2), torch.ones(2)]).graph


def test_writes_and_unknown_operators_are_refused() -> None:
    graph = _with_a_write()
    for node in graph.nodes.values():
        change = RULE.apply(Program(graph), site([node.id], graph.users[node.id][:1]))
        refused = node.is_input or node.writes or not graph.users[node.id]
        assert (change is None) == refused, node
        assert recomputable(node) != (node.is_input or node.writes)
    unknown = drawn(("XA", "AB"), "XAB")
    assert RULE.apply(Program(unknown), (1, 1, 2)) is None


@pytest.mark.parametrize(
    "where",
    [
        (),
        (0,),
        (0, 3),
        (1,),
        (1, 2),
        (5, 1, 2, 3),
        (1, 99, 3),
        (1, 2, 99),
        (1, 2, 2),
        (2, 1, 2, 2),
        (1, 1, 3),
        (2, 1, 2, 3, 0),
        (-1, 1, 2),
        (1, -1, 2),
    ],
)
def test_what_is_no_site_is_refused(where: tuple[int, ...]) -> None:
    assert RULE.apply(Program(known(drawn(("XA", "AB", "BC"), "XABC"))), where) is None


@given(programs(), SEEDS, st.integers(1, 5))
@settings(deadline=None, max_examples=80)
def test_all_results_stay_bit_by_bit(program: Recorded, seed: int, times: int) -> None:
    chosen = random.Random(seed)
    state = Scheduled.of(program.graph, topological_order(program.graph))
    for _ in range(times):
        graph = state.flat.graph
        where = random_site(graph, chosen)
        change = RULE.apply(Program(graph), where) if where else None
        if change is not None:
            verify(change.program.graph)
            state = state.edited(change.program.graph, change.old_nodes, change.new_nodes)
            state = state.lowered()[0] if chosen.random() < 0.5 else state
    _same_and_as_predicted(program, state)


def _same_and_as_predicted(program: Recorded, state: Scheduled) -> None:
    """Results, written inputs and the generator's state are those of the recorded program; memory is as predicted."""
    plain = compile_routine(lower(Program(program.graph), topological_order(program.graph)))
    routine = lower(Program(state.flat.graph), state.schedule)
    ours = compile_routine(routine)
    left = []
    with torch.no_grad():
        for step in (plain, ours):
            torch.manual_seed(1)
            inputs = program.fresh_inputs()
            results = step(list(inputs))
            left.append([*results, *inputs, torch.default_generator.get_state()])
        assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
        found = storage_peak(lambda: ours(list(inputs)), inputs)
    assert found.step_peak_bytes == simulate(routine, no_latency).step_peak_bytes
    assert found.resident_bytes + found.step_peak_bytes == state.peak_bytes
