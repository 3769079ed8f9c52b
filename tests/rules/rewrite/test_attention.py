"""Attention that is put together: in which forms it is found, what is none, and that all results stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

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
from magis.rules.rewrite.attention import WholeAttention
from magis.rules.rewrite.scale import MoveScale

RULE = WholeAttention()
FORWARD, BACKWARD = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
X, W, G = matrices((2, 6, 12), (12, 36), (2, 6, 12))
Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def divided(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2) / 2).softmax(-1)


def both_scaled(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return ((q @ k.mT) * 0.25 * 3).softmax(3)


def plain(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-1)


def layer(weigh: Weigh, x: torch.Tensor, w: torch.Tensor, heads: int = 3) -> torch.Tensor:
    """Self-attention without output projection."""
    batch, length, width = x.shape
    parts = (x @ part for part in w.split(width, 1))
    q, k, v = (part.view(batch, length, heads, -1).transpose(1, 2) for part in parts)
    return (weigh(q, k) @ v).transpose(1, 2).reshape(batch, length, width)


def trained(weigh: Weigh, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The layer and its gradients."""
    w = w.detach().requires_grad_()
    x = x.detach().requires_grad_()
    y = layer(weigh, x, w)
    return y, *torch.autograd.grad(y, (x, w), g)


@pytest.mark.parametrize("weigh", [divided, both_scaled, plain])
def test_with_gradients(weigh: Weigh) -> None:
    found = operators(rewritten(RULE, partial(trained, weigh), X, W, G, times=1))
    assert found.count(FORWARD) == found.count(BACKWARD) == 1
    assert not {"bmm", "_softmax", "_softmax_backward_data"} & set(found)


@pytest.mark.parametrize("weigh", [divided, both_scaled, plain])
def test_without_gradients(weigh: Weigh) -> None:
    found = operators(rewritten(RULE, partial(layer, weigh), X, W, times=1))
    assert FORWARD in found
    assert not {"bmm", "_softmax"} & set(found)


@pytest.mark.parametrize("weigh", [divided, both_scaled])
def test_after_scales_have_moved(weigh: Weigh) -> None:
    recorded = record(partial(trained, weigh), [X, W, G])
    graph, _ = everywhere(MoveScale(), recorded.graph)
    assert "div" not in operators(graph)
    graph, times = everywhere(RULE, graph)
    assert times == 1
    assert_same(recorded, graph)


def masked(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT + torch.ones(6, 6, dtype=q.dtype).tril()).softmax(-1)


def by_queries(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-2)


def cut(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-1).tanh()


def turned(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-1).mT


def scaled_after(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-1) * 2


@pytest.mark.parametrize("weigh", [masked, by_queries, cut, turned, scaled_after])
def test_other_weights_stay(weigh: Weigh) -> None:
    assert sites(RULE, record(partial(layer, weigh), [X, W]).graph) == []
    assert sites(RULE, record(partial(trained, weigh), [X, W, G]).graph) == []


def test_weights_that_are_handed_back_stay() -> None:
    def code(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = []
        y = layer(lambda q, k: kept.append(divided(q, k)) or kept[0], x, w)  # type: ignore[func-returns-value]
        return y, kept[0]

    assert sites(RULE, record(code, [X, W]).graph) == []


@pytest.mark.parametrize(
    ("spoil", "times"),
    [
        (lambda p, g, q, k, v: (2 * (p.mT @ g), g @ v.mT, q, k), 1),  # that is another reader
        (lambda p, g, q, k, v: (p.mT @ g, g @ k.mT, q, k), 0),
        (lambda p, g, q, k, v: (p.mT @ g, q @ v.mT, q, k), 0),
        (lambda p, g, q, k, v: (p.mT @ g, 3 * (g @ v.mT), q, k), 0),
        (lambda p, g, q, k, v: (p.mT @ g, g @ v.mT, k, k), 0),
        (lambda p, g, q, k, v: (p.mT @ g, g @ v.mT, q, v), 0),
        (lambda p, g, q, k, v: (p.mT @ q, g @ v.mT, q, k), 0),
    ],
)
def test_only_the_gradients_of_this_attention(spoil: Callable[..., tuple[torch.Tensor, ...]], times: int) -> None:
    def code(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, g = given
        p = divided(q, k)
        dv, dp, by_q, by_k = spoil(p, g, q, k, v)
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype) / 2
        return (p @ v).sum(1), dv.sum(1), (ds @ by_k).sum(1), (ds.mT @ by_q).sum(1)

    rewritten(RULE, code, *matrices(*[(2, 3, 5, 4)] * 4), times=times)


def test_a_result_that_would_be_handed_back_in_another_layout_stays() -> None:
    def code(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, g = given
        p = divided(q, k)
        ds = torch._softmax_backward_data(g @ v.mT, p, -1, p.dtype) / 2
        return (p @ v).sin(), (p.mT @ g).sin(), (ds @ k).sin(), (ds.mT @ q).sin()

    graph = record(code, matrices(*[(2, 3, 5, 4)] * 4)).graph
    assert [once(RULE, graph, site) for site in sites(RULE, graph)] == [None]


def test_a_wrong_scale_of_the_gradients_is_noticed() -> None:
    def code(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, g = given
        p = divided(q, k)
        ds = torch._softmax_backward_data(g @ v.mT, p, -1, p.dtype) / 3
        return (p @ v).sum(1), (p.mT @ g).sum(1), (ds @ k).sum(1), (ds.mT @ q).sum(1)

    assert sites(RULE, record(code, matrices(*[(2, 3, 5, 4)] * 4)).graph) == []


def test_half_precision_stays() -> None:
    """The operator would keep weights in float32, which is not what was asked for."""
    assert sites(RULE, record(partial(layer, divided), [X.bfloat16(), W.bfloat16()]).graph) == []


def test_what_is_no_site_is_refused() -> None:
    graph = record(partial(layer, divided), [X, W]).graph
    ((middle,),) = sites(RULE, graph)
    for site in [(), (middle, 99), (middle + 1,), (0,), (-1,)]:
        assert once(RULE, graph, site) is None
    assert RULE.apply(Program(graph), (middle,)) is None  # nobody says what new nodes give
    region = Fission(frozenset(graph.nodes), {n: Cut(0, 1, 2) for n in graph.nodes}, 2, 2)
    assert RULE.apply(Program(graph, (region,)), (middle,)) is None


@pytest.mark.parametrize("seed", range(12))
def test_stacks_of_layers_stay_the_same(seed: int) -> None:
    chosen = random.Random(seed)
    kinds = [divided, both_scaled, plain, masked, by_queries, cut]
    picked = [chosen.choice(kinds) for _ in range(3)]

    def code(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w, x = w.detach().requires_grad_(), x.detach().requires_grad_()
        y = x
        for weigh in picked:
            y = y + layer(weigh, y, w, chosen.choice([1, 2, 3]))
        return y, *torch.autograd.grad(y, (x, w), g)

    recorded = record(code, [X / 4, W / 4, G])
    graph, times = everywhere(RULE, recorded.graph)
    assert (times > 0) == any(weigh in kinds[:3] for weigh in picked)
    assert_same(recorded, graph)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["bert-toy", "vit-toy"])
def test_models_stay_the_same_and_get_smaller(name: str) -> None:
    made, captured = toy(name)
    graph, times = everywhere(RULE, captured.graph)
    assert times == 1
    assert_same_model(made, captured, graph)
    before, after = estimate(captured.graph), estimate(graph)
    assert after.latency_s < 0.95 * before.latency_s
    assert after.peak_bytes < (1 if name == "bert-toy" else 1.001) * before.peak_bytes  # few tokens, small scores
