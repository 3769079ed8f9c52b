"""Copies that are left out: which, and which not, and that all results stay."""

from __future__ import annotations

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
    random_step,
    rewritten,
    sites,
    toy,
)

from builder import record
from magis.fission.tree import Cut, Fission, Program
from magis.rules.rewrite.attention import WholeAttention
from magis.rules.rewrite.without_copy import WithoutCopy

RULE = WithoutCopy()
(C,) = matrices((4, 6))


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (lambda c: c.clone().tanh(), ["tanh"]),
        (lambda c: c.exp().clone().view(6, 4).tanh(), ["exp", "tanh"]),
        (lambda c: c.exp().clone().clone().tanh(), ["exp", "tanh"]),
        (lambda c: c.pow(1).tanh() + c.mul(1).exp(), ["add", "exp", "tanh"]),
        (lambda c: (c + 0).tanh() + (c / 1.0).exp() - (c - 0).cos(), ["add", "cos", "exp", "sub", "tanh"]),
        (lambda c: c.t().clone(memory_format=torch.contiguous_format).tanh(), ["clone", "tanh"]),
        (lambda c: c.t().clone().tanh(), ["clone", "tanh"]),
        (lambda c: c.exp().clone(), ["clone", "exp"]),
        (lambda c: c.exp().clone().view(6, 4), ["clone", "exp"]),
        (lambda c: c.pow(2).tanh() + c.mul(0).exp() + (c + 1).sin() + (0 * c), None),
        (lambda c: (c.float() * 1).tanh(), ["_to_copy", "tanh"]),
        (lambda c: (torch.arange(4) * 1.0).tanh() + (torch.arange(4) + 0).tanh(), None),
    ],
)
def test_which_go(code: Callable[..., object], left: list[str] | None) -> None:
    before = record(code, [C])
    graph = rewritten(RULE, code, C)
    assert sorted(operators(graph)) == sorted(operators(before.graph) if left is None else left) or left is None


def test_what_is_overwritten_is_copied() -> None:
    def code(w: torch.Tensor) -> torch.Tensor:
        before = w.clone()
        w.mul_(2)
        return before.tanh()

    assert operators(rewritten(RULE, code, C)) == ["clone", "mul_", "tanh"]


def test_what_is_no_site_is_refused() -> None:
    graph = record(lambda c: c.clone().tanh(), [C]).graph
    ((found,),) = sites(RULE, graph)
    for site in [(), (found, 99), (found + 1,), (0,), (-1,)]:
        assert once(RULE, graph, site) is None
    region = Fission(frozenset(graph.nodes), {n: Cut(0, 1, 4) for n in graph.nodes}, 4, 2)
    assert RULE.apply(Program(graph, (region,)), (found,)) is None


@pytest.mark.parametrize("seed", range(40))
def test_random_steps_stay_the_same(seed: int) -> None:
    recorded = random_step(seed)
    graph, times = everywhere(RULE, recorded.graph)
    assert_same(recorded, graph)
    assert times == 0 or len(operators(graph)) < len(operators(recorded.graph))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["bert-toy", "vit-toy"])
def test_models_lose_copies_that_attention_does_not_need(name: str) -> None:
    made, captured = toy(name)
    before, _ = everywhere(WholeAttention(), captured.graph)
    graph, times = everywhere(RULE, before)
    assert times == 1
    assert operators(graph).count("clone") <= operators(before).count("clone") - 8
    assert_same_model(made, captured, graph)
    assert estimate(graph).latency_s < estimate(before).latency_s
    assert estimate(graph).peak_bytes <= estimate(before).peak_bytes
