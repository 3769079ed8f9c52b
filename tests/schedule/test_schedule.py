"""Orders: never worse than the given one, least peaks on small graphs, incremental like full."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_graphs import drawn, graphs, least_peak, peak, random_edit, random_order

from magis.errors import InvalidGraphError
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, NodeId, Value
from magis.schedule.baseline import eager_order
from magis.schedule.dp import SearchLimits
from magis.schedule.flat import flatten, live_bytes
from magis.schedule.incremental import (
    Scheduled,
    SchedulingLimits,
    full_schedule,
    reschedule,
    schedule,
)
from magis.schedule.interval import IntervalLimits
from magis.schedule.placement import placed
from magis.schedule.problem import problem

SEEDS = st.integers(0, 10**6)


@given(graphs(most=12), SEEDS)
@settings(deadline=None, max_examples=120)
def test_small_graphs_get_the_least_peak(graph: Graph, seed: int) -> None:
    order, report = full_schedule(graph, random_order(graph, seed))
    assert report.work.capped_pieces == 0
    assert peak(graph, order) == least_peak(graph)


@given(graphs(14, 14), SEEDS)
@settings(deadline=None, max_examples=15)
def test_fourteen_operators_get_the_least_peak(graph: Graph, seed: int) -> None:
    order, _ = full_schedule(graph, random_order(graph, seed))
    assert peak(graph, order) == least_peak(graph)


@given(graphs(most=40), SEEDS, st.sampled_from([0, 2, 20, 10**6]), st.sampled_from([0, 14]))
@settings(deadline=None, max_examples=200)
def test_full_scheduling_never_makes_it_worse(graph: Graph, seed: int, states: int, joined: int) -> None:
    given_order = random_order(graph, seed)
    search = SearchLimits(states=states, beam=3)
    limits = SchedulingLimits(whole=joined, joined=joined, reach=10, search=search, near_peak=search)
    order, report = full_schedule(graph, given_order, limits)
    assert report.peak_bytes == peak(graph, order) <= report.given_peak_bytes == peak(graph, given_order)


@given(graphs(most=40), SEEDS, st.lists(SEEDS, min_size=1, max_size=5), st.sampled_from([0, 5, 80]))
@settings(deadline=None, max_examples=200)
def test_rescheduling_gives_valid_orders(graph: Graph, seed: int, edits: list[int], reach: int) -> None:
    limits = SchedulingLimits(reach=reach)
    state = Scheduled.of(graph, random_order(graph, seed))
    for number in edits:
        edited = random_edit(state.flat.graph, number)
        if edited is None:
            continue
        old = state
        state, report = old.after_edit(*edited, limits)
        assert report.peak_bytes == state.peak_bytes == peak(edited[0], state.schedule)
        assert report.peak_bytes <= report.given_peak_bytes
        assert state.live == live_bytes(state.flat, state.order)
        assert reschedule(old.flat.graph, old.schedule, *edited, limits) == (state.schedule, report)
        if not reach:
            given = old.with_late_writes(state.flat, edited[2]).order
            assert state.order[: report.begin] == given[: report.begin]
            assert state.order[report.begin + report.operators :] == given[report.end :]


@given(graphs(2, 25), SEEDS, SEEDS, st.sampled_from([8, 170]))
@settings(deadline=None, max_examples=100)
def test_incremental_over_everything_is_full(graph: Graph, seed: int, number: int, whole: int) -> None:
    edited = random_edit(graph, number)
    assume(edited is not None)
    assert edited is not None
    new_graph, old_nodes, new_nodes = edited
    limits = SchedulingLimits(whole=whole, joined=8, reach=0)
    old = Scheduled.of(graph, random_order(graph, seed))
    state, report = old.after_edit(*edited, limits, within=(0, len(old.order)))
    assert (report.begin, report.end) == (0, len(old.order))
    kept = [node for node in old.order if node in new_graph.nodes]
    start = placed(flatten(new_graph), kept, sorted(new_nodes - old_nodes))
    order, _ = full_schedule(new_graph, (*(node.id for node in new_graph.inputs), *start), limits)
    assert state.schedule == order


@pytest.mark.parametrize(
    ("edges", "order", "before", "after"),
    [
        (["AB", "AC", "AD", "BD", "CE", "DF", "EF"], "ABCDEF", 4, 3),
        (["AB", "BC", "AD", "CD", "BE", "DE", "EF"], "ABCDEF", 4, 4),
        (["AB", "BC", "AD", "CD", "Ab", "bE", "DE", "EF"], "ABCDbEF", 3, 3),
        (["AB", "BC", "CD", "DE", "BE", "AF", "EF"], "ABCDEF", 4, 4),
        (["AB", "BC", "CD", "DE", "BE", "As", "sl", "lF", "EF"], "ABsCDElF", 3, 3),
    ],
    ids=["two branches", "kept for two readers", "computed twice", "kept for the end", "stored and loaded"],
)
def test_the_talks_examples(edges: list[str], order: str, before: int, after: int) -> None:
    graph = drawn(edges, order, {"s": 0})  # what is stored takes no memory of the device
    assert peak(graph, eager_order(graph)) == before
    found, _ = schedule(graph)
    assert peak(graph, found) == after == least_peak(graph)


def test_recomputing_puts_the_copy_before_its_reader() -> None:
    graph = drawn(["AB", "BC", "AD", "CD", "BE", "DE", "EF"], "ABCDEF")
    edit = GraphEdit(graph)
    copy = edit.copy(NodeId(1), "copy of")
    edit.redirect(NodeId(4), Value(NodeId(1)), Value(copy))
    changed = edit.finish()
    order, report = reschedule(graph, eager_order(graph), changed, edit.old_nodes, edit.new_nodes)
    assert "".join("ABCDEFb"[node] for node in order) == "ABCDbEF"
    assert peak(changed, order) == 3
    assert report.peak_bytes == 3


@pytest.mark.parametrize("length", [32])
def test_a_chain_of_saved_activations_has_one_order(length: int) -> None:
    """X, F1..F32, B1..B32 with F(i) -> B(33-i), 32 bytes each: 1056 at B1, whatever the order."""
    names = [chr(0x4E00 + i) for i in range(2 * length + 1)]
    forward, backward = names[1 : length + 1], names[length + 1 :]
    edges = [a + b for a, b in itertools.pairwise(names)] + [f + b for f, b in zip(forward, reversed(backward))]
    graph = drawn(dict.fromkeys(edges), "".join(names), dict.fromkeys(names, 32))
    order, report = schedule(graph)
    assert order == eager_order(graph)
    assert report.peak_bytes == peak(graph, order) == 1056


def test_an_edit_that_changes_nothing_keeps_the_order() -> None:
    graph = drawn(["AB", "BC"], "ABC")
    order, report = reschedule(graph, eager_order(graph), graph, set(), set())
    assert order == eager_order(graph)
    assert report.operators == 0


def test_a_reader_of_something_later_widens_the_interval() -> None:
    graph = drawn(["AB", "AC"], "ABC")
    edit = GraphEdit(graph)
    edit.redirect(NodeId(1), Value(NodeId(0)), Value(NodeId(2)))
    changed = edit.finish()
    tight = SchedulingLimits(interval=IntervalLimits(max_steps=1))
    order, report = reschedule(graph, eager_order(graph), changed, edit.old_nodes, edit.new_nodes, tight)
    assert order == (0, 2, 1)
    assert (report.begin, report.end) == (0, 3)


def test_an_order_that_is_none_is_refused() -> None:
    graph = drawn(["AB"], "AB")
    with pytest.raises(InvalidGraphError, match="ordered"):
        full_schedule(graph, (NodeId(1), NodeId(0)))


@given(graphs(5, 25), SEEDS)
@settings(deadline=None, max_examples=60)
def test_the_same_graph_gets_the_same_order(graph: Graph, seed: int) -> None:
    order = random_order(graph, seed)
    assert full_schedule(graph, order) == full_schedule(graph, order)


def test_steps_of_a_problem() -> None:
    start = Scheduled.of(*(lambda g: (g, eager_order(g)))(drawn(["AB", "AC", "BD", "CD"], "ABCD", {"A": 4, "B": 2})))
    given_problem = problem(start.flat, start.order, lambda node: False)
    assert list(given_problem.steps([0, 1, 2, 3])) == [(4, 4), (6, 6), (7, 3), (4, 0)]
