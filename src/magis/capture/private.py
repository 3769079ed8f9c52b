"""The private PyTorch interfaces that capture depends on, in one place; each has a self-test.

Checked on torch 2.11 to 2.14. What they are for: the joint graph of forward and backward with descriptors of
its inputs and outputs, annotations that survive into backward nodes, and fake tensors without storage.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim import optimizer as optimizer_module
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
ANNOTATION = "magis"


class KnownValuesMode(FakeTensorMode):  # type: ignore[misc]
    """Fake tensors that remember how they were made when they depend on no input at all.

    Models ask such tensors for their values (is this `arange` of positions packed?), and the answer is the
    same for every input, so it may be computed while capturing. Asking a tensor that depends on an input
    or a parameter still raises, because the answer would be baked into the program.

    `corrected(func, args, result)` may put a fake result right."""

    def __init__(self, corrected: Callable[[Any, Any, Any], Any] = lambda func, args, result: result) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._corrected = corrected

    def from_tensor(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """A fake of a real tensor: an input, whatever operators PyTorch makes it with (2.14 does so in the mode)."""
        fake = super().from_tensor(tensor, *args, **kwargs)
        fake.__dict__.pop(_RECIPE, None)
        return fake

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator on fake tensors; answers `.item()` of a tensor whose value is known."""
        kwargs = kwargs or {}
        if func is _ITEM and hasattr(args[0], _RECIPE):
            with _disable_current_modes(), torch.no_grad():
                return getattr(args[0], _RECIPE)().item()
        result = self._corrected(func, args, super().dispatch(func, types, args, kwargs))
        if func._schema.is_mutable:
            for overwritten in args:
                if isinstance(overwritten, FakeTensor):
                    overwritten.__dict__.pop(_RECIPE, None)
        elif isinstance(result, FakeTensor) and all(map(_is_known, (*args, *kwargs.values()))):
            random = torch.Tag.nondeterministic_seeded in func.tags
            if not random and result.numel() <= _LARGEST_KNOWN:
                setattr(result, _RECIPE, _recipe(func, args, kwargs))
        return result


_ITEM = torch.ops.aten._local_scalar_dense.default
_RECIPE = "_magis_recipe"
_LARGEST_KNOWN = 1 << 24


def _is_known(value: Any) -> bool:
    """Whether an argument depends on no input: a literal, a real tensor, or a fake one with a recipe."""
    if isinstance(value, FakeTensor):
        return _RECIPE in value.__dict__
    return all(map(_is_known, value)) if isinstance(value, (list, tuple)) else True


def _recipe(func: Any, args: Any, kwargs: Any) -> Callable[[], torch.Tensor]:
    """A thunk that computes the operator's result for real, on the CPU, the first time it is asked."""

    def bound(value: Any) -> Any:
        return _Known(getattr(value, _RECIPE)) if isinstance(value, FakeTensor) else value

    call = torch.utils._pytree.tree_map(bound, (args, dict(kwargs)))

    def value(item: Any) -> Any:
        if isinstance(item, _Known):
            return item.compute()
        return torch.device("cpu") if isinstance(item, torch.device) else item

    @cache
    def compute() -> torch.Tensor:
        real_args, real_kwargs = torch.utils._pytree.tree_map(value, call)
        return func(*real_args, **real_kwargs)  # type: ignore[no-any-return]

    return compute


@dataclass(frozen=True)
class _Known:
    """Stands in a recipe for a tensor with a recipe of its own."""

    compute: Callable[[], torch.Tensor]


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the mode: of a real one, or, of one on the meta device, as if it lay on the CPU."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.device.type == "meta":
        with torch.no_grad(), _disable_current_modes():
            return FakeTensor(mode, tensor.detach(), torch.device("cpu"))
    return mode.from_tensor(tensor)  # type: ignore[no-any-return]


@contextlib.contextmanager
def claims_tracing() -> Iterator[None]:
    """Makes model code that asks believe it is being compiled: it then takes branches that hold for every
    input instead of looking at values."""
    compiler = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


@contextlib.contextmanager
def eager_kernels() -> Iterator[None]:
    """Takes away Python decompositions that tracing prefers to the kernels that eager runs.

    They change numbers and memory: interpolation becomes indexing with computed positions, an idle dropout a copy,
    recurrent networks lose dropout between layers, some losses come out wrong."""
    saved = [(op, dict(op.py_kernels)) for op in _decomposed()]
    for op, _ in saved:
        for key in _COMPOSITE:
            op.py_kernels.pop(key, None)
            if op.name().startswith("aten::lstm") and torch.is_grad_enabled():
                op.py_kernels[key] = partial(_without_onednn, op)
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in saved:
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


@cache
def _decomposed() -> tuple[Any, ...]:
    """Every operator with a Python decomposition of its own, but those that tracing needs."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket) and name not in _KEPT_DECOMPOSITIONS:
            overloads = [getattr(packet, overload) for overload in packet.overloads()]
            found += [op for op in overloads if not op.py_kernels.keys().isdisjoint(_COMPOSITE)]
    return tuple(found)


def _without_onednn(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a composite operator without oneDNN, whose LSTM trains only while autograd runs."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    finally:
        torch._C._set_mkldnn_enabled(before)


class CastCache:
    """Lets autocast cast each weight once, as eager does, so that its gradients add up in half precision.

    Eager's own cache serves leaves only, and weights are no leaves while they are traced. The traced step says
    which tensors stand for leaves (`start`), and, around each call, whether autocast is on (`enabled`)."""

    def __init__(self) -> None:
        self.enabled = False
        self._leaves: dict[int, torch.Tensor] = {}
        self._casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def start(self, leaves: Iterable[torch.Tensor]) -> None:
        """A forward pass begins, in which these tensors are the leaves."""
        self._leaves = {id(tensor): tensor for tensor in leaves if tensor.requires_grad}
        self._casts.clear()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Serves casts from the cache while inside."""
        op, clear = torch.ops.aten.to.dtype, torch.clear_autocast_cache
        kernels = dict(op.py_kernels)
        op.py_kernels.update(dict.fromkeys(_COMPOSITE, self._cast))
        op._dispatch_cache.clear()

        def clear_both() -> None:
            self._casts.clear()
            clear()

        torch.clear_autocast_cache = clear_both
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
            self.start(())

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype, *args: Any, **kwargs: Any) -> torch.Tensor:
        key = id(tensor), dtype
        cached = self._is_cached(tensor, dtype)
        if cached and key in self._casts:
            return self._casts[key]
        op, dispatch_key = torch.ops.aten.to.dtype, torch._C.DispatchKey.CompositeImplicitAutograd
        result: torch.Tensor = op._op_dk(dispatch_key, tensor, dtype, *args, **kwargs)
        if cached:
            self._casts[key] = result
        return result

    def _is_cached(self, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether this is autocast's own cast (it hides its dispatch key meanwhile) of a leaf."""
        if not (self.enabled and id(tensor) in self._leaves and tensor.dtype == torch.float32):
            return False
        device = tensor.device.type
        own = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
        return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(own)) and dtype == torch.get_autocast_dtype(device)


class Checkpoints:
    """Runs checkpointed blocks as plain calls: what to recompute is decided later, and not in the model.

    The numbers stay the same: a recomputation repeats its random draws. `active` says that one is running."""

    def __init__(self) -> None:
        self.active = False

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Replaces both kinds of checkpoint while inside."""
        name = "_checkpoint_without_reentrant_generator"
        name += "_impl" if hasattr(checkpoint, f"{name}_impl") else ""  # since 2.14
        before = getattr(checkpoint, name), checkpoint.CheckpointFunction
        setattr(checkpoint, name, self._around)
        checkpoint.CheckpointFunction = SimpleNamespace(apply=self._reentrant)
        try:
            yield
        finally:
            setattr(checkpoint, name, before[0])
            checkpoint.CheckpointFunction = before[1]

    def _around(self, *_: Any, **__: Any) -> Iterator[None]:
        outer, self.active = self.active, True
        try:
            yield
        finally:
            self.active = outer

    def _reentrant(self, function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        """Without an input that requires a gradient, the reentrant kind gives none to its weights either."""
        wanted = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args) and torch.is_grad_enabled()
        block = self._around()
        next(block)
        try:
            with torch.set_grad_enabled(wanted):
                return function(*args)
        finally:
            next(block, None)


_COMPOSITE = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
# Batch normalisation would write its statistics in place; one_hot would look at its input.
_KEPT_DECOMPOSITIONS = ("native_batch_norm", "cudnn_batch_norm", "one_hot")


def annotate(**notes: str) -> contextlib.AbstractContextManager[Any]:
    """Annotates the nodes traced inside, and the backward nodes that derive from them."""
    return fx_traceback.annotate({ANNOTATION: notes})  # type: ignore[no-any-return]


def annotation(node: torch.fx.Node) -> dict[str, str]:
    """What `annotate` said of a node; empty when nothing."""
    return dict(node.meta.get("custom", {}).get(ANNOTATION, {}))


def joint_graph(module: torch.nn.Module, args: tuple[Any, ...], casts: CastCache) -> torch.fx.GraphModule:
    """The functional joint graph of forward and backward of a module that returns its outputs, the scalar
    loss among them; of the forward alone when no gradient is wanted."""
    with contextlib.ExitStack() as stack, eager_kernels(), casts.installed(), fx_traceback.preserve_node_meta():
        return aot_export_joint_with_descriptors(stack, module, args).graph_module  # type: ignore[no-any-return]


@contextlib.contextmanager
def step_numbers_as_tensors() -> Iterator[None]:
    """Optimizers take their step count as a double-precision tensor where they would ask for its value, so that
    one trace serves every step and bias corrections keep their digits. No profiler marks."""
    loaded: list[Any] = [module for name, module in list(sys.modules.items()) if name.startswith("torch.optim")]
    modules = [module for module in loaded if hasattr(module, "_get_value")]
    profiler: Any = torch.autograd.profiler
    before = [module._get_value for module in modules], profiler.record_function
    for module in modules:
        module._get_value = _as_number
    profiler.record_function = lambda _: contextlib.nullcontext()
    try:
        yield
    finally:
        for module, original in zip(modules, before[0]):
            module._get_value = original
        profiler.record_function = before[1]


def _as_number(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) else value


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether other code runs around each step of this optimizer."""
    general = optimizer_module._global_optimizer_pre_hooks or optimizer_module._global_optimizer_post_hooks
    return bool(general or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def input_role(node: torch.fx.Node) -> tuple[str, Any]:
    """What a placeholder stands for: ("parameter", name), ("buffer", name), ("batch", index), ("tangent", of what)."""
    desc = node.meta["desc"]
    match desc:
        case aot.ParamAOTInput():
            return "parameter", desc.target
        case aot.BufferAOTInput():
            return "buffer", desc.target
        case aot.PlainAOTInput():
            return "batch", desc.idx
        case aot.TangentAOTInput():
            return "tangent", "loss" if isinstance(desc.output, aot.PlainAOTOutput) else "mutation"
    return "unknown", type(desc).__name__


def output_roles(graph: torch.fx.Graph) -> list[tuple[Any, str, Any]]:
    """For each result: (node or None, role, of what). Roles: output, gradient, mutation, unknown."""
    output = next(iter(reversed(graph.nodes)))
    found = []
    for node, desc in zip(output.args[0], output.meta["desc"]):
        match desc:
            case aot.GradAOTOutput():
                found.append((node, "gradient", _target(desc.grad_of)))
            case aot.InputMutationAOTOutput():
                found.append((node, "mutation", _target(desc.mutated_input)))
            case aot.PlainAOTOutput():
                found.append((node, "output", desc.idx))
            case _:
                found.append((node, "unknown", type(desc).__name__))
    return found


def _target(desc: Any) -> Any:
    return desc.target if hasattr(desc, "target") else getattr(desc, "idx", None)
