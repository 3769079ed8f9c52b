"""Convolutions of joined channels that are taken apart: which, and which not, and that all results stay."""

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
from torch.nn.functional import conv2d, conv_transpose2d

from builder import record
from magis.fission.tree import Cut, Fission, Program
from magis.rules.rewrite.pieces import ConvolutionInPieces

RULE = ConvolutionInPieces()
X, Y, Z, W = matrices((2, 3, 6, 5), (2, 1, 6, 5), (2, 2, 6, 5), (4, 4, 3, 3))
(BIAS,) = matrices((4,))
CONVOLUTIONS = {"convolution", "convolution_backward"}
Code = Callable[..., object]


def trained(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A convolution of two tensors that strides, pads and dilates, and all gradients."""
    given = [t.detach().requires_grad_() for t in (x, y, w, b)]
    z = conv2d(torch.cat((given[0].tanh(), given[1].sin()), 1), given[2], given[3], stride=2, padding=2, dilation=2)
    return z, *torch.autograd.grad(z.sin().sum(), given)


@pytest.mark.parametrize("needed", [(0, 1, 2, 3), (2,), (0, 2), (3, 1)])
def test_with_gradients(needed: tuple[int, ...]) -> None:
    def code(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [t.detach().requires_grad_(i in needed) for i, t in enumerate(inputs)]
        z = conv2d(torch.cat((given[0].tanh(), given[1].sin()), 1), given[2], given[3], padding=1)
        return z, *torch.autograd.grad(z.sin().sum(), [given[i] for i in needed])

    found = operators(rewritten(RULE, code, X, Y, W, BIAS, times=1))
    assert found.count("convolution") == found.count("convolution_backward") == 2
    assert found.count("cat") == (2 in needed)  # that of the weights' gradients


def test_stride_padding_and_dilation_stay() -> None:
    found = operators(rewritten(RULE, trained, X, Y, W, BIAS, times=1))
    assert found.count("convolution") == found.count("convolution_backward") == 2


def test_a_slice_that_is_handed_back_stays() -> None:
    """The caller gets a view of the whole gradient."""

    def code(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [t.detach().requires_grad_() for t in inputs]
        z = conv2d(torch.cat((given[0].tanh(), given[1]), 1), given[2])
        return z, *torch.autograd.grad(z.sin().sum(), given)

    rewritten(RULE, code, X, Y, W, times=0)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        (lambda x, y, w: conv2d(torch.cat((x, y), 1), w), 2),
        (lambda x, y, w: conv2d(torch.cat((x, y), -3), w), 2),
        (lambda x, y, w: conv2d(torch.cat((x[:, 1:], y, y), 1), w), 3),
        (lambda x, y, w: conv2d(torch.cat((torch.cat((x[:, 1:], y), 1), y), 1), w), 3),
        (lambda x, y, w: (lambda c: (conv2d(c, w), conv2d(c, w.tanh(), stride=2)))(torch.cat((x, y), 1)), 4),
        (lambda x, y, w: (lambda c: conv2d(c, w).sum() + c.sum())(torch.cat((x, y), 1)), 1),
        (lambda x, y, w: (lambda c: (conv2d(c, w), c))(torch.cat((x, y), 1)), 1),
        (lambda x, y, w: conv2d(torch.cat((x, y.expand(2, 3, 6, 5)), 2)[:, :2], w[:, :2]), 1),
        (lambda x, y, w: conv2d(torch.cat((x, x), 3), w[:, :3]), 1),
        (lambda x, y, w: conv2d(torch.cat((x, y), 1), w[:, :2], groups=2), 1),
        (lambda x, y, w: conv_transpose2d(torch.cat((x, y), 1), w), 1),
        (lambda x, y, w: conv2d(x, torch.cat((w[:, :1], w[:, :2]), 1)), 1),
    ],
)
def test_which_are_taken_apart(code: Code, count: int) -> None:
    assert operators(rewritten(RULE, code, X, Y, W)).count("convolution") == count


@pytest.mark.parametrize("wrong", [(0, 2), (1, 4), (0, 4)])
def test_a_gradient_that_is_read_otherwise_stays(wrong: tuple[int, int]) -> None:
    def code(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = torch.cat((x, y), 1)
        back = torch.ops.aten.convolution_backward(
            g, c, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        return conv2d(c, w), back[0][:, slice(*wrong)].tanh(), back[1]

    g = matrices((2, 4, 6, 5), seed=1)
    assert sites(RULE, record(code, [X, Y, W, *g]).graph) == []


def test_what_is_updated_stays() -> None:
    def code(p: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = conv2d(torch.cat((p, y), 1), w)
        p.add_(1)
        return z

    kinds = ["parameter", "batch", "batch"]
    assert sites(RULE, record(code, [X, Y, W], kinds).graph) == []


def test_half_precision_stays() -> None:
    """Each of the results would be rounded before they are added."""
    given = [t.bfloat16() for t in (X, Y, W)]
    assert sites(RULE, record(lambda x, y, w: conv2d(torch.cat((x, y), 1), w), given).graph) == []


def test_what_is_no_site_is_refused() -> None:
    graph = record(lambda x, y, w: conv2d(torch.cat((x, y), 1), w), [X, Y, W]).graph
    ((found,),) = sites(RULE, graph)
    for site in [(), (found, 99), (found + 1,), (0,), (-1,)]:
        assert once(RULE, graph, site) is None
    assert RULE.apply(Program(graph), (found,)) is None  # nobody says what new nodes give
    region = Fission(frozenset(graph.nodes), {n: Cut(0, 1, 2) for n in graph.nodes}, 2, 2)
    assert RULE.apply(Program(graph, (region,)), (found,)) is None


def test_those_that_save_time_come_first() -> None:
    def code(x: torch.Tensor, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        few = conv2d(torch.cat((x, x), 1), w.expand(4, 6, 3, 3), padding=1)
        one = conv2d(torch.cat((few, z), 1), w.expand(1, 6, 3, 3), padding=1)
        other = conv2d(torch.cat((z, few), 1), w[:, :, 1:, 1:].expand(2, 6, 2, 2))
        return one.sum() + other.sum()

    graph = record(code, [X, Z, W[:1, :1]]).graph
    found = sites(RULE, graph)
    assert [len(site) for site in found] == [2, 3, 1, 1, 1]
    assert set(found[1]) - set(found[0]) == {min(found[1])}  # four channels from six


@pytest.mark.parametrize("seed", range(20))
def test_random_networks_stay_the_same(seed: int) -> None:
    chosen = random.Random(seed)

    def code(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in given]
        values, (w,) = leaves[:-1], leaves[-1:]
        for _ in range(4):
            joined = torch.cat([values[-1], *chosen.choices(values, k=chosen.randint(1, 3))], 1)
            if chosen.random() < 0.3:
                joined = torch.cat((joined, chosen.choice(values)), 1)
            weights = w.expand(chosen.randint(1, 3), joined.shape[1], 3, 3)
            values.append(conv2d(joined, weights, padding=1).tanh())
            if chosen.random() < 0.2:
                values.append(joined.sin())
        return values[-1], *torch.autograd.grad(values[-1].sum(), leaves, allow_unused=True, materialize_grads=True)

    recorded = record(code, [X, Y, Z, W[:1, :1]])
    graph, times = everywhere(RULE, recorded.graph)
    assert_same(recorded, graph)
    if times:
        assert operators(graph).count("convolution") > operators(recorded.graph).count("convolution")


@pytest.mark.parametrize("name", ["unet-toy", "unetpp-toy", "monai-unet-toy", "monai-unetpp-toy"])
def test_models_get_smaller(name: str) -> None:
    made, captured = toy(name)
    graph, times = everywhere(RULE, captured.graph)
    assert times >= 1
    assert_same_model(made, captured, graph)
    left = [n for n in graph.nodes_in_order() if n.op == "aten.cat.default"]
    assert not any(graph.nodes[user].op in CONVOLUTIONS for n in left for user in graph.users[n.id])
    assert estimate(graph).peak_bytes < 0.97 * estimate(captured.graph).peak_bytes
