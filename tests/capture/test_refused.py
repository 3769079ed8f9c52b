"""Steps that cannot be captured: one line that names the module and the source line; the next capture works."""

from __future__ import annotations

import random
import threading
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from stepping import Of, check, mean_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from magis.api.models import resolve
from magis.capture.capture import capture
from magis.capture.workload import Workload, call_factory, workload
from magis.errors import CaptureError, MagisError, UsageError

X = torch.randn(4, 8)
HERE = "test_refused.py:"


class Block(nn.Module):
    """A model whose module "block" computes `function(linear(x))`."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block = Of(lambda m, x: function(m.f(x)), f=nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.block(x)


def refusal(model: nn.Module, loss: Any = mean_loss, batch: Any = X, kind: type[MagisError] = CaptureError) -> str:
    """The message with which the step is refused; checks that nothing is left behind."""
    before = dict(model.__dict__), [dict(vars(m)) for m in model.modules()], list(model.parameters())
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    with pytest.raises(kind) as caught:
        capture(workload((model, loss, batch)))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert type(caught.value) is kind
    after = dict(model.__dict__), [dict(vars(m)) for m in model.modules()], list(model.parameters())
    assert before[:2] == after[:2] and all(a is b for a, b in zip(before[2], after[2]))
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()] == hooks
    check(nn.Linear(8, 8), mean_loss, X)
    return message


def if_positive(y: Tensor) -> Tensor:
    if (y > 0).any():
        return y
    return -y


ASKING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y * y.sum().item(),
    "float": lambda y: y * float(y.sum()),
    "bool": if_positive,
    "mask as index": lambda y: y[y > 0],
    "nonzero": lambda y: y.flatten()[y.flatten().nonzero()],
    "unique": lambda y: y.unique(),
    "tolist": lambda y: y * sum(y[0].tolist()),
    "repeat_interleave": lambda y: y.repeat_interleave((y[:, 0] > 0).long(), 0),
}


@pytest.mark.parametrize("name", ASKING)
def test_asking_for_values(name: str) -> None:
    message = refusal(Block(ASKING[name]))
    assert message.startswith("block (tests/capture/test_refused.py:")
    assert "reads the value of a tensor" in message and "torch.where" in message


def test_numpy_in_forward() -> None:
    message = refusal(Block(lambda y: torch.from_numpy(y.detach().numpy() * 2)))
    assert message.startswith("block (tests/capture/test_refused.py:") and "NumPy" in message


def test_numpy_function_in_forward() -> None:
    message = refusal(Block(lambda y: y * float(np.abs(y.detach().cpu()).sum())))
    assert HERE in message


def test_wrong_shape() -> None:
    message = refusal(Block(lambda y: y @ torch.ones(3, 3)))
    assert message.startswith("block (tests/capture/test_refused.py:") and "RuntimeError" in message


def test_error_of_the_model() -> None:
    def broken(y: Tensor) -> Tensor:
        raise KeyError("no such head\nsecond line")

    message = refusal(Block(broken))
    assert message.startswith("block (tests/capture/test_refused.py:") and "KeyError" in message


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "not scalar": (lambda m, x: m(x), "shape (4, 8)"),
    "a float": (lambda m, x: 3.0, "a float"),
    "a tuple": (lambda m, x: (m(x).mean(), 1), "a tuple"),
    "nothing": (lambda m, x: None, "a NoneType"),
    "without gradient": (lambda m, x: m(x).mean().detach(), "does not depend on any parameter"),
    "integer": (lambda m, x: m(x).argmax(), "does not depend on any parameter"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name: str) -> None:
    loss, said = LOSSES[name]
    message = refusal(nn.Linear(8, 8), loss, kind=UsageError)
    assert said in message and "return" in message


def test_all_parameters_frozen() -> None:
    assert "unfreeze" in refusal(nn.Linear(8, 8).requires_grad_(False), kind=UsageError)


def test_lazy_module() -> None:
    message = refusal(nn.Sequential(nn.LazyLinear(4)))
    assert message.startswith("0.weight has no shape yet")


def test_sparse_parameter() -> None:
    model = Of(lambda m, x: x @ m.w.to_dense(), w=nn.Parameter(torch.eye(8).to_sparse()))
    assert message_names(refusal(model), "w is a torch.sparse_coo tensor")


def message_names(message: str, *parts: str) -> bool:
    return all(part in message for part in parts)


def test_sparse_gradient() -> None:
    message = refusal(nn.Embedding(10, 4, sparse=True), batch=torch.tensor([1, 2]))
    assert "sparse" in message


def test_reading_a_counter_each_step() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
    assert refusal(model, batch=torch.randn(2, 3, 6, 6)).startswith("1 (")


def test_batch_norm_inside_a_checkpoint() -> None:
    parts = {"f": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), "g": nn.Linear(8, 8)}
    model = Of(lambda m, x: checkpoint(m.f, m.g(x), use_reentrant=False), **parts)
    assert message_names(refusal(model), "f.1 (", "switch checkpointing off")


def test_trained_tensor_outside_the_model() -> None:
    w = torch.randn(8, requires_grad=True)
    assert "torch.nn.Parameter" in refusal(Of(lambda m, x: m.f(x) * w, f=nn.Linear(8, 8)))


def test_state_in_a_plain_attribute() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.hidden = torch.tanh(m.f(x) + m.hidden).detach()
        return m.f(x) * m.hidden

    model = Of(forward, f=nn.Linear(8, 8))
    vars(model)["hidden"] = torch.zeros(4, 8)
    assert message_names(refusal(model), "hidden", "register_buffer")


def test_plain_attribute_overwritten() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.cache[1:5] = x
        return m.f(m.cache.clone())

    model = Of(forward, f=nn.Linear(8, 8))
    vars(model)["cache"] = torch.zeros(6, 8)
    assert message_names(refusal(model), "register_buffer")


def test_replaced_parameter() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.w = nn.Parameter(m.w.detach() * 2)
        return x * m.w

    assert message_names(refusal(Of(forward, w=nn.Parameter(torch.ones(8)))), "w is replaced")


def test_replaced_buffer_of_another_shape() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.seen = torch.cat([m.seen, x.detach()])
        return m.f(x) + m.seen.mean()

    assert message_names(refusal(Of(forward, f=nn.Linear(8, 8), seen=torch.zeros(0, 8))), "seen", "another shape")


def test_batch_that_is_part_of_another_graph() -> None:
    x = torch.randn(4, 8, requires_grad=True) * 2
    assert "detach()" in refusal(nn.Linear(8, 8), batch=x, kind=UsageError)


def test_overwritten_tensors_that_share_memory() -> None:
    whole = torch.randn(6, 8)

    def loss(m: Any, b: Any) -> Tensor:
        b[0].mul_(2)
        return m(b[1]).square().mean()

    message = refusal(nn.Linear(8, 8), loss, (whole[:4], whole[2:]))
    assert message_names(message, "share memory", "clone()")


def test_compiled_model() -> None:
    compiled = torch.compile(nn.Linear(8, 8), backend="eager")
    with pytest.raises(CaptureError, match=r"compiled by torch\.compile; hand in its _orig_mod"):
        capture(workload((compiled, mean_loss, X)))


def test_script_module() -> None:
    model = Of(lambda m, x: m.f(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model.f = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(CaptureError, match="f is a TorchScript module"):
        capture(workload((model, mean_loss, X)))


def test_own_generator() -> None:
    generator = torch.Generator()
    message = refusal(Block(lambda y: y + torch.randn(8, generator=generator)))
    assert message_names(message, "Generator", "default generator")


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand()])
def test_other_random_numbers(draw: Callable[[], float]) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    message = refusal(Block(lambda y: y * draw()))
    assert message_names(message, "random numbers", "draw from torch")
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_gradient_hook() -> None:
    model = nn.Linear(8, 8)
    model.weight.register_hook(lambda g: g * 2)
    assert message_names(refusal(model), "weight has a gradient hook")


def test_hidden_checks() -> None:
    message = refusal(Block(lambda y: torch.linalg.inv(y[:, :4])))
    assert message_names(message, "block (", "inv_ex")


def test_generator_stays() -> None:
    """Capturing draws nothing, whatever the step and its optimizer draw."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    before = torch.get_rng_state()
    capture(workload((model, mean_loss, X, torch.optim.Adam(model.parameters()))))
    assert torch.equal(torch.get_rng_state(), before)


def test_inference_without_tensors() -> None:
    assert "no tensor" in refusal(Of(lambda m, x: 3), None, kind=UsageError)


class Opaque:
    """A batch that is an object like any other."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class OpaqueSlots:
    """Likewise, with slots."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


def tagged() -> Any:
    batch = UserDict({"x": X})
    batch.scale = torch.ones(8)  # type: ignore[attr-defined]
    return batch


class Locked(UserDict[str, Any]):
    """Cannot be copied."""

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.lock = threading.Lock()


HIDDEN: dict[str, tuple[Callable[[], Any], str]] = {
    "attribute": (lambda: Opaque(x=X, n=3), "Opaque"),
    "attribute of an attribute": (lambda: (X, {"rest": Opaque(inner=Opaque(xs=[3, (X,)]))}), "Opaque"),
    "slot": (lambda: [X, OpaqueSlots(X + 1)], "OpaqueSlots"),
    "beside the items": (tagged, "UserDict"),
    "in a set": (lambda: (X, {X + 1}), "set"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_tensors_hidden_in_the_batch(name: str) -> None:
    make, kind = HIDDEN[name]
    message = refusal(nn.Linear(8, 8), lambda m, b: m(X).mean(), make(), UsageError)
    assert message_names(message, f"inside a {kind} object", "dict, tuple or dataclass", "torch.utils._pytree")
    with pytest.raises(UsageError, match=f"inside a {kind} object"):
        capture(Workload(nn.Linear(8, 8), lambda m, b: m(X).mean(), make()))


def test_a_batch_that_cannot_be_copied() -> None:
    message = refusal(nn.Linear(8, 8), lambda m, b: m(b["x"]).mean(), Locked({"x": X}), UsageError)
    assert message_names(message, "Locked cannot be copied", "torch.utils._pytree")


def test_objects_without_tensors_may_stay_in_the_batch() -> None:
    check(nn.Linear(8, 8), lambda m, b: m(b[0]).mean() * b[1].factor, (X, Opaque(factor=2.0, torch=torch)))


FACTORIES: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (lambda: 1 / 0, "ZeroDivisionError"),
    "nothing": (lambda: None, "a NoneType"),
    "two items": (lambda: (nn.Linear(8, 8), X), "a tuple of 2 items"),
    "no model": (lambda: (mean_loss, mean_loss, X), "not a torch.nn.Module"),
    "no loss": (lambda: (nn.Linear(8, 8), 3, X), "loss_fn is an int"),
    "no batch": (lambda: (nn.Linear(8, 8), mean_loss, {"a": 3}), "no tensor"),
    "odd update": (lambda: (nn.Linear(8, 8), mean_loss, X, "adam"), "sgd-inplace"),
    "update of inference": (lambda: (nn.Linear(8, 8), None, X, "sgd-inplace"), "needs a loss_fn"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory(name: str) -> None:
    factory, said = FACTORIES[name]
    with pytest.raises(UsageError) as caught:
        call_factory(factory, "mine")
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_type_of_python_as_factory() -> None:
    for sizes, said in (({}, "the factory returned a dict; return (model, loss_fn, batch)"), ({"batch": 3}, "--batch")):
        with pytest.raises(UsageError) as caught:
            resolve("builtins:dict", sizes).build(fake=True)
        assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1
