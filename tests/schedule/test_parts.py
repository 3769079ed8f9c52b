"""Interval, components and cuts, lower bound, search and merging, each by itself."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_graphs import drawn, graphs, least_peak, random_order

from magis.ir.graph import Graph
from magis.schedule.baseline import eager_order
from magis.schedule.bounds import lower_bound
from magis.schedule.dp import SearchLimits
from magis.schedule.dp import least_peak as best
from magis.schedule.incremental import Scheduled
from magis.schedule.interval import IntervalLimits, extend, interval
from magis.schedule.merge import humps, merged
from magis.schedule.partition import components, pieces
from magis.schedule.problem import Problem, members, problem
from magis.schedule.search import Moves, Walk

LIMITS = IntervalLimits()


def of(graph: Graph, seed: int = 0) -> Problem:
    state = Scheduled.of(graph, random_order(graph, seed))
    return problem(state.flat, state.order, lambda node: False)


@pytest.mark.parametrize(
    ("waists", "start", "end"),
    [
        ([5], 0, 1),  # one step always
        ([9, 8, 7, 6], 0, 1),  # 9 is not wide: only waists under 4 go on
        ([30, 20, 11, 5, 4, 1], 0, 4),  # down to the first that is not wide; 4 is not narrow
        ([30, 20, 11, 5, 3, 1, 1, 0], 0, 6),  # narrow ones go on while they shrink
        ([30, 31, 5], 0, 1),  # a waist that does not shrink ends it
        (list(range(100, 0, -1)), 3, 23),  # at most 20 steps
    ],
)
def test_extend(waists: list[int], start: int, end: int) -> None:
    assert extend(waists, start, 1, LIMITS) == end
    backward = waists[::-1]
    assert extend(backward, len(waists) - 1 - start, -1, LIMITS) == len(waists) - 1 - end


def test_interval_surrounds_all_that_was_touched() -> None:
    assert interval([1] * 10, [6, 3], LIMITS) == (2, 7)
    assert interval([3, 2, 3], [1], LIMITS) == (0, 2)
    assert interval([1], [0], LIMITS) == (0, 1)


def test_components_are_cut_after_narrow_waists() -> None:
    graph = drawn(["AB", "AC", "BD", "CD", "DE", "DF", "EG", "FG", "xy"], "ABCDEFGxy")
    given_problem = of(graph)
    names = [["ABCDEFGxy"[given_problem.nodes[i]] for i in members(c)] for c in components(given_problem)]
    assert sorted(map(sorted, names)) == [list("ABCDEFG"), list("xy")]
    start = Scheduled.of(graph, eager_order(graph))
    ordered = problem(start.flat, start.order, lambda node: False)
    cut = pieces(ordered, components(ordered)[0], joined=0, cut=0)
    assert ["".join("ABCDEFGxy"[i] for i in piece) for piece in cut] == ["A", "BCD", "EFG"]
    assert [len(piece) for piece in pieces(ordered, components(ordered)[0], joined=0)] == [1] * 7
    assert [len(piece) for piece in pieces(ordered, components(ordered)[0], joined=3)] == [1, 3, 3]


@given(graphs(most=10), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_no_order_is_under_the_lower_bound(graph: Graph, seed: int) -> None:
    residents = Scheduled.of(graph, random_order(graph, seed)).flat.resident_bytes
    given_problem = of(graph, seed)
    assert residents + lower_bound(given_problem, range(len(given_problem.nodes)), 0) <= least_peak(graph)


@given(graphs(1, 10), st.integers(0, 10**6), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_walk_decides_whether_a_level_suffices(graph: Graph, seed: int, backward: bool) -> None:
    given_problem = of(graph, seed)
    piece = range(len(given_problem.nodes))
    least = best(given_problem, piece, 0, SearchLimits()).peak
    enough = Walk(Moves(given_problem, piece, 0, backward), least)
    order = enough.proceed(10**6)
    assert order is not None and sorted(order) == list(piece) and given_problem.peak(order) == least
    less = Walk(Moves(given_problem, piece, 0, backward), least - 1)
    assert less.proceed(10**6) is None
    assert less.exhausted and less.exceeding <= least


@given(graphs(4, 25), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_too_many_sets_leave_it_to_a_beam(graph: Graph, seed: int) -> None:
    given_problem = of(graph, seed)
    piece = range(len(given_problem.nodes))
    least = best(given_problem, piece, 0, SearchLimits(states=10**6))
    capped = best(given_problem, piece, 0, SearchLimits(states=1, beam=4))
    assert least.optimal and least.peak <= capped.peak == given_problem.peak(capped.order)
    assert capped.optimal == (capped.states == 0)
    content = best(given_problem, piece, 0, SearchLimits(gain=given_problem.peak(piece) + 1))
    assert content.order == tuple(piece)


@pytest.mark.parametrize("seed", range(20))
def test_humps_merge_like_the_best_of_all_merges(seed: int) -> None:
    chosen = random.Random(seed)
    sequences, live = [], 0
    for number in range(2):
        steps, live = [], 0
        for _ in range(5):
            during = live + chosen.randint(0, 9)
            live = during - chosen.randint(0, 9)
            steps.append((during, live))
        sequences.append((list(range(5 * number, 5 * number + 5)), steps))
    delta = {
        node: (during - before, after - before)
        for order, steps in sequences
        for node, (during, after), before in zip(order, steps, [0, *(after for _, after in steps)])
    }

    def peak(order: list[int]) -> int:
        level, found = 0, []
        for node in order:
            found.append(level + delta[node][0])
            level += delta[node][1]
        return max(found)

    firsts = itertools.combinations(range(10), 5)
    merges = [[(i if i in places else None) for i in range(10)] for places in map(set, firsts)]
    everything = []
    for merge in merges:
        one, other = iter(sequences[0][0]), iter(sequences[1][0])
        everything.append(peak([next(other) if place is None else next(one) for place in merge]))
    assert peak(merged([humps(order, steps) for order, steps in sequences])) == min(everything)
