"""One optimizer step on one parameter, run on a twin of the user's optimizer, so that it can be traced or tried."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from magis.capture import private
from magis.errors import CaptureError

# Eager's plain loop over parameters, whose numbers the other implementations share to a few units in the last place.
_PLAIN = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}


def check_steppable(optimizer: torch.optim.Optimizer) -> None:
    """Raises CaptureError for an optimizer whose step is more than a function of gradients and state."""
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        raise CaptureError(
            f"{name} runs the model again inside its step (closure): take it out of the workload's update"
        )
    if private.has_step_hooks(optimizer):
        raise CaptureError(f"{name} has step hooks, which cannot be captured: take it out of the workload's update")


@contextlib.contextmanager
def explained(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Turns what an optimizer's step raises while it is tried into a CaptureError of one line."""
    name, instead = type(optimizer).__name__, "take it out of the workload's update"
    try:
        yield
    except CaptureError:
        raise
    except private.DATA_DEPENDENT:
        raise CaptureError(f"{name} reads the values of tensors in its step: {instead}") from None
    except Exception as error:
        text = str(error).strip().splitlines() or ["no message"]
        if "on meta tensors" in text[0]:
            raise CaptureError(f"{name} reads the values of tensors in its step: {instead}") from None
        raise CaptureError(f"{name} cannot be captured ({type(error).__name__}: {text[0]}): {instead}") from error


def shadow_step(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps a twin that holds this parameter alone, with these options and this state.

    Returns the twin's options and state afterwards. `parameter` and the state's tensors are written in place."""
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update({k: v for k, v in vars(optimizer).items() if k != "step"})
    twin.defaults = {k: _PLAIN.get(k, v) for k, v in optimizer.defaults.items()}
    group = {**{k: _PLAIN.get(k, v) for k, v in options.items()}, "params": [parameter]}
    twin.param_groups = [group]
    twin.state = defaultdict(dict)
    if state:
        twin.state[parameter] = dict(state)
    parameter.grad = gradient
    step = type(optimizer).step
    with private.step_numbers_as_tensors(), _TensorFactors(), torch.no_grad():
        getattr(step, "__wrapped__", step)(twin)
    del group["params"]
    return {k: v for k, v in group.items() if k not in _PLAIN}, dict(twin.state.get(parameter, {}))


class _TensorFactors(TorchFunctionMode):  # type: ignore[misc]
    """Lets `value=` and `alpha=` be tensors: the factor is multiplied into the first operand beforehand."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for name in ("value", "alpha"):
            if isinstance(kwargs.get(name), torch.Tensor):
                args = (args[0], args[1] * kwargs.pop(name), *args[2:])
        return func(*args, **kwargs)


class _NoWrites(TorchDispatchMode):  # type: ignore[misc]
    """In-place operators do nothing: a state that a step creates and then updates is seen as created."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func._schema.is_mutable else func(*args, **(kwargs or {}))


def initial_layout(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], like: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The state that a first step creates for a parameter like this one, on the meta device, nothing allocated.

    (Counters are made on the CPU whatever the parameter's device.)"""
    return _created(optimizer, options, torch.empty_like(like, device="meta"))


def initial_values(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], like: torch.Tensor
) -> dict[str, float]:
    """What a first step fills each tensor of the state with, found on a small parameter of the same type.

    Raises CaptureError when a state is not filled with one number, or when a first step from such a state is
    not what PyTorch's own first step is (SGD with dampening)."""
    shape = [min(length, 4) for length in like.shape]
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.rand(shape, generator=generator).to(like.dtype) + 0.5 for _ in range(2))
    created = _created(optimizer, options, torch.zeros_like(start))
    name = type(optimizer).__name__
    for key, tensor in created.items():
        if tensor.numel() and bool((tensor != tensor.flatten()[0]).any()):
            raise CaptureError(f"{name}: its state {key!r} does not start as one number; run one step before capture")
    lazily, prepared = start.clone(), start.clone()
    state = {key: tensor.clone() for key, tensor in created.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, expected = shadow_step(optimizer, options, lazily, gradient.clone(), {})
        torch.manual_seed(0)
        _, reached = shadow_step(optimizer, options, prepared, gradient.clone(), state)
    pairs = [(lazily, prepared), *((expected[key], reached[key]) for key in created)]
    if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs):
        raise CaptureError(
            f"{name}: its first step differs from later ones (momentum with dampening?); run one step before capture"
        )
    return {key: float(tensor.flatten()[0]) if tensor.numel() else 0.0 for key, tensor in created.items()}


def _created(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    with _NoWrites():
        _, state = shadow_step(optimizer, options, parameter, torch.zeros_like(parameter), {})
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
