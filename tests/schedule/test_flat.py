"""The flat arrays agree with the simulator, and an edit's arrays with those read anew."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_graphs import graphs, random_edit, random_order

from magis.fission.tree import Program
from magis.ir.graph import Call, Graph, Value
from magis.lower.lower import lower
from magis.schedule.flat import Flat, flatten, live_bytes, peak_bytes, topological
from magis.schedule.incremental import Scheduled
from magis.schedule.update import updated
from magis.schedule.waist import ancestors, descendants, narrow_waist
from magis.sim.timeline import timeline


def workspace(call: Call) -> int:
    return 3 * len(call.inputs)


@given(graphs(most=30), st.integers(0, 10**6))
@settings(deadline=None, max_examples=200)
def test_live_bytes_are_the_simulators(graph: Graph, seed: int) -> None:
    order = random_order(graph, seed)
    found = timeline(lower(Program(graph), order), workspace)
    flat = flatten(graph, workspace)
    operators = [node for node in order if flat.is_operator[node]]
    assert [flat.resident_bytes + live for live in live_bytes(flat, operators)] == list(found.live_bytes)
    assert peak_bytes(flat, operators) == found.peak_bytes


@given(graphs(most=30), st.lists(st.integers(0, 10**6), min_size=1, max_size=6))
@settings(deadline=None, max_examples=300)
def test_updated_arrays_equal_those_read_anew(graph: Graph, seeds: list[int]) -> None:
    flat = flatten(graph)
    for seed in seeds:
        edited = random_edit(flat.graph, seed)
        if edited is not None:
            flat = updated(flat, *edited)
            assert contents(flat) == contents(flatten(flat.graph))


def contents(flat: Flat) -> dict[str, Any]:
    """What the arrays say, whatever the numbers of storages."""
    value_of: dict[int, Value] = {storage: value for value, storage in flat.storage_of.items()}
    size = max(flat.graph.nodes) + 1
    assert not any(any(rows[size:]) for rows in (flat.before, flat.after, flat.taken, flat.is_operator, flat.extra))
    return {
        "nodes": [flat.is_operator[:size], flat.before[:size], flat.after[:size], flat.roots[:size], flat.extra[:size]],
        "taken": [{value_of[storage] for storage in taken} for taken in flat.taken[:size]],
        "storages": {v: (flat.maker[s], flat.nbytes[s], flat.readers[s]) for v, s in flat.storage_of.items()},
        "others": ({value_of[storage] for storage in flat.kept}, flat.draws, flat.writers),
    }


@given(graphs(most=20), st.integers(0, 10**6))
@settings(deadline=None, max_examples=100)
def test_narrow_waists_count_independent_operators(graph: Graph, seed: int) -> None:
    flat = flatten(graph)
    order = tuple(node for node in random_order(graph, seed) if flat.is_operator[node])
    place = {node: i for i, node in enumerate(order)}
    earlier = [[place[p] for p in flat.before[node]] for node in order]
    reach = {node: {node} for node in order}
    for node in reversed(order):
        for follower in flat.after[node]:
            reach[node] |= reach[follower]
    waists = narrow_waist(ancestors(earlier), descendants(earlier))
    assert Scheduled(flat, order).waists == waists
    for node, waist in zip(order, waists):
        assert waist == sum(other not in reach[node] and node not in reach[other] for other in order)


@given(graphs(most=20), st.integers(0, 10**6))
@settings(deadline=None, max_examples=50)
def test_topological_moves_only_what_must_move(graph: Graph, seed: int) -> None:
    flat = flatten(graph)
    order = tuple(node for node in random_order(graph, seed) if flat.is_operator[node])
    assert topological(flat, order) == order
    mixed = topological(flat, reversed(order))
    place = {node: i for i, node in enumerate(mixed)}
    assert sorted(mixed) == sorted(order)
    assert all(place[p] < place[node] for node, before in enumerate(flat.before) for p in before)
    assert all(a != b for a, b in itertools.pairwise(mixed))
