"""Filled-up slices that are joined: which, and which not, and that all results stay."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from rewrite.checks import (
    assert_same,
    assert_same_model,
    estimate,
    everywhere,
    matrices,
    once,
    operators,
    rewritten,
    sites,
    toy,
)

from builder import record
from magis.fission.tree import Cut, Fission, Program
from magis.rules.rewrite.join_slices import JoinSlices

RULE = JoinSlices()
LAST = 2**63 - 1
X, Y = matrices((4, 3), (4, 5))


def filled(x: torch.Tensor, start: int, end: int, step: int = 1, dim: int = 1, width: int = 8) -> torch.Tensor:
    shape = [4, width] if dim % 2 else [width, 4]
    return torch.ops.aten.slice_backward(x, shape, dim, start, end, step)


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (lambda x, y: filled(x, 0, 3) + filled(y, 3, LAST), ["cat"]),
        (lambda x, y: filled(y, 3, 8) + filled(x, 0, 3), ["cat"]),
        (lambda x, y: filled(x, 0, -5) + filled(y, -5, 8, dim=-1), ["cat"]),
        (lambda x, y: filled(x.t(), 0, 3, dim=0) + filled(y.t(), 3, LAST, dim=-2), ["cat"]),
        (lambda x, y: filled(x, 5, 8) + filled(y, 0, 5), ["cat"]),
        (lambda x, y: filled(x, 0, 3) + filled(y, 2, 7), None),
        (lambda x, y: filled(x, 0, 3) + filled(x, 5, 8), None),
        (lambda x, y: filled(x, 0, 3) + filled(x.clone(), 0, 3), None),
        (lambda x, y: filled(x, 0, 6, 2) + filled(y, 3, 8), None),
        (lambda x, y: torch.add(filled(x, 0, 3), filled(y, 3, 8), alpha=2), None),
        (lambda x, y: (lambda a: a + filled(y, 3, 8) + a.tanh())(filled(x, 0, 3)), None),
        (lambda x, y: (lambda a: (a + filled(y, 3, 8), a))(filled(x, 0, 3)), None),
        (lambda x, y: filled(x, 0, 3) + filled(x.t().reshape(3, 4), 1, 4, dim=0, width=4)[:, :1], None),
    ],
)
def test_which_are_joined(code: Callable[..., object], left: list[str] | None) -> None:
    before = record(code, [X, Y])
    assert operators(rewritten(RULE, code, X, Y)) == (operators(before.graph) if left is None else left)


def test_other_types_stay() -> None:
    assert sites(RULE, record(lambda x, y: filled(x, 0, 3) + filled(y, 3, 8), [X, Y.float()]).graph) == []


def test_what_is_no_site_is_refused() -> None:
    graph = record(lambda x, y: filled(x, 0, 3) + filled(y, 3, 8), [X, Y]).graph
    ((found,),) = sites(RULE, graph)
    for site in [(), (found, 99), (found - 1,), (0,), (-1,)]:
        assert once(RULE, graph, site) is None
    assert RULE.apply(Program(graph), (found,)) is None  # nobody says what new nodes give
    region = Fission(frozenset(graph.nodes), {n: Cut(0, 1, 4) for n in graph.nodes}, 4, 2)
    assert RULE.apply(Program(graph, (region,)), (found,)) is None


@pytest.mark.parametrize("seed", range(30))
def test_random_sums_stay_the_same(seed: int) -> None:
    chosen = random.Random(seed)

    def code(*given: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4, 8, dtype=torch.float64)
        for x in given:
            cut = chosen.randrange(1, 8)
            other = cut if chosen.random() < 0.7 else chosen.randrange(1, 8)
            pair = [filled(x[:, :cut], 0, cut), filled(x[:, other:], other, LAST)]
            chosen.shuffle(pair)
            total = total + (pair[0] + pair[1]) * x
        return total

    recorded = record(code, matrices((4, 8), (4, 8), (4, 8), seed=seed))
    graph, times = everywhere(RULE, recorded.graph)
    assert_same(recorded, graph)
    assert (times > 0) == (len(operators(graph)) < len(operators(recorded.graph)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["hf-llama-toy", "hf-qwen2-toy"])
def test_models_get_faster(name: str) -> None:
    made, captured = toy(name)
    graph, times = everywhere(RULE, captured.graph)
    assert times == 1
    assert_same_model(made, captured, graph)
    assert estimate(graph).latency_s < estimate(captured.graph).latency_s
    assert estimate(graph).peak_bytes <= estimate(captured.graph).peak_bytes
