"""Traces a workload's step on fake tensors: module path and source line of every node, errors that name both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from magis.capture import private
from magis.capture.metadata import corrected
from magis.capture.model_state import FakeState, PlainRandomNumbers, Rebinding, named_tensors
from magis.capture.sources import ModulePath, SourceLines, explain
from magis.capture.workload import Workload, flatten_batch, refuse_hidden_tensors
from magis.errors import CaptureError, MagisError, UsageError


@dataclass
class Trace:
    """A traced step: the joint graph, and what its placeholders and results are called."""

    name: str
    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    batch_names: list[str]
    output_names: list[str]
    output_structure: OutputStructure | None
    originals: dict[tuple[str, str], torch.Tensor]


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
                raise explain(error) from error


def _trace_once(workload: Workload) -> Trace:
    mode = private.KnownValuesMode(corrected)
    batch = _Batch(workload)
    path = ModulePath()
    casts = private.CastCache()
    numbers = PlainRandomNumbers()
    state = FakeState(workload.model, mode)
    checkpoints = private.Checkpoints()
    step = _Step(workload, batch, state, SourceLines(path, casts, checkpoints), casts)
    originals = named_tensors(workload.model) | {("batch", n): t for n, t in zip(batch.names, batch.tensors)}
    try:
        with (
            numbers,
            state,
            path.follow(workload.model),
            checkpoints.undone(),
            torch.set_grad_enabled(workload.loss_fn is not None),
        ):
            fakes = tuple(private.fake_like(mode, t).requires_grad_(t.requires_grad) for t in batch.tensors)
            module = private.joint_graph(step, fakes, casts)
            replaced, drawn = state.replaced(), numbers.drawn
    except MagisError:
        raise
    except private.DATA_DEPENDENT as error:
        error.magis_module = path.current  # type: ignore[attr-defined]
        raise
    except Exception as error:
        raise explain(error, path.current) from error
    constants = {node.target: getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"}
    _check_constants(workload, constants, replaced)
    if drawn:
        raise CaptureError(
            f"{workload.name}: the step draws from Python's or NumPy's random numbers, which would be the same in "
            "every step; draw from torch"
        )
    return Trace(
        workload.name, module.graph, constants, batch.names, step.output_names, step.output_structure, originals
    )


def _check_constants(workload: Workload, constants: dict[str, torch.Tensor], replaced: dict[str, torch.Tensor]) -> None:
    """Tensors outside parameters, buffers and batch may be read, but not trained or carried along."""
    for constant in constants.values():
        if not isinstance(constant, torch.Tensor):
            raise CaptureError(
                f"{workload.name}: the step uses a {type(constant).__name__} object; draw from the default generator "
                "and keep to tensors"
            )
        if constant.requires_grad and workload.loss_fn is not None:
            raise CaptureError(
                f"{workload.name}: a tensor of shape {tuple(constant.shape)} that requires a gradient is neither a "
                "parameter of the model nor in the batch; make it a torch.nn.Parameter of the model"
            )
        for name, before in replaced.items():
            if before is constant:
                raise CaptureError(f"{name} carries a tensor from step to step; make it a buffer (register_buffer)")


class _Batch:
    """A batch taken apart: its distinct tensors, their names, and how to put others in their places."""

    def __init__(self, workload: Workload) -> None:
        refuse_hidden_tensors(workload.batch, workload.name)
        self._leaves, self._structure, names = flatten_batch(workload.batch)
        self._place: dict[int, int] = {}  # of a leaf, among the distinct tensors
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        seen: dict[int, int] = {}
        for index, (leaf, name) in enumerate(zip(self._leaves, names)):
            if not isinstance(leaf, torch.Tensor):
                continue
            if not leaf.is_leaf and leaf.requires_grad:
                raise UsageError(f"{workload.name}: the batch's {name} is part of another graph; pass {name}.detach()")
            if id(leaf) not in seen:
                seen[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
                self.names.append(name)
            self._place[index] = seen[id(leaf)]

    def filled(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """A batch of the same structure with these tensors."""
        leaves = list(self._leaves)
        for index, place in self._place.items():
            leaves[index] = tensors[place]
        return pytree.tree_unflatten(leaves, self._structure)


@dataclass(frozen=True)
class OutputStructure:
    """What an inference call returns, with places where its tensors go; other leaves as they were when traced."""

    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    structure: Any

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The returned object with these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.structure)


class _Step(torch.nn.Module):
    """The step as a module of the batch's tensors; keeps names and structure of what it returns.

    Replaced buffers come back as further outputs, named "buffer:" and the buffer's name."""

    def __init__(
        self, workload: Workload, batch: _Batch, state: FakeState, lines: SourceLines, casts: private.CastCache
    ) -> None:
        super().__init__()
        self.model = workload.model
        self._workload, self._batch, self._state, self._lines, self._casts = workload, batch, state, lines, casts
        self.output_names: list[str] = []
        self.output_structure: OutputStructure | None = None

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._state.rewind()  # tracing runs the forward pass more than once
        torch.clear_autocast_cache()
        self._casts.start((*self.model.parameters(), *args))
        rebinding = Rebinding(self.model)
        with self._lines:
            result = self._workload.call(self._batch.filled(args))
        outputs = self._outputs(result) if self._workload.loss_fn is None else [self._checked_loss(result)]
        rebound = rebinding.collect()
        self.output_names += [f"buffer:{name}" for name in rebound]
        return (*outputs, *(tensor.detach().clone() for tensor in rebound.values()))

    def _outputs(self, result: Any) -> list[torch.Tensor]:
        outputs, structure, names = flatten_batch(result)
        places = tuple(i for i, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor))
        others = tuple(None if i in places else leaf for i, leaf in enumerate(outputs))
        self.output_structure = OutputStructure(others, places, structure)
        tensors = [(n, t) for n, t in zip(names, outputs) if isinstance(t, torch.Tensor)]
        if not tensors:
            raise UsageError(f"{self._workload.name}: the call returns no tensor, so there is nothing to compute")
        self.output_names = [f"output:{name}" for name, _ in tensors]
        return [tensor for _, tensor in tensors]

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
