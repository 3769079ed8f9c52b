"""Casts in another order: which, and which not, and that all results stay."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from rewrite.checks import assert_same, estimate, everywhere, matrices, once, operators, rewritten, sites, toy

from builder import record
from magis.fission.tree import Cut, Fission, Program
from magis.rules.rewrite.cast_in_order import CastInOrder

RULE = CastInOrder()
(X,) = matrices((2, 3, 4))


def ordered(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (lambda x: ordered(x.float().transpose(0, 1)).tanh(), ["_to_copy", "tanh"]),
        (lambda x: ordered(x.float().permute(2, 0, 1)[..., None].transpose(0, 1)).tanh(), ["_to_copy", "tanh"]),
        (lambda x: ordered(x.transpose(0, 1).float()).tanh(), ["_to_copy", "tanh"]),
        (lambda x: ordered(x.half().mT), ["_to_copy"]),
        (lambda x: ordered(x.float().mT).double().mT.clone(), ["_to_copy", "_to_copy", "clone"]),
        (lambda x: ordered(x.float()).tanh(), ["_to_copy", "clone", "tanh"]),
        (lambda x: x.float().mT.clone().tanh(), ["_to_copy", "clone", "tanh"]),
        (lambda x: ordered(x.mT).float().tanh(), ["clone", "_to_copy", "tanh"]),
        (lambda x: (lambda y: ordered(y.mT).tanh().sum() + y.sum())(x.float()), None),
        (lambda x: ordered(x.float()[:1].mT).tanh(), ["_to_copy", "clone", "tanh"]),
        (lambda x: ordered(x.float().sum(0, keepdim=True).expand(5, 3, 4).mT).tanh(), None),
    ],
)
def test_which_are_cast_in_order(code: Callable[..., object], left: list[str] | None) -> None:
    before = record(code, [X])
    assert operators(rewritten(RULE, code, X)) == (operators(before.graph) if left is None else left)


def test_no_parameter_is_read_after_its_update() -> None:
    def code(w: torch.Tensor) -> torch.Tensor:
        y = ordered(w.float().mT)
        w.mul_(2)
        return y.tanh()

    assert sites(RULE, record(code, [X]).graph) == []


def test_what_is_no_site_is_refused() -> None:
    graph = record(lambda x: ordered(x.float().mT).tanh(), [X]).graph
    ((found,),) = sites(RULE, graph)
    for site in [(), (found, 99), (found - 1,), (0,), (-1,)]:
        assert once(RULE, graph, site) is None
    assert RULE.apply(Program(graph), (found,)) is None  # nobody says what new nodes give
    region = Fission(frozenset(graph.nodes), {n: Cut(0, 1, 2) for n in graph.nodes}, 2, 2)
    assert RULE.apply(Program(graph, (region,)), (found,)) is None


@pytest.mark.parametrize("seed", range(30))
def test_random_chains_stay_the_same(seed: int) -> None:
    chosen = random.Random(seed)
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.float(),
        lambda x: x.double(),
        lambda x: x.transpose(0, 1),
        lambda x: x.mT,
        ordered,
        ordered,
        lambda x: x.unsqueeze(1).squeeze(1),
        lambda x: x.tanh(),
    ]

    def code(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = chosen.choice(steps)(x)
        return ordered(x).sin()

    recorded = record(code, [X])
    graph, times = everywhere(RULE, recorded.graph)
    assert_same(recorded, graph)
    assert (times > 0) == (len(operators(graph)) < len(operators(recorded.graph)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_gets_faster() -> None:
    captured = toy("hf-gptneo-toy")[1]
    graph, times = everywhere(RULE, captured.graph)
    assert times == 1
    assert estimate(graph).latency_s < estimate(captured.graph).latency_s
    assert estimate(graph).peak_bytes <= 1.001 * estimate(captured.graph).peak_bytes
