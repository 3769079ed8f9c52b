"""The running module stays right when modules fail and the model goes on; an error names the module that failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stepping import Of, mean_loss
from torch import Tensor, nn

from magis.capture import private
from magis.capture.capture import capture
from magis.capture.sources import ModulePath
from magis.capture.workload import workload
from magis.errors import CaptureError

X = torch.randn(4, 8)


def fails(m: Any, x: Tensor) -> Tensor:
    raise NotImplementedError("not on this machine")


def falls_back(m: Any, x: Tensor) -> Tensor:
    try:
        y = m.fast(x)
    except NotImplementedError:
        y = m.slow(x).sin()
    return y.cos()


def model() -> nn.Module:
    return Of(
        lambda m, x: m.block(x),
        block=Of(falls_back, fast=Of(lambda m, x: m.inner(x), inner=Of(fails)), slow=nn.Linear(8, 8)),
    )


@pytest.fixture(params=[False, True], ids=["eager", "claims_tracing"])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """As tracing does it at first, and when it makes models believe that they are compiled."""
    if request.param:
        with private.claims_tracing():
            yield
    else:
        yield


def test_operators_after_a_caught_error_belong_to_the_module_that_caught_it() -> None:
    graph = capture(workload((model(), mean_loss, X))).graph
    found = {node.op: node.origin.module for node in graph.nodes.values() if node.origin.direction == "forward"}
    assert found["aten.addmm.default"] == "block.slow"
    assert found["aten.sin.default"] == found["aten.cos.default"] == "block"
    assert found["aten.mean.default"] == ""


@pytest.mark.usefixtures("mode")
def test_nothing_is_left_running() -> None:
    path, net = ModulePath(), model()
    with path.follow(net):
        net(X)
        assert path.current == ""


def test_an_error_that_is_not_caught_names_the_innermost_module() -> None:
    with pytest.raises(CaptureError, match=r"^1\.inner \(.*not on this machine"):
        capture(workload((nn.Sequential(nn.Linear(8, 8), Of(lambda m, x: m.inner(x), inner=Of(fails))), mean_loss, X)))


def test_an_error_of_the_loss_names_no_module() -> None:
    def loss(m: Any, x: Tensor) -> Tensor:
        return m(x) @ torch.ones(3)

    with pytest.raises(CaptureError, match=r"^the step \("):
        capture(workload((model(), loss, X)))


def test_a_hook_of_the_users_that_fails() -> None:
    def refuse(_m: Any, _args: Any) -> None:
        raise ValueError("hooked")

    net = nn.Sequential(nn.Linear(8, 8))
    net[0].register_forward_pre_hook(refuse)
    with pytest.raises(CaptureError, match=r"^0 \(.*hooked"):
        capture(workload((net, mean_loss, X)))
