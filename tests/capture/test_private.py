"""Self-tests of the private PyTorch interfaces: after an upgrade of PyTorch, look here first."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from magis.capture import private

BROKEN = f"PyTorch {torch.__version__} changed what magis relies on: private."


def placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def operators(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


class Net(nn.Module):
    """Returns a loss; has a parameter, a buffer that it updates, and dropout."""

    def __init__(self, forward: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.function = forward

    def forward(self, x: Tensor) -> tuple[Tensor]:
        if self.function is not None:
            return (self.function(self, x),)
        with private.annotate(module="linear", line="here:1"):
            y = self.linear(x)
        self.mean.add_(y.detach().mean(0))
        return (F.dropout(y, 0.5).sum(),)


def joint(forward: Any = None, batch: Tensor | None = None, casts: private.CastCache | None = None) -> torch.fx.Graph:
    batch = torch.randn(2, 3) if batch is None else batch
    return private.joint_graph(Net(forward), (batch,), casts or private.CastCache()).graph


def test_every_interface_has_a_self_test() -> None:
    public = [
        name
        for name, item in vars(private).items()
        if not name.startswith("_") and getattr(item, "__module__", "") == private.__name__
    ]
    source = inspect.getsource(inspect.getmodule(test_every_interface_has_a_self_test))  # type: ignore[arg-type]
    assert [name for name in public if f"private.{name}" not in source] == []


def test_joint_graph() -> None:
    names = operators(joint())
    missing = {"aten.addmm.default", "aten.bernoulli.p", "aten.mm.default"} - set(names)
    assert not missing, f"{BROKEN}joint_graph: no {missing} in {names}"
    assert len([n for n in names if n.endswith("_.default") and n != "aten.copy_.default"]) == 0, names


def test_joint_graph_of_inference() -> None:
    with torch.no_grad():
        graph = joint(lambda m, x: m.linear(x))
    assert all(private.input_role(node)[0] != "tangent" for node in placeholders(graph)), f"{BROKEN}joint_graph"


def test_input_role() -> None:
    roles = [private.input_role(node) for node in placeholders(joint())]
    expected = [
        ("parameter", "linear.weight"),
        ("parameter", "linear.bias"),
        ("buffer", "mean"),
        ("batch", 0),
        ("tangent", "loss"),
    ]
    assert roles == expected, f"{BROKEN}input_role: {roles}"


def test_output_roles() -> None:
    roles = {(role, what) for node, role, what in private.output_roles(joint()) if node is not None}
    expected = {("output", 0), ("gradient", "linear.weight"), ("gradient", "linear.bias")}
    assert expected <= roles, f"{BROKEN}output_roles: {roles}"
    writes = [name for name in operators(joint()) if name == "aten.copy_.default"]
    assert writes or ("mutation", "mean") in roles, f"{BROKEN}output_roles: no write into the buffer"


def test_annotate_and_annotation() -> None:
    nodes = [n for n in joint().nodes if str(n.target) in ("aten.addmm.default", "aten.mm.default")]
    notes = [private.annotation(node) for node in nodes]
    assert notes == [{"module": "linear", "line": "here:1"}] * len(nodes), f"{BROKEN}annotate, annotation: {notes}"
    directions = {n.meta.get("partitioner_tag") for n in joint().nodes}
    assert "is_backward" in directions, f"{BROKEN}annotate: no node is tagged as backward"


@pytest.mark.parametrize("claimed", [False, True])
def test_claims_tracing(claimed: bool) -> None:
    assert not torch.compiler.is_compiling()
    if claimed:
        with private.claims_tracing():
            assert torch.compiler.is_compiling() and torch.compiler.is_exporting(), f"{BROKEN}claims_tracing"
    assert not torch.compiler.is_compiling(), f"{BROKEN}claims_tracing: not undone"


def test_eager_kernels() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.interpolate(m.linear(x)[None, None], scale_factor=2.0).sum() + F.dropout(x, 0.5, False).sum()

    names = operators(joint(forward))
    assert "aten.upsample_nearest2d.default" in names, f"{BROKEN}eager_kernels: interpolation is {names}"
    assert "aten.clone.default" not in names, f"{BROKEN}eager_kernels: an idle dropout is a copy"
    before = [dict(op.py_kernels) for op in (torch.ops.aten.dropout.default, torch.ops.aten.lstm.input)]
    with private.eager_kernels():
        pass
    after = [dict(op.py_kernels) for op in (torch.ops.aten.dropout.default, torch.ops.aten.lstm.input)]
    assert before == after, f"{BROKEN}eager_kernels: not undone"


def test_eager_kernels_of_recurrent_networks() -> None:
    net = nn.LSTM(3, 3, 2, dropout=0.5)
    casts = private.CastCache()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (self.net(x)[0].sum(),)

    names = operators(private.joint_graph(Loss(), (torch.randn(4, 2, 3),), casts).graph)
    assert "aten.bernoulli.p" in names, f"{BROKEN}eager_kernels: dropout between layers is lost"
    assert not any("mkldnn" in name for name in names), f"{BROKEN}eager_kernels: LSTM by oneDNN, which cannot train"


@pytest.mark.parametrize("enabled", [True, False])
def test_cast_cache(enabled: bool) -> None:
    casts = private.CastCache()

    def forward(m: Any, x: Tensor) -> Tensor:
        casts.start(m.parameters())
        casts.enabled = enabled
        with torch.autocast("cpu", torch.bfloat16):
            return m.linear(m.linear(x)).float().sum()

    graph = joint(forward, casts=casts)
    weight = placeholders(graph)[0]
    count = sum(str(user.target) == "aten._to_copy.default" for user in weight.users)
    assert count == (1 if enabled else 2), f"{BROKEN}CastCache: the weight is cast {count} times"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    checkpoints = private.Checkpoints()
    seen = []

    def block(m: Any, x: Tensor) -> Tensor:
        seen.append(checkpoints.active)
        return torch.sin(m.linear(x))

    def forward(m: Any, x: Tensor) -> Tensor:
        return checkpoint(block, m, x, use_reentrant=reentrant).sum()

    with checkpoints.undone():
        names = operators(joint(forward, torch.randn(2, 3, requires_grad=True)))
    assert seen and all(seen) and not checkpoints.active, f"{BROKEN}Checkpoints"
    assert names.count("aten.sin.default") == 1, f"{BROKEN}Checkpoints: the block is recomputed"
    model, x = Net(forward), torch.randn(2, 3, requires_grad=True)
    seen.clear()
    model(x)[0].backward()
    assert len(seen) == 2, f"{BROKEN}Checkpoints: not undone"


def test_known_values_mode() -> None:
    mode = private.KnownValuesMode()
    with mode:
        positions = torch.arange(6).view(2, 3) + 1
        assert (positions > 0).all().item() is True, f"{BROKEN}KnownValuesMode"
        unknown = mode.from_tensor(torch.ones(2, 3, dtype=torch.int64))
        with pytest.raises(private.DATA_DEPENDENT):
            (positions > unknown).all().item()
        with pytest.raises(private.DATA_DEPENDENT):
            positions.add_(unknown).sum().item()
        with pytest.raises(private.DATA_DEPENDENT):
            torch.rand(3).sum().item()
        with pytest.raises(private.DATA_DEPENDENT):
            unknown.nonzero()


def test_known_values_mode_corrects() -> None:
    seen = []

    def corrected(func: Any, args: Any, result: Any) -> Any:
        seen.append(str(func))
        return result.double() if func is torch.ops.aten.sin.default else result

    with private.KnownValuesMode(corrected):
        assert torch.ones(2).sin().dtype == torch.float64, f"{BROKEN}KnownValuesMode: correction is not used"
    assert "aten.sin.default" in seen


def test_fake_like() -> None:
    mode = private.KnownValuesMode()
    real, meta = torch.randn(2, 3).t(), torch.empty(3, 2, device="meta")
    for tensor in (real, meta):
        fake = private.fake_like(mode, tensor)
        assert (fake.shape, fake.stride()) == (tensor.shape, tensor.stride()), f"{BROKEN}fake_like"
        assert fake.device.type == "cpu" and private.fake_like(mode, fake) is fake, f"{BROKEN}fake_like"


def test_step_numbers_as_tensors() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], foreach=False)
    weight.grad = torch.ones(2)
    calls = []
    adam: Any = importlib.import_module("torch.optim.adam")
    original = adam._get_value
    with private.step_numbers_as_tensors():
        number = adam._get_value(torch.tensor(3.0))
        calls.append(number.dtype if isinstance(number, Tensor) else None)
    assert calls == [torch.float64], f"{BROKEN}step_numbers_as_tensors"
    assert adam._get_value is original, f"{BROKEN}step_numbers_as_tensors: not undone"
    optimizer.step()


def test_has_step_hooks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not private.has_step_hooks(optimizer), f"{BROKEN}has_step_hooks"
    optimizer.register_step_post_hook(lambda *_: None)
    assert private.has_step_hooks(optimizer), f"{BROKEN}has_step_hooks"
