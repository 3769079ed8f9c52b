"""What a variant is evaluated to is what the program that the rules make of it comes to."""

from __future__ import annotations

import random
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_graphs import known
from schedule_graphs import graphs, random_order

from magis.api.costs import cost_model
from magis.capture.capture import capture
from magis.capture.workload import Workload
from magis.ir.graph import Graph
from magis.ir.structure import topological_order
from magis.ir.verify import verify
from magis.lower.lower import lower
from magis.schedule.incremental import Scheduled
from magis.search import variants as module
from magis.search.anneal import AGAIN, KEEP
from magis.search.choose import at_turn, chosen
from magis.search.objective import Objective
from magis.search.state import MState
from magis.search.variants import Variant, Variants
from magis.sim.simulate import simulate

COSTS = cost_model("rtx3090")


class Net(torch.nn.Module):
    """Layers with views, dropout, running statistics, an operator with two results and skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(8) for _ in range(3))
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.last = torch.nn.Linear(8 * 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for norm, conv in zip(self.norms, self.convs):
            x = x + torch.nn.functional.dropout(conv(norm(x).relu()), 0.1, self.training)
        x = torch.nn.functional.max_pool2d(x, 2)
        return self.last(torch.nn.functional.layer_norm(x, x.shape[1:]).flatten(1).view(x.shape[0], -1))


@cache
def base() -> MState:
    torch.manual_seed(0)
    step = Workload(Net(), lambda m, b: m(b).square().mean(), torch.randn(16, 3, 8, 8))
    graph = capture(step).graph
    return started(graph)


def started(graph: Graph) -> MState:
    scheduled = Scheduled.of(graph, topological_order(graph), COSTS.workspace_bytes)
    return MState.of(scheduled, COSTS.latency_s, COSTS.host)


def drawn(variants: Variants, seed: int) -> Variant:
    """A random variant."""
    dice = random.Random(seed)
    variant = variants.first()
    again, away = dice.random(), dice.choice([0, dice.random()])
    for place in variants.may_repeat:
        variant.again[place] = dice.random() < again
    for storage in variants.may_swap:
        variant.swapped[storage] = dice.random() < away
    return variant


def is_as_made(variants: Variants, variant: Variant) -> bool:
    """Whether there is a program; it has to be as evaluated."""
    found = variants.evaluate(variant)
    made = variants.made(variant, COSTS.latency_s)
    if made is None:
        return False
    verify(made.graph)
    assert made.peak_bytes == found.peak_bytes + made.scheduled.flat.resident_bytes
    assert made.latency_s == pytest.approx(found.latency_s, rel=1e-9)
    assert made.stalls_s == pytest.approx(found.stalls_s, rel=1e-9)
    executed = simulate(lower(made.program, made.schedule), COSTS.latency_s, COSTS.workspace_bytes, COSTS.transfer_s)
    assert executed.peak_bytes == made.peak_bytes
    return True


@pytest.mark.parametrize("seed", range(60))
def test_as_evaluated(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWAPPED_BYTES", 256)
    state = base()
    turn = random.Random(seed).randrange(len(state.scheduled.order) // 3, 2 * len(state.scheduled.order) // 3)
    variants = Variants(state, turn)
    assert variants.may_repeat and variants.may_swap
    variant = drawn(variants, seed)
    if seed % 2:
        variants.hold(random.Random(seed).randrange(state.peak_bytes // 4, state.peak_bytes))
    assert is_as_made(variants, variant) or (not variants.space.needed.any() and not variant.swapped.any())


@given(graphs(4, 25), st.integers(0, 10**6))
@settings(deadline=None, max_examples=100)
def test_as_evaluated_on_random_graphs(graph: Graph, seed: int) -> None:
    graph = known(graph)
    scheduled = Scheduled.of(graph, random_order(graph, seed))
    state = MState(scheduled, {node: 1.0 + node % 5 for node in scheduled.order})
    variants = Variants(state, scheduled.live.index(max(scheduled.live)))
    variant = drawn(variants, seed)
    made = variants.made(variant, lambda call: 1.0)
    if made is not None:
        verify(made.graph)
        assert made.peak_bytes == variants.evaluate(variant).peak_bytes + scheduled.flat.resident_bytes


def test_what_the_base_does_is_the_base() -> None:
    state = base()
    live = state.scheduled.live
    variants = Variants(state, live.index(max(live)))
    found = variants.evaluate(variants.first())
    assert max(live) <= found.peak_bytes <= (1 + module.LITTLE) * max(live)
    assert found.latency_s == pytest.approx(state.latency_s)
    assert variants.made(variants.first(), COSTS.latency_s) is None


@given(graphs(4, 12), st.integers(0, 10**6), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
@settings(deadline=None, max_examples=60)
def test_annealing_finds_the_best_of_all(graph: Graph, seed: int, share: float) -> None:
    graph = known(graph)
    scheduled = Scheduled.of(graph, random_order(graph, seed))
    state = MState(scheduled, {node: 1.0 + node % 5 for node in scheduled.order})
    objective = Objective((1 + share) * state.latency_s)
    variants = Variants(state, scheduled.live.index(max(scheduled.live)))
    best = objective.key(state.latency_s, state.peak_bytes)
    resident = scheduled.flat.resident_bytes
    for choices in product((KEEP, AGAIN), repeat=len(variants.may_repeat)):
        variant = variants.first()
        variant.again[variants.may_repeat] = np.array(choices, np.int8)
        found = variants.evaluate(variant)
        best = min(best, objective.key(found.latency_s, found.peak_bytes + resident))
    found = at_turn(state, objective, lambda call: 1.0, 4000) or state
    assert objective.key(found.latency_s, found.peak_bytes) <= best


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_choices_are_the_same_each_time_and_meet_the_limit(objective: str) -> None:
    state = base()
    limit = Objective(1.1 * state.latency_s) if objective == "time" else Objective(None, int(0.8 * state.peak_bytes))
    found, again = (list(chosen(state, limit, COSTS.latency_s, 3000)) for _ in range(2))
    assert [state.history for state in found] == [state.history for state in again]
    assert limit.met(found[-1].latency_s, found[-1].peak_bytes)
    assert found[-1].peak_bytes < state.peak_bytes


def test_it_stops_when_it_is_told_to() -> None:
    told: list[int] = []

    def tell(evaluated: int) -> bool:
        told.append(evaluated)
        return len(told) < 3

    list(chosen(base(), Objective(1.1 * base().latency_s), COSTS.latency_s, 10**9, tell))
    assert 3 <= len(told) <= 5
