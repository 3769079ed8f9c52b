"""Traces a workload's step on fake tensors: module path and source line of every node, errors that name both."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from magis.capture import private
from magis.capture.workload import Workload, flatten_batch
from magis.errors import CaptureError, MagisError, UsageError

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]


@dataclass
class Trace:
    """A traced step: the joint graph, and what its placeholders and results are called."""

    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    batch_names: list[str]
    output_names: list[str]
    output_structure: Any
    originals: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    fake_mode: Any = None


def trace(workload: Workload) -> Trace:
    """Traces the step without running it. Real tensors are not read, meta tensors need no memory.

    Raises CaptureError naming module and line; UsageError when the loss is not a scalar with a gradient."""
    try:
        return _trace_once(workload)
    except private.DATA_DEPENDENT:
        with private.claims_tracing():
            try:
                return _trace_once(workload)
            except private.DATA_DEPENDENT as error:
                raise _explain(error) from error


def _trace_once(workload: Workload) -> Trace:
    mode = private.KnownValuesMode()
    leaves, structure, names = flatten_batch(workload.batch)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    path = _ModulePath()
    step = _Step(workload, leaves, tensors, structure, path)
    originals = _named_tensors(workload.model) | {("batch", names[i]): leaves[i] for i in tensors}
    try:
        with _fake_state(workload.model, mode), path.follow(workload.model), _eager_settings(workload):
            fakes = tuple(_fake_leaf(mode, leaves[i]) for i in tensors)
            module = private.joint_graph(step, fakes)
    except MagisError:
        raise
    except private.DATA_DEPENDENT as error:
        error.magis_module = path.current  # type: ignore[attr-defined]
        raise
    except Exception as error:
        raise _explain(error, path.current) from error
    constants = {node.target: getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"}
    return Trace(
        module.graph,
        constants,
        [names[i] for i in tensors],
        step.output_names,
        step.output_structure,
        originals,
        mode,
    )


@contextlib.contextmanager
def _eager_settings(workload: Workload) -> Iterator[None]:
    with torch.set_grad_enabled(workload.loss_fn is not None):
        yield


def _named_tensors(model: torch.nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Every parameter and buffer under each of its names."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
            raise CaptureError(f"{name} has no shape yet: run the model once on a batch before optimizing it")
        found["parameter", name] = parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found["buffer", name] = buffer
    return found


def _fake_leaf(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    fake = private.fake_like(mode, tensor)
    return fake.requires_grad_(tensor.requires_grad) if tensor.is_leaf else fake


@contextlib.contextmanager
def _fake_state(model: torch.nn.Module, mode: Any) -> Iterator[None]:
    """Parameters and buffers replaced by fake ones, tied ones by the same one, and put back afterwards."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            made = private.fake_like(mode, tensor)
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = made
        return fakes[id(tensor)]

    saved = []
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in list(store.items()):
                if tensor is not None:
                    saved.append((store, name, tensor))
                    store[name] = fake(tensor)  # type: ignore[assignment]
    try:
        yield
    finally:
        for store, name, tensor in saved:
            store[name] = tensor  # type: ignore[assignment]


class _Step(torch.nn.Module):
    """The step as a module of the batch's tensors; keeps names and structure of what it returns."""

    def __init__(self, workload: Workload, leaves: list[Any], tensors: list[int], structure: Any, path: Any) -> None:
        super().__init__()
        self.model = workload.model
        self._workload, self._leaves, self._tensors, self._structure = workload, leaves, tensors, structure
        self._path = path
        self.output_names: list[str] = []
        self.output_structure: Any = None

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self._leaves)
        for index, tensor in zip(self._tensors, args):
            leaves[index] = tensor
        with _SourceLines(self._path):
            result = self._workload.call(pytree.tree_unflatten(leaves, self._structure))
        if self._workload.loss_fn is not None:
            return (self._checked_loss(result),)
        outputs, self.output_structure, names = flatten_batch(result)
        tensors = [(n, t) for n, t in zip(names, outputs) if isinstance(t, torch.Tensor)]
        if not tensors:
            raise UsageError(f"{self._workload.name}: the call returns no tensor, so there is nothing to compute")
        self.output_names = [f"output:{name}" for name, _ in tensors]
        return tuple(t for _, t in tensors)

    def _checked_loss(self, loss: Any) -> torch.Tensor:
        name = self._workload.name
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"{name}: loss_fn returned a {type(loss).__name__}; return the loss as a scalar tensor")
        if loss.numel() != 1:
            raise UsageError(
                f"{name}: loss_fn returned a tensor of shape {tuple(loss.shape)}; return a scalar, such as loss.mean()"
            )
        if not loss.requires_grad:
            raise UsageError(
                f"{name}: the loss does not depend on any parameter that requires a gradient; "
                "unfreeze a parameter, or return None as loss_fn for inference"
            )
        self.output_names = ["loss"]
        return loss


class _ModulePath:
    """The module whose forward is running, by name."""

    def __init__(self) -> None:
        self._stack: list[str] = []

    @property
    def current(self) -> str:
        """Name of the innermost running module; after an error, the one that failed."""
        return self._stack[-1] if self._stack else ""

    def _leave(self, _module: Any, _args: Any, _result: Any) -> None:
        self._stack.pop()

    @contextlib.contextmanager
    def follow(self, model: torch.nn.Module) -> Iterator[None]:
        """Keeps track while inside."""
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda _m, _a, n=name: self._stack.append(n)))  # type: ignore[misc]
            hooks.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _SourceLines(TorchFunctionMode):  # type: ignore[misc]
    """Annotates what each call of PyTorch traces with the running module and the caller's source line."""

    def __init__(self, path: _ModulePath) -> None:
        super().__init__()
        self._path = path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with private.annotate(module=self._path.current, line=_calling_line()):
            return func(*args, **(kwargs or {}))


def _calling_line() -> str:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        frame = frame.f_back  # type: ignore[assignment]
    return source_line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def source_line(filename: str, number: int | None) -> str:
    """`package/module.py:12`: the path below site-packages or the working directory."""
    place = Path(filename)
    if "site-packages" in place.parts:
        place = Path(*place.parts[place.parts.index("site-packages") + 1 :])
    elif place.is_absolute() and place.is_relative_to(Path.cwd()):
        place = place.relative_to(Path.cwd())
    elif place.is_absolute():
        place = Path(place.name)
    return f"{place}:{number}"


def _explain(error: BaseException, module: str = "") -> CaptureError:
    """The error in one line: where, what, and what to do instead."""
    where = getattr(error, "magis_module", module) or "the step"
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith((_TORCH, _HERE, _STDLIB))]
    line = source_line(outside[-1].filename, outside[-1].lineno) if outside else "no source line"
    if isinstance(error, private.DATA_DEPENDENT):
        reason = (
            "reads the value of a tensor that depends on the batch (.item(), bool(tensor), nonzero, a mask as index); "
            "such a step cannot be captured: compute it with tensor operations such as torch.where"
        )
    else:
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0] if text else 'no message'}"
    return CaptureError(f"{where} ({line}): {reason}")
