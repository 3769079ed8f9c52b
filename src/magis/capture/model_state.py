"""A model's tensors replaced by fake ones while it is traced, and everything put back afterwards."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from magis.capture import private
from magis.errors import CaptureError


class PlainRandomNumbers:
    """Python's and NumPy's random generators, put back afterwards. `drawn` says whether anything was drawn."""

    def __enter__(self) -> PlainRandomNumbers:
        self._before = random.getstate(), np.random.get_state()
        return self

    def __exit__(self, *_: object) -> None:
        random.setstate(self._before[0])
        np.random.set_state(self._before[1])

    @property
    def drawn(self) -> bool:
        """Whether either generator moved."""
        python, numpy = self._before
        return random.getstate() != python or repr(np.random.get_state()) != repr(numpy)


_OWN = frozenset(vars(torch.nn.Module()))  # attributes that every module has


def named_tensors(model: torch.nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Every parameter and buffer under each of its names. Raises CaptureError for one that has no shape yet."""
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules:
            raise CaptureError(f"{name or 'the model'} is compiled by torch.compile; hand in its _orig_mod instead")
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'} is a TorchScript module; hand in the module that it was made from"
            )
    found: dict[tuple[str, str], torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found["parameter", name] = parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found["buffer", name] = buffer
    for (_, name), tensor in found.items():
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise CaptureError(f"{name} has no shape yet: run the model once on a batch before optimizing it")
        if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"{name} has a gradient hook, which cannot be captured; remove it before")
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CaptureError(f"{name} is a {kind} tensor; only dense tensors can be captured")
    return found


class FakeState:
    """Parameters and buffers replaced by fake ones while inside, tied ones by the same one.

    Afterwards they, and whatever else the modules' attributes and hooks were, are put back: a forward pass that keeps
    activations, counts its calls or hooks its own modules at first leaves no trace."""

    def __init__(self, model: torch.nn.Module, mode: Any) -> None:
        self._mode = mode
        self._names = {module: name for name, module in model.named_modules()}
        self._tensors = [(store, dict(store)) for m in self._names for store in (m._parameters, m._buffers)]
        self._attributes = [(module, _attributes(module)) for module in self._names]
        self._hooks = _hooks(self._names)
        self._hooks_of_call: list[tuple[Any, Any]] = []  # with those that the tracer adds once inside
        self._fakes: dict[int, torch.Tensor] = {}

    def __enter__(self) -> FakeState:
        for store, saved in self._tensors:
            store.update({name: self._fake(tensor) for name, tensor in saved.items() if tensor is not None})
        return self

    def __exit__(self, *_: object) -> None:
        for store, saved in (*self._tensors, *self._hooks):
            _refill(store, saved)
        self._put_attributes_back()

    def rewind(self) -> None:
        """Puts all attributes but parameters and buffers back to what they were, and hooks to what they were when this
        was called first."""
        self._hooks_of_call = self._hooks_of_call or _hooks(self._names)
        for store, saved in self._hooks_of_call:
            _refill(store, saved)
        self._put_attributes_back()

    def _put_attributes_back(self) -> None:
        for module, before in self._attributes:
            _put_back(module, before)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._fakes:
            made = private.fake_like(self._mode, tensor)
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._fakes[id(tensor)] = made
        return self._fakes[id(tensor)]

    def replaced(self) -> dict[str, torch.Tensor]:
        """Tensors that were plain attributes of modules before, and no longer are, by name."""
        return {
            f"{self._names[module]}.{name}".lstrip("."): value
            for module, before in self._attributes
            for name, (value, _) in before.items()
            if isinstance(value, torch.Tensor) and vars(module).get(name) is not value
        }


def _hooks(modules: Iterable[torch.nn.Module]) -> list[tuple[Any, Any]]:
    """The modules' tables of hooks around calls, each with a copy."""
    tables = [value for m in modules for name, value in vars(m).items() if name in _OWN and "_hooks" in name]
    return [(table, copy.copy(table)) for table in tables if isinstance(table, dict)]


def _attributes(module: torch.nn.Module) -> dict[str, tuple[Any, Any]]:
    """The module's own attributes: each with a copy of its contents when it is a container."""
    return {name: (value, _contents(value)) for name, value in vars(module).items() if name not in _OWN}


def _contents(value: Any) -> Any:
    return copy.copy(value) if type(value) in (list, dict, set, deque) else None


def _put_back(module: torch.nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    attributes = vars(module)
    for name in [name for name in attributes if name not in _OWN and name not in before]:
        del attributes[name]
    for name, (value, contents) in before.items():
        attributes[name] = value
        if contents is not None:
            _refill(value, contents)


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(contents)
    else:
        container.extend(contents)


class Rebinding:
    """Which buffers a forward pass replaced by new tensors (`self.mean = ...`) instead of writing into them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = list(_bindings(model))

    def collect(self) -> dict[str, torch.Tensor]:
        """The new tensors by buffer name; the old ones are bound again.

        Raises CaptureError for a replaced parameter, and for a buffer replaced by one of another kind."""
        found = {}
        for store, kind, leaf, name, old in self._before:
            new = store.get(leaf)
            if new is old:
                continue
            if kind == "parameter":
                raise CaptureError(
                    f"{name} is replaced by another parameter in the forward pass; write into it instead"
                )
            if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                raise CaptureError(f"{name} is replaced in the forward pass by a tensor of another shape or type")
            store[leaf] = old
            found[name] = new
        return found


def _bindings(model: torch.nn.Module) -> Iterator[tuple[Any, str, str, str, torch.Tensor]]:
    seen = set()
    for prefix, module in model.named_modules():
        for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
            for leaf, tensor in store.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield store, kind, leaf, f"{prefix}.{leaf}".lstrip("."), tensor
