"""Sums that become a product's bias: where they may, where not, and that all results stay."""

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
from magis.rules.rewrite.add_to_product import AddToProduct

RULE = AddToProduct()
A, B, C = matrices((4, 6), (6, 4), (4, 4))


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (lambda a, b, c: (c + a @ b).exp(), ["addmm", "exp"]),
        (lambda a, b, c: (a @ b + c).exp(), ["addmm", "exp"]),
        (lambda a, b, c: (c.view(2, 2, 4) + (a @ b).view(2, 2, 4)).exp(), ["addmm", "exp"]),
        (lambda a, b, c: torch.add(c, a @ b, alpha=3).exp(), ["addmm", "exp"]),
        (lambda a, b, c: torch.add(a @ b, c, alpha=3).exp(), ["addmm", "exp"]),
        (lambda a, b, c: torch.sub(a @ b, c, alpha=3).exp(), ["addmm", "exp"]),
        (lambda a, b, c: (c - a @ b).exp(), ["addmm", "exp"]),
        (lambda a, b, c: (c + torch.addmm(c, a, b, beta=0, alpha=2)).exp(), ["addmm", "exp"]),
        (lambda a, b, c: (c @ c + a @ b + c.t() @ c).exp(), ["mm", "addmm", "addmm", "exp"]),
        (lambda a, b, c: (torch.bmm(a.view(1, 4, 6), b.view(1, 6, 4)) + c.view(1, 4, 4)).exp(), ["baddbmm", "exp"]),
        (lambda a, b, c: c + a @ b, ["mm", "add"]),  # handed back
        (lambda a, b, c: (c + torch.addmm(c, a, b)).exp(), ["addmm", "add", "exp"]),
        (lambda a, b, c: (c + (a @ b).t()).exp(), ["mm", "add", "exp"]),
        (lambda a, b, c: (c.t() + a @ b).exp(), ["mm", "add", "exp"]),
        (lambda a, b, c: (c[0] + a @ b).exp(), ["mm", "add", "exp"]),
        (lambda a, b, c: (lambda x: (x + c).exp() * x)(a @ b), ["mm", "add", "exp", "mul"]),
        (lambda a, b, c: (lambda x: (x + x).exp())(a @ b), ["mm", "add", "exp"]),
    ],
)
def test_where_a_sum_goes(code: Callable[..., object], left: list[str]) -> None:
    assert sorted(operators(rewritten(RULE, code, A, B, C))) == sorted(left)


def test_an_updated_parameter_is_added_as_it_was() -> None:
    def code(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = (w + x @ x).exp()
        w.add_(y)
        return y * w

    graph = rewritten(RULE, code, C, C + 1)
    assert sorted(operators(graph)) == ["add_", "addmm", "exp", "mul"]


def test_whole_numbers_and_other_types_stay() -> None:
    whole = torch.arange(16).view(4, 4)
    assert sites(RULE, record(lambda x: (x @ x + x).abs(), [whole]).graph) == []
    assert sites(RULE, record(lambda x, y: (x @ x + y).abs(), [C.float(), C]).graph) == []
    assert sites(RULE, record(lambda x: (x @ x + x).abs(), [C.bfloat16()]).graph) != []


def test_what_is_no_site_is_refused() -> None:
    graph = record(lambda a, b, c: (c + a @ b).exp(), [A, B, C]).graph
    ((found,),) = sites(RULE, graph)
    for site in [(), (found, 99), (found + 1,), (0,), (-1,)]:
        assert once(RULE, graph, site) is None
    assert RULE.apply(Program(graph), (found,)) is None  # nobody says what nodes give
    region = Fission(frozenset(graph.nodes), {n: Cut(0, 1, 4) for n in graph.nodes}, 4, 2)
    assert RULE.apply(Program(graph, (region,)), (found,)) is None


@pytest.mark.parametrize("seed", range(60))
def test_random_steps_stay_the_same(seed: int) -> None:
    recorded = random_step(seed)
    graph, times = everywhere(RULE, recorded.graph)
    assert_same(recorded, graph)
    assert times == 0 or len(operators(graph)) < len(operators(recorded.graph))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["hf-bert-toy", "gptneo-toy", "vit-toy"])
def test_models_stay_the_same_and_get_faster(name: str) -> None:
    made, captured = toy(name)
    graph, times = everywhere(RULE, captured.graph)
    assert times
    assert_same_model(made, captured, graph)
    assert estimate(graph).latency_s < 0.98 * estimate(captured.graph).latency_s
