"""GELUs that are put together: in which forms they are found, what is none, and that all results stay."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from rewrite.checks import assert_same, assert_same_model, estimate, everywhere, matrices, once, rewritten, sites, toy
from rewrite.checks import operators as launched

from builder import record
from magis.fission.tree import Cut, Fission, Program
from magis.rules.base import Rule
from magis.rules.rewrite.add_to_elements import AddToElements
from magis.rules.rewrite.gelu import WholeGelu
from magis.rules.rewrite.scale import MoveScale

RULE = WholeGelu()
ROOT = math.sqrt(2 / math.pi)
X, G = matrices((6, 5), (6, 5))
Formula = Callable[[torch.Tensor], torch.Tensor]
FORMS: list[Formula] = [
    lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    lambda x: x * 0.5 * (torch.tanh(x * ROOT * (1 + 0.044715 * x * x)) + 1),
    lambda x: (1 + torch.tanh((x + x * x * x * 0.044715) * ROOT)) * x / 2,
    lambda x: 0.5 * (torch.tanh(torch.add(x, x**3, alpha=0.044715) * ROOT) * x + x),
]
OTHERS: list[Formula] = [
    lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
    lambda x: 0.5 * x * (1.0 - torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    lambda x: torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))) * x,
    lambda x: (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))) * x[0],
    lambda x: torch.tanh(x),
]


def trained(formula: Formula) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function and its gradient, as a layer has them."""

    def code(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x.exp().detach().requires_grad_()
        y = formula(a)
        (gradient,) = torch.autograd.grad(y, a, g.cos())
        return y.sin(), gradient.sin()

    return code


@pytest.mark.parametrize("formula", FORMS)
def test_all_forms_are_found(formula: Formula) -> None:
    graph = rewritten(RULE, trained(formula), X.abs().log(), G, times=1)
    assert sorted(launched(graph)) == ["cos", "exp", "gelu", "gelu_backward", "sin", "sin"]


@pytest.mark.parametrize("formula", FORMS)
def test_without_gradient(formula: Formula) -> None:
    assert sorted(launched(rewritten(RULE, lambda x: formula(x.exp()).sin(), X))) == ["exp", "gelu", "sin"]
    assert launched(rewritten(RULE, formula, X)) == ["gelu"]


@pytest.mark.parametrize("formula", FORMS)
@pytest.mark.parametrize("others", [[MoveScale()], [AddToElements()], [AddToElements(), MoveScale()]])
def test_after_other_rewrites(formula: Formula, others: list[Rule]) -> None:
    recorded = record(trained(formula), [X, G])
    graph = recorded.graph
    for other in others:
        graph, _ = everywhere(other, graph)
    graph, times = everywhere(RULE, graph)
    assert times == 1
    assert_same(recorded, graph)


@pytest.mark.parametrize("formula", OTHERS)
def test_other_formulas_stay(formula: Formula) -> None:
    assert sites(RULE, record(trained(formula), [X, G]).graph) == []


def test_a_tanh_that_is_still_needed_stays() -> None:
    def code(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))
        return (0.5 * x * (1 + t)).sin(), t.cos()

    graph = record(code, [X]).graph
    assert [once(RULE, graph, site) for site in sites(RULE, graph)] == [None]


def test_no_parameter_is_read_after_its_update() -> None:
    def code(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        y = FORMS[0](w)
        w.add_(g)
        return y.sin()

    assert sites(RULE, record(code, [X, G]).graph) == []


def test_what_is_no_site_is_refused() -> None:
    graph = record(lambda x: FORMS[0](x).sin(), [X]).graph
    ((middle,),) = sites(RULE, graph)
    for site in [(), (middle, 99), (middle + 1,), (0,), (-1,)]:
        assert once(RULE, graph, site) is None
    assert RULE.apply(Program(graph), (middle,)) is None  # nobody says what new nodes give
    region = Fission(frozenset(graph.nodes), {n: Cut(0, 1, 4) for n in graph.nodes}, 6, 2)
    assert RULE.apply(Program(graph, (region,)), (middle,)) is None
    assert sites(RULE, record(lambda x: FORMS[0](x).sin(), [X.bfloat16()]).graph) != []


@pytest.mark.parametrize("seed", range(20))
def test_chains_of_many_stay_the_same(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(FORMS) + len(OTHERS), (4,), generator=generator).tolist()

    def code(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = y = x.detach().requires_grad_()
        for number in picked:
            y = [*FORMS, *OTHERS][number](y) + g
        return y, *torch.autograd.grad(y, a, g)

    recorded = record(code, [X, G])
    graph, times = everywhere(RULE, recorded.graph)
    assert (times > 0) == any(number < len(FORMS) for number in picked)
    assert_same(recorded, graph)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["hf-gpt2-toy", "hf-gptneo-toy"])
def test_models_stay_the_same_and_get_smaller(name: str) -> None:
    made, captured = toy(name)
    graph, times = everywhere(RULE, captured.graph)
    assert times == 1
    assert_same_model(made, captured, graph)
    before, after = estimate(captured.graph), estimate(graph)
    assert after.latency_s < 0.95 * before.latency_s
    assert after.peak_bytes < before.peak_bytes
