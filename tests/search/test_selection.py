"""The exact choice equals the best of all choices, one by one, on small graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_graphs import FIGURE, known
from schedule_graphs import drawn, graphs, peak, random_order

from magis.fission.tree import Program
from magis.ir.graph import Graph, NodeId
from magis.ir.structure import topological_order
from magis.ir.verify import verify
from magis.rules.remat import Rematerialise
from magis.schedule.incremental import Scheduled
from magis.search.candidates import NEVER, Candidates
from magis.search.selection import GAP, Moment, Solved, merged, solve

MIB = 1 << 20


def large(graph: Graph) -> Graph:
    """The same graph with each byte a MiB, and operators that may run twice."""
    nodes = {
        node.id: replace(
            node, outputs=tuple(spec and replace(spec, storage_bytes=spec.storage_bytes * MIB) for spec in node.outputs)
        )
        for node in known(graph).nodes.values()
    }
    return replace(graph, nodes=nodes)


def candidates(graph: Graph, seed: int) -> Candidates:
    state = Scheduled.of(graph, random_order(graph, seed))
    return Candidates(state, lambda node: 1.0 + node % 5, state.live.index(max(state.live)))


def choices(given: Candidates) -> Iterator[tuple[int, float]]:
    """Bytes live at the turn and seconds, for each set of operators to run again and the least that it keeps."""
    able = list(given.takes)
    fixed = given.state.live[given.turn]
    held = {s: n for s, n in enumerate(given.nbytes) if s in given.early_end and given.early_end[s] < given.turn}
    wanted = {s for s in given.storages if given.last_late[s] != NEVER}
    fixed -= sum(held[s] for s in wanted if s in held)
    for again in chain.from_iterable(combinations(able, count) for count in range(len(able) + 1)):
        needed = wanted | {s for node in again for s in given.takes[node]}
        kept = {s for s in needed if given.maker[s] not in again}
        yield fixed + sum(held.get(s, 0) for s in kept), sum(given.latency_s[node] for node in again)


def solved(given: Candidates, **limit: float) -> Solved | None:
    spans = given.spans(given.everything_kept())
    return solve(given, [Moment(given.turn)], spans, **limit)  # type: ignore[arg-type]


@given(graphs(4, 14), st.integers(0, 10**6), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
@settings(deadline=None, max_examples=100)
def test_the_least_memory_at_one_moment_within_a_time(graph: Graph, seed: int, share: float) -> None:
    given = candidates(large(graph), seed)
    budget = share * sum(given.latency_s.values())
    found = solved(given, max_latency_s=budget)
    assert found is not None
    least = min(nbytes for nbytes, seconds in choices(given) if seconds <= budget)
    assert least <= found.peak_bytes + 1 and found.peak_bytes <= least * (1 + GAP) + MIB // 100
    assert found.latency_s <= budget * (1 + 1e-6)


@given(graphs(4, 14), st.integers(0, 10**6), st.floats(0, 1))
@settings(deadline=None, max_examples=100)
def test_the_least_time_within_a_peak(graph: Graph, seed: int, share: float) -> None:
    given = candidates(large(graph), seed)
    every = list(choices(given))
    lowest, highest = min(every)[0], given.state.live[given.turn]
    limit = int(lowest + share * (highest - lowest))
    found = solved(given, max_peak_bytes=limit)
    assert found is not None
    fastest = min(seconds for nbytes, seconds in every if nbytes <= limit)
    assert found.latency_s == pytest.approx(fastest, rel=2 * GAP, abs=2 * GAP * sum(given.latency_s.values()))


@given(graphs(4, 14), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_no_choice_beyond_the_lowest(graph: Graph, seed: int) -> None:
    given = candidates(large(graph), seed)
    assert solved(given, max_peak_bytes=min(choices(given))[0] - MIB // 10) is None


@given(graphs(4, 25), st.integers(0, 10**6))
@settings(deadline=None, max_examples=100)
def test_a_choice_has_a_site_that_applies(graph: Graph, seed: int) -> None:
    given = candidates(large(graph), seed)
    found = solved(given)
    assert found is not None
    where = given.site(found.selection)
    if where:
        change = Rematerialise().apply(Program(given.state.flat.graph), where)
        assert change is not None
        verify(change.program.graph)


def test_the_figure() -> None:
    graph = large(drawn(FIGURE, "ABCDEF"))
    state = Scheduled.of(graph, topological_order(graph))
    given = Candidates(state, lambda node: 1.0, 3)
    found = solved(given, max_latency_s=2.0)
    assert found is not None
    assert (found.peak_bytes, found.selection.again) == (3 * MIB, {1})
    change = Rematerialise().apply(Program(graph), given.site(found.selection))
    assert change is not None
    order = state.edited(change.program.graph, change.old_nodes, change.new_nodes).lowered()[0].schedule
    assert peak(change.program.graph, order) == 3 * MIB


def test_everything_kept_is_the_base() -> None:
    graph = large(drawn(FIGURE, "ABCDEF"))
    given = candidates(graph, 0)
    assert given.site(given.everything_kept()) == ()
    spans = given.spans(given.everything_kept())
    for place, live in enumerate(given.state.live):
        kept, again = given.held(place, spans)
        chosen = given.everything_kept().kept
        assert live == given.undecided_bytes(place) + sum(given.nbytes[s] for s in kept if s in chosen)
        assert again == [] or place > given.turn


def test_moments_of_one_place_become_one() -> None:
    node, other = NodeId(1), NodeId(2)
    found = merged(
        {
            (3, None): Moment(3, 5),
            (3, node): Moment(3, 0, {node: 7}),
            (3, other): Moment(3, -2, {other: 1}),
            (4, node): Moment(4, 1),
        }
    )
    assert found == [Moment(3, 5, {node: 7, other: 1}), Moment(4, 1)]
