"""True eager PyTorch as the reference: the step as its user would write it at its best."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping

import torch

from magis.capture.workload import SGD_INPLACE, SGD_INPLACE_RATE, Workload, flatten_batch


class EagerStep:
    """Runs a workload's step in eager PyTorch: gradients start unset; an in-step update is applied to each
    parameter as soon as its gradient is accumulated, and the gradient is dropped at once."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __call__(self) -> torch.Tensor | object:
        """One step. Returns the loss, or what the inference call returns."""
        if self.workload.loss_fn is None:
            with torch.no_grad():
                return self.workload.call(self.workload.batch)
        self.clear_gradients()
        with self._updating():
            loss = self.workload.call(self.workload.batch)
            loss.backward()
        return loss.detach()

    def clear_gradients(self) -> None:
        """Forgets what the last step left in `.grad`."""
        for _, tensor in _leaves(self.workload):
            tensor.grad = None

    def results(self) -> dict[str, torch.Tensor]:
        """One step's results by name: loss, gradients (without an update), or the call's outputs."""
        returned = self()
        if self.workload.loss_fn is None:
            leaves, _, names = flatten_batch(returned)
            pairs = zip(names, leaves)
            return {f"output:{name}": leaf for name, leaf in pairs if isinstance(leaf, torch.Tensor)}
        assert isinstance(returned, torch.Tensor)
        found = {"loss": returned}
        for name, tensor in _leaves(self.workload):
            if tensor.grad is not None:
                found[f"grad:{name}"] = tensor.grad
        self.clear_gradients()
        return found

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        update = self.workload.update
        if update is None:
            yield
            return
        hooks = []
        for parameter in self.workload.model.parameters():
            if parameter.requires_grad:
                step = _sgd if update == SGD_INPLACE else _single(update, parameter)  # type: ignore[arg-type]
                if step is not None:
                    hooks.append(parameter.register_post_accumulate_grad_hook(step))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _sgd(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=SGD_INPLACE_RATE)  # type: ignore[arg-type]
    parameter.grad = None


def _single(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter):  # type: ignore[no-untyped-def]
    """The optimizer's step for one parameter, on the optimizer's own state; None when it does not have it."""
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None:
        return None
    single = copy.copy(optimizer)
    single.state = optimizer.state
    single.param_groups = [{**group, "params": [parameter], "foreach": False}]

    def step(_: torch.Tensor) -> None:
        single.step()
        parameter.grad = None

    return step


def _leaves(workload: Workload) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that may receive a gradient, by the name under which it is captured."""
    yield from workload.model.named_parameters()
    leaves, _, names = flatten_batch(workload.batch)
    for name, leaf in zip(names, leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            yield name, leaf


def written_tensors(workload: Workload, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a step may change, by name: parameters (a model may overwrite them itself), buffers, optimizer state,
    batch tensors."""
    found = {f"buffer:{name}": tensor for name, tensor in workload.model.named_buffers()}
    found |= {f"parameter:{name}": tensor for name, tensor in workload.model.named_parameters()}
    found |= {f"state:{name}": tensor for name, tensor in state.items()}
    leaves, _, names = flatten_batch(workload.batch)
    batch = zip(names, leaves)
    return found | {f"batch:{name}": leaf for name, leaf in batch if isinstance(leaf, torch.Tensor)}


class Snapshot:
    """Copies of what a step may change, to start the next step from the same place."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def restore(self) -> None:
        """Puts the saved values back in place."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(self._saved[name])

    def current(self) -> dict[str, torch.Tensor]:
        """Copies of the values as they are now."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
