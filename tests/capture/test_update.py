"""Optimizers inside the step: two steps equal those of eager with an optimizer that steps behind each gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepping import Of, mean_loss
from torch import Tensor, nn

from magis.backend.meters import storage_peak
from magis.backend.runtime import CompiledStep, compile_routine
from magis.capture.capture import Captured, capture
from magis.capture.workload import Workload, workload
from magis.errors import CaptureError, UsageError
from magis.fission.tree import Program
from magis.lower.lower import lower
from magis.sim.timeline import timeline

Make = Callable[[nn.Module], torch.optim.Optimizer]
X = torch.randn(6, 8)


def perceptron() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Linear(4, 4))
    model[4].requires_grad_(False)
    model.append(Of(lambda m, x: x, unused=nn.Linear(2, 2)))
    return model


def step_of(captured: Captured) -> CompiledStep:
    return compile_routine(lower(Program(captured.graph), captured.schedule))


def eager_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], loss: Any) -> list[Tensor]:
    """The best a user can write by hand: one optimizer for each parameter, stepped behind its gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            single = object.__new__(type(optimizer))
            vars(single).update(vars(optimizer))
            single.param_groups = [{**group, "params": [parameter]}]

            def stepped(p: Tensor, single: Any = single) -> None:
                single.step()
                p.grad = None

            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(stepped)
    losses = []
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        losses.append(value.detach())
    return losses


def check_steps(
    build: Callable[[], nn.Module],
    make: Make,
    steps: int = 2,
    before: int = 0,
    rtol: float = 1e-6,
    atol: float = 1e-7,
    loss: Any = mean_loss,
) -> Captured:
    """Runs `before` eager steps, then captures and runs `steps`; model and optimizer must end as in eager."""
    batches = [X + i for i in range(before + steps)]
    theirs = build()
    reference = make(theirs)
    expected = eager_steps(theirs, reference, batches, loss)

    ours = build()
    optimizer = make(ours)
    for batch in batches[:before]:
        loss(ours, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    made = Workload(ours, loss, batches[before], optimizer)
    captured = capture(made)
    assert before or not any("exp_avg" in s or "momentum_buffer" in s for s in optimizer.state.values())
    step = step_of(captured)
    for batch, value in zip(batches[before:], expected[before:]):
        bound = Workload(ours, loss, batch, optimizer)
        with torch.no_grad():
            reached = step(captured.bind(bound))[0]
        torch.testing.assert_close(reached, value, rtol=rtol, atol=atol)
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(weight, other, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    assert_same_state(optimizer, reference, rtol, atol)

    def once() -> None:
        with torch.no_grad():
            step(captured.bind(bound))

    measured = storage_peak(once, captured.bind(bound))
    assert timeline(lower(Program(captured.graph), captured.schedule)).peak_bytes == measured.peak_bytes
    return captured


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, rtol: float, atol: float) -> None:
    """Both state dicts hold the same entries, `step` and all."""
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for index, entries in other["state"].items():
        assert mine["state"][index].keys() == entries.keys()
        for key, tensor in entries.items():
            found = mine["state"][index][key]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            if key == "step":
                assert found == tensor
            torch.testing.assert_close(found, tensor, rtol=rtol, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "sgd with weight decay": lambda m: SGD(m.parameters(), lr=0.1, weight_decay=0.1),
    "sgd with momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "sgd nesterov": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd maximize": lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9, maximize=True),
    "adam": lambda m: ADAM(m.parameters(), lr=0.01),
    "adam with weight decay": lambda m: ADAM(m.parameters(), lr=0.01, weight_decay=0.1, betas=(0.8, 0.95)),
    "adam amsgrad": lambda m: ADAM(m.parameters(), lr=0.01, amsgrad=True),
    "adam fused": lambda m: ADAM(m.parameters(), lr=0.01, fused=True),
    "adam foreach": lambda m: ADAM(m.parameters(), lr=0.01, foreach=True),
    "adamw": lambda m: ADAMW(m.parameters(), lr=0.01),
    "adamw amsgrad": lambda m: ADAMW(m.parameters(), lr=0.01, amsgrad=True, maximize=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, lr_decay=0.1, initial_accumulator_value=0.5),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.1),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "groups": lambda m: ADAMW(
        [
            {"params": m[0].parameters(), "lr": 0.1},
            {"params": [m[2].weight], "weight_decay": 0.0},
            {"params": [m[3].bias]},
        ],
        lr=0.01,
        weight_decay=0.1,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 1])
def test_two_steps(name: str, before: int) -> None:
    check_steps(perceptron, OPTIMIZERS[name], before=before)


@pytest.mark.parametrize("name", ["sgd", "sgd with momentum", "sgd nesterov", "adam", "adamw", "adam amsgrad"])
def test_bit_by_bit(name: str) -> None:
    check_steps(perceptron, OPTIMIZERS[name], steps=4, rtol=0.0, atol=0.0)


def tied() -> nn.Module:
    torch.manual_seed(1)
    model = Of(lambda m, x: m.back(torch.tanh(m.there(x))), there=nn.Linear(8, 8), back=nn.Linear(8, 8))
    model.back.weight = model.there.weight
    return model


def clamped() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.w.clamp_(-0.5, 0.5)
        return x @ m.w

    torch.manual_seed(1)
    return Of(forward, w=nn.Parameter(torch.randn(8, 8)))


def transposed() -> nn.Module:
    torch.manual_seed(1)
    return Of(lambda m, x: x @ m.w * m.s, w=nn.Parameter(torch.randn(8, 8).t()), s=nn.Parameter(torch.tensor(2.0)))


def batch_normalised() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))


@pytest.mark.parametrize("build", [tied, clamped, transposed, batch_normalised])
@pytest.mark.parametrize("name", ["sgd with momentum", "adam amsgrad", "adamw"])
def test_unusual_weights(build: Callable[[], nn.Module], name: str) -> None:
    check_steps(build, OPTIMIZERS[name])


def test_half_precision() -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).bfloat16()

    check_steps(build, OPTIMIZERS["adamw"], loss=lambda m, x: m(x.bfloat16()).float().square().mean(), atol=1e-2)


def test_long_run_keeps_the_count() -> None:
    check_steps(perceptron, OPTIMIZERS["adam"], steps=30, atol=1e-6)


def test_update_follows_its_gradient() -> None:
    """Each gradient dies before the next weight's exists, and nothing of two updates overlaps."""
    model = perceptron()
    captured = capture(Workload(model, mean_loss, X, ADAM(model.parameters())))
    updates = [node.origin.module for node in captured.graph.nodes.values() if node.origin.direction == "update"]
    changes = [after for before, after in zip(["", *updates], updates) if before != after]
    assert len(changes) == len(set(changes)) == 6
    assert captured.graph.output_names == ("loss",)
    last_backward = max(n.id for n in captured.graph.nodes.values() if n.origin.direction == "backward")
    first_update = min(n.id for n in captured.graph.nodes.values() if n.origin.direction == "update")
    assert first_update < last_backward


def test_parameters_that_the_optimizer_does_not_hold() -> None:
    model = perceptron()
    captured = capture(Workload(model, mean_loss, X, ADAM(model[3].parameters())))
    assert set(captured.graph.output_names) == {
        "loss",
        "grad:0.weight",
        "grad:0.bias",
        "grad:2.weight",
        "grad:2.bias",
    }


def test_gradient_of_the_batch_stays() -> None:
    model = perceptron()
    captured = capture(Workload(model, mean_loss, X.clone().requires_grad_(), "sgd-inplace"))
    assert captured.graph.output_names == ("loss", "grad:batch")


def test_state_is_resident() -> None:
    model = perceptron()
    captured = capture(Workload(model, mean_loss, X, ADAM(model.parameters())))
    state = [node for node in captured.graph.inputs if node.kind == "state"]
    assert {node.name.split(":")[0] for node in state} == {
        "optimizer.step",
        "optimizer.exp_avg",
        "optimizer.exp_avg_sq",
    }
    assert "optimizer.exp_avg:0.weight" in {node.name for node in state} and len(state) == 18
    assert all(any(node.id in n.inputs[0:1] or n.writes for n in captured.graph.nodes.values()) for node in state)


def test_rate_as_a_tensor() -> None:
    """An option that is a tensor is read in each step, so that a schedule needs no second capture."""
    model = perceptron()
    rate = torch.tensor(0.1)
    optimizer = ADAM(model.parameters(), lr=rate)
    made = Workload(model, mean_loss, X, optimizer)
    captured = capture(made)
    assert "optimizer.lr:0" in {node.name for node in captured.graph.inputs}
    theirs = perceptron()
    theirs_rate = torch.tensor(0.1)
    other = ADAM(theirs.parameters(), lr=theirs_rate)
    step = step_of(captured)
    for factor in (1.0, 0.1):
        rate.fill_(0.1 * factor)
        theirs_rate.fill_(0.1 * factor)
        with torch.no_grad():
            step(captured.bind(made))
        mean_loss(theirs, X).backward()
        other.step()
        other.zero_grad()
    for ours, weight in zip(model.parameters(), theirs.parameters()):
        torch.testing.assert_close(ours, weight, rtol=1e-5, atol=1e-6)


def test_changed_option() -> None:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    made = Workload(model, mean_loss, X, optimizer)
    captured = capture(made)
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(UsageError, match=r"lr of group 0 changed from 0.1 to 0.05 .*lr=torch.tensor"):
        captured.bind(made)


def test_nothing_is_allocated_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 1 << 20), nn.Linear(1 << 20, 8))
        batch = torch.empty(4, 8)
    optimizer = ADAMW(model.parameters(), amsgrad=True)
    captured = capture(Workload(model, mean_loss, batch, optimizer))
    resident = sum(node.outputs[0].storage_bytes for node in captured.graph.inputs if node.outputs[0])
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert 4 * weights < resident < 4 * weights + 1000
    assert all(spec.device == "cpu" for node in captured.graph.nodes.values() for spec in node.outputs if spec)


class Halving(torch.optim.Optimizer):
    """An optimizer of the user's own: replaces its state, and writes over a temporary."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("mean", torch.zeros_like(p))
                state["mean"] = (state["mean"] + p.grad) / 2
                change = state["mean"] * group["lr"]
                change.sub_(p.grad.sign().mul_(0.001))
                p.sub_(change)


def test_optimizer_of_the_users_own() -> None:
    check_steps(perceptron, lambda m: Halving(m.parameters()))


class Counting(Halving):
    """Keeps a Python number that changes with every step."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


class Peeking(Halving):
    """Looks at a gradient's value."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.norm() > 1:
                    p.sub_(p.grad)


class Noisy(Halving):
    """Draws random numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad + torch.randn_like(p))


REFUSED: dict[str, tuple[Make, type[Exception], str]] = {
    "lbfgs": (lambda m: torch.optim.LBFGS(m.parameters()), CaptureError, "closure"),
    "dampening": (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5), CaptureError, "run one step"),
    "radam": (lambda m: torch.optim.RAdam(m.parameters()), CaptureError, "RAdam reads the values"),
    "sparse": (lambda m: torch.optim.SparseAdam(m.parameters()), CaptureError, "dense gradients"),
    "counting": (lambda m: Counting(m.parameters()), CaptureError, "'count'"),
    "peeking": (lambda m: Peeking(m.parameters()), CaptureError, "Peeking reads the values"),
    "noisy": (lambda m: Noisy(m.parameters()), CaptureError, "random numbers"),
    "another model": (lambda m: SGD(nn.Linear(2, 2).parameters(), lr=0.1), UsageError, "model.parameters()"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, kind, said = REFUSED[name]
    model = perceptron()
    with pytest.raises(kind) as caught:
        capture(Workload(model, mean_loss, X, make(model)))
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_step_hooks_are_refused() -> None:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="step hooks"):
        capture(Workload(model, mean_loss, X, optimizer))


def test_dampening_after_a_first_step() -> None:
    check_steps(perceptron, lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5), before=1)


def test_scheduler_leaves_no_trace() -> None:
    """Schedulers wrap the optimizer's step and note options down; neither matters."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = ADAM(model.parameters(), lr=0.01)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return optimizer

    model = perceptron()
    made = workload((model, mean_loss, X, make(model)))
    captured = capture(made)
    with torch.no_grad():
        step_of(captured)(captured.bind(made))
