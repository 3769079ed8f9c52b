"""Scales that go into products: where they may, where not, and that all results stay."""

from __future__ import annotations

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
from magis.rules.rewrite.scale import MoveScale

RULE = MoveScale()
A, B, C = matrices((4, 6), (6, 4), (4, 4))


def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Attention and its gradients, written out."""
    p = torch.softmax(torch.bmm(q, k.transpose(1, 2)).view(1, 2, 5, 5) / 8, -1)
    dp = torch.bmm(g, v.transpose(1, 2)).view(1, 2, 5, 5)
    ds = (torch._softmax_backward_data(dp, p, -1, torch.float64) / 8).view(2, 5, 5)
    return torch.bmm(p.view(2, 5, 5), v), torch.bmm(ds, k), torch.bmm(ds.transpose(1, 2), q)


def test_attention_loses_both_passes_over_the_scores() -> None:
    inputs = matrices(*[(2, 5, 3)] * 4)
    graph = rewritten(RULE, heads, *inputs, times=1)
    assert operators(graph).count("div") == 0
    assert operators(graph).count("baddbmm") == 3
    before = record(heads, inputs).graph
    assert max(before.nodes) + 1 == max(graph.nodes)  # one zero for all products


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (lambda a, b, c: (a @ b) / 2, ["mm", "div"]),  # handed back
        (lambda a, b, c: ((a @ b) / 2).tanh(), ["full", "addmm", "tanh"]),
        (lambda a, b, c: ((a @ b).t() / 2).tanh(), ["full", "addmm", "tanh"]),
        (lambda a, b, c: (torch.addmm(c, a, b, beta=3) * 2).tanh(), ["addmm", "tanh"]),
        (lambda a, b, c: (lambda x: (x / 2).tanh() + x)(a @ b), ["mm", "div", "tanh", "add"]),
        (lambda a, b, c: (a.tanh() / 2) @ b, ["tanh", "full", "addmm"]),
        (lambda a, b, c: (lambda x: x @ x)(-c), ["mm"]),
        (lambda a, b, c: torch.addmm(c * 2, a, b, beta=0.25), ["addmm"]),
        (lambda a, b, c: torch.addmm(c.t() / 3, a, b), ["addmm"]),
        (lambda a, b, c: c.tanh() - c.exp() * 0.5, ["tanh", "exp", "sub"]),
        (lambda a, b, c: c.tanh() * 0.5 - c.exp(), ["tanh", "mul", "exp", "sub"]),
        (lambda a, b, c: c.tanh() * 0.5 + c.exp(), ["tanh", "exp", "add"]),
        (lambda a, b, c: torch.add(c.tanh() * 0.5, c.exp(), alpha=2), ["tanh", "mul", "exp", "add"]),
        (lambda a, b, c: (lambda x: x + x.t())(c.tanh() * 0.5), ["tanh", "mul", "add"]),
        (lambda a, b, c: (c.tanh() * 0.5 / 4).exp(), ["tanh", "mul", "exp"]),
        (lambda a, b, c: (-(c.tanh() / 4)).exp(), ["tanh", "mul", "exp"]),
        (lambda a, b, c: (c.tanh() / 4).sum(), ["tanh", "sum", "mul"]),
        (lambda a, b, c: (c.tanh() / 4).sum(0), ["tanh", "div", "sum"]),
        (lambda a, b, c: (c.exp().sum().expand(4, 4) / 4).tanh(), ["exp", "sum", "mul", "tanh"]),
        (lambda a, b, c: c.exp().sum().expand(4, 4) * (c.tanh() / 4), ["exp", "sum", "mul", "tanh", "mul"]),
        (lambda a, b, c: (c.exp().sum().expand(4, 4) * 3) * (c.tanh() / 4), ["exp", "sum", "mul", "tanh", "mul"]),
        (lambda a, b, c: c.exp()[0].expand(4, 4) * (c.tanh() / 4), ["exp", "div", "tanh", "mul"]),
        (lambda a, b, c: (lambda x: x.exp() * (x / 4))(c.sum().expand(4, 4)), ["sum", "exp", "div", "mul"]),
        (lambda a, b, c: torch.addcmul(c, c.tanh() / 4, c.exp()), ["tanh", "exp", "addcmul"]),
        (lambda a, b, c: (lambda x: torch.addcmul(c, x, x, value=3))(c.tanh() / 4), ["tanh", "addcmul"]),
        (lambda a, b, c: (lambda x: torch.addcmul(c, x, x.t()))(c.tanh() / 4), ["tanh", "addcmul"]),
        (lambda a, b, c: torch.addcmul(c.tanh() / 4, c, c.exp()), ["tanh", "div", "exp", "addcmul"]),
        (lambda a, b, c: (c.tanh() * 0).exp() @ b.t(), ["tanh", "mul", "exp", "mm"]),
    ],
)
def test_where_a_scale_goes(code: object, left: list[str]) -> None:
    assert sorted(operators(rewritten(RULE, code, A, B, C))) == sorted(left)  # type: ignore[arg-type]


def test_an_update_takes_the_scale_of_its_gradient() -> None:
    def code(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w.add_((x.tanh() / 2).t(), alpha=-0.1)
        return x.exp()

    assert operators(rewritten(RULE, code, C, C + 1)) == ["tanh", "add_", "exp"]


def test_no_parameter_is_read_after_its_update() -> None:
    def code(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = w * 2
        w.add_(x)
        return x @ y

    assert operators(rewritten(RULE, code, C, C + 1)) == ["mul", "add_", "mm"]


def test_whole_numbers_and_other_types_stay() -> None:
    whole = torch.arange(16).view(4, 4)
    for code in (lambda x: (x @ x * 3) + 1, lambda x: (x @ x) / 2 + x, lambda x: (x / 2) @ C.float()):
        recorded = record(code, [whole])
        assert sites(RULE, recorded.graph) == []
    half = record(lambda x, y: y.float() + x * 2, [A.half(), A.half()])
    assert sites(RULE, half.graph) == []
    assert sites(RULE, record(lambda x: (x @ x * 2).tanh(), [C.bfloat16()]).graph) != []


def test_what_is_no_site_is_refused() -> None:
    graph = record(lambda a, b: ((a @ b) / 2).tanh(), [A, B]).graph
    ((scale,),) = sites(RULE, graph)
    assert once(RULE, graph, (scale,)) is not None
    for site in [(), (scale, 99), (scale + 1,), (0,), (-1,)]:
        assert once(RULE, graph, site) is None
    assert RULE.apply(Program(graph), (scale,)) is None  # nobody says what new nodes give


def test_nothing_in_a_region_is_touched() -> None:
    graph = record(lambda a, b: ((a @ b) / 2).tanh(), [A, B]).graph
    ((scale,),) = sites(RULE, graph)
    region = Fission(frozenset(graph.nodes), {n: Cut(0, 1, 4) for n in graph.nodes}, 4, 2)
    assert RULE.apply(Program(graph, (region,)), (scale,)) is None


@pytest.mark.parametrize("seed", range(60))
def test_random_steps_stay_the_same(seed: int) -> None:
    recorded = random_step(seed)
    graph, times = everywhere(RULE, recorded.graph)
    assert_same(recorded, graph)
    assert times == 0 or len(operators(graph)) <= len(operators(recorded.graph)) + times


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["hf-bert-toy", "hf-gpt2-toy", "vit-toy"])
def test_models_stay_the_same_and_get_faster(name: str) -> None:
    made, captured = toy(name)
    graph, times = everywhere(RULE, captured.graph)
    assert_same_model(made, captured, graph)
    before, after = estimate(captured.graph), estimate(graph)
    assert (after.latency_s < before.latency_s) == (times > 0) == (name != "hf-bert-toy")
