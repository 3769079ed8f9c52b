"""The private PyTorch interfaces that capture depends on, in one place; each has a self-test.

Checked on torch 2.11 to 2.14. What they are for: the joint graph of forward and backward with descriptors of
its inputs and outputs, annotations that survive into backward nodes, and fake tensors without storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
ANNOTATION = "magis"


class KnownValuesMode(FakeTensorMode):  # type: ignore[misc]
    """Fake tensors that remember how they were made when they depend on no input at all.

    Models ask such tensors for their values (is this `arange` of positions packed?), and the answer is the
    same for every input, so it may be computed while capturing. Asking a tensor that depends on an input
    or a parameter still raises, because the answer would be baked into the program.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._recipes: Any = WeakTensorKeyDictionary()

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator on fake tensors; answers `.item()` of a tensor whose value is known."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0] in self._recipes:
            with _disable_current_modes(), torch.no_grad():
                return self._recipes[args[0]]().item()
        result = super().dispatch(func, types, args, kwargs)
        if isinstance(result, FakeTensor) and result.numel() <= _LARGEST_KNOWN:
            self._remember(func, args, kwargs, result)
        return result

    def _remember(self, func: Any, args: Any, kwargs: Any, result: FakeTensor) -> None:
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        schema = getattr(func, "_schema", None)
        deterministic = torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ())
        if schema is None or not deterministic:
            return
        if schema.is_mutable:
            for tensor in tensors:
                self._recipes.pop(tensor, None)
            return
        if all(tensor in self._recipes for tensor in tensors if isinstance(tensor, FakeTensor)):
            self._recipes[result] = _recipe(func, args, kwargs, self._recipes)


_LARGEST_KNOWN = 1 << 24


def _recipe(func: Any, args: Any, kwargs: Any, recipes: Any) -> Callable[[], torch.Tensor]:
    """A thunk that computes the operator's result for real, on the CPU, the first time it is asked."""

    def bound(value: Any) -> Any:
        return recipes[value] if isinstance(value, FakeTensor) else value

    call = torch.utils._pytree.tree_map(bound, (args, dict(kwargs)))
    memo: list[torch.Tensor] = []

    def value(item: Any) -> Any:
        if callable(item) and getattr(item, "is_recipe", False):
            return item()
        return torch.device("cpu") if isinstance(item, torch.device) else item

    def compute() -> torch.Tensor:
        if not memo:
            real_args, real_kwargs = torch.utils._pytree.tree_map(value, call)
            memo.append(func(*real_args, **real_kwargs))
        return memo[0]

    compute.is_recipe = True  # type: ignore[attr-defined]
    return compute


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

    Interpolation would be traced as indexing with computed positions, an idle dropout as a copy."""
    saved = []
    for name in (*_INTERPOLATIONS, "dropout", "hardshrink", "softshrink"):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            saved.append((op, dict(op.py_kernels)))
            for key in (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd):
                op.py_kernels.pop(key, None)
            op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in saved:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


_INTERPOLATIONS = tuple(
    f"{prefix}{kind}"
    for prefix, kinds in (
        (
            "upsample_",
            ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d"),
        ),
        ("_upsample_", ("nearest_exact1d", "nearest_exact2d", "nearest_exact3d", "bilinear2d_aa", "bicubic2d_aa")),
    )
    for kind in kinds
)


def annotate(**notes: str) -> contextlib.AbstractContextManager[Any]:
    """Annotates the nodes traced inside, and the backward nodes that derive from them."""
    return fx_traceback.annotate({ANNOTATION: notes})  # type: ignore[no-any-return]


def annotation(node: torch.fx.Node) -> dict[str, str]:
    """What `annotate` said of a node; empty when nothing."""
    return dict(node.meta.get("custom", {}).get(ANNOTATION, {}))


def joint_graph(module: torch.nn.Module, args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """The functional joint graph of forward and backward of a module that returns its outputs, the scalar
    loss among them; of the forward alone when no gradient is wanted."""
    with contextlib.ExitStack() as stack, eager_kernels(), fx_traceback.preserve_node_meta():
        return aot_export_joint_with_descriptors(stack, module, args).graph_module  # type: ignore[no-any-return]


def input_role(node: torch.fx.Node) -> tuple[str, Any]:
    """What a placeholder stands for: ("parameter", name), ("buffer", name), ("batch", index) or ("tangent", i)."""
    desc = node.meta["desc"]
    match desc:
        case aot.ParamAOTInput():
            return "parameter", desc.target
        case aot.BufferAOTInput():
            return "buffer", desc.target
        case aot.PlainAOTInput():
            return "batch", desc.idx
        case aot.TangentAOTInput():
            return "tangent", desc
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
