"""Sums that take a product of elements in: where they may, where not, and that all results stay."""

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
from magis.rules.rewrite.add_to_elements import AddToElements

RULE = AddToElements()
A, B, C = matrices((4, 6), (4, 6), (4, 6), seed=1)


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (lambda a, b, c: a + b * c, ["addcmul"]),
        (lambda a, b, c: b * c + a, ["addcmul"]),
        (lambda a, b, c: a - b * c, ["addcmul"]),
        (lambda a, b, c: torch.add(a, b * c, alpha=-3), ["addcmul"]),
        (lambda a, b, c: a + b * b, ["addcmul"]),
        (lambda a, b, c: a + a * a, ["addcmul"]),
        (lambda a, b, c: a + b[0] * c[:, :1], ["addcmul"]),
        (lambda a, b, c: a[0] + b * c, ["addcmul"]),
        (lambda a, b, c: a * b + b * c, ["mul", "addcmul"]),
        (lambda a, b, c: a * b + b * c + c * a, ["mul", "addcmul", "addcmul"]),
        (lambda a, b, c: b * c - a, ["mul", "sub"]),
        (lambda a, b, c: torch.add(b * c, a, alpha=2), ["mul", "add"]),
        (lambda a, b, c: a + b * 2, ["mul", "add"]),
        (lambda a, b, c: b * c + 1, ["mul", "add"]),
        (lambda a, b, c: (lambda x: (x + a) * x)(b * c), ["mul", "add", "mul"]),
        (lambda a, b, c: (lambda x: (x + a, x))(b * c), ["mul", "add"]),
        (lambda a, b, c: (lambda x: x + x)(b * c), ["mul", "add"]),
        (lambda a, b, c: a + (b * c).view(6, 4).view(4, 6), ["mul", "add"]),
    ],
)
def test_where_a_product_goes(code: Callable[..., object], left: list[str]) -> None:
    assert sorted(operators(rewritten(RULE, code, A, B, C))) == sorted(left)


def test_no_parameter_is_read_after_its_update() -> None:
    def code(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = w * x
        w.add_(x)
        return w + y

    assert operators(rewritten(RULE, code, A, B)) == ["mul", "add_", "add"]


def test_whole_numbers_and_other_types_stay() -> None:
    whole = torch.arange(24).view(4, 6)
    assert sites(RULE, record(lambda x: x + x * x, [whole]).graph) == []
    assert sites(RULE, record(lambda x, y: x + y * y, [A, B.float()]).graph) == []
    assert sites(RULE, record(lambda x, y: x + x * y, [A, whole]).graph) == []
    assert sites(RULE, record(lambda x: x + x * x, [A.bfloat16()]).graph) != []


def test_what_is_no_site_is_refused() -> None:
    graph = record(lambda a, b, c: a + b * c, [A, B, C]).graph
    ((found,),) = sites(RULE, graph)
    for site in [(), (found, 99), (found - 1,), (0,), (-1,)]:
        assert once(RULE, graph, site) is None
    assert RULE.apply(Program(graph), (found,)) is None  # nobody says what nodes give
    region = Fission(frozenset(graph.nodes), {n: Cut(0, 1, 4) for n in graph.nodes}, 4, 2)
    assert RULE.apply(Program(graph, (region,)), (found,)) is None


@pytest.mark.parametrize("seed", range(40))
def test_random_steps_stay_the_same(seed: int) -> None:
    recorded = random_step(seed)
    graph, times = everywhere(RULE, recorded.graph)
    assert_same(recorded, graph)
    assert times == 0 or len(operators(graph)) < len(operators(recorded.graph))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["hf-llama-toy", "hf-bert-dropout-toy"])
def test_models_stay_the_same_and_get_faster(name: str) -> None:
    made, captured = toy(name)
    graph, times = everywhere(RULE, captured.graph)
    assert times
    if name == "hf-bert-dropout-toy":
        assert_same_model(made, captured, graph)
    assert estimate(graph).latency_s < estimate(captured.graph).latency_s
