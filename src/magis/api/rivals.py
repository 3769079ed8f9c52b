"""What a PyTorch user would otherwise do by hand to save memory: checkpoint every block, or cut the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils.checkpoint import checkpoint

from magis.api.eager import EagerStep
from magis.api.prove import result_scales
from magis.aten.convert import core_dtype
from magis.capture.capture import Captured, capture
from magis.capture.workload import Workload, flatten_batch
from magis.errors import MismatchError, UsageError

CHECKPOINT = "checkpoint"
MICRO = "micro:"

Results = Mapping[str, torch.Tensor]


def micro_batches(method: str) -> int | None:
    """The K of `micro:K`, None for `checkpoint`. Raises UsageError for anything else."""
    if method == CHECKPOINT:
        return None
    parts = method.removeprefix(MICRO)
    if method.startswith(MICRO) and parts.isascii() and parts.isdigit() and int(parts) > 0:
        return int(parts)
    raise UsageError(
        f"--beside {method}: pass {CHECKPOINT}, or {MICRO}K with K from 1 to the batch size, such as {MICRO}4"
    )


def check_methods(methods: Sequence[str], batch: int) -> tuple[str, ...]:
    """The methods in one spelling, each once. Raises UsageError for what is none, or cannot be done at this batch."""
    found: dict[str, None] = {}
    for method in methods:
        parts = micro_batches(method)
        if parts is not None and parts > batch:
            raise UsageError(f"--beside {method}: the batch has {batch} examples, pass a K from 1 to {batch}")
        found[CHECKPOINT if parts is None else f"{MICRO}{parts}"] = None
    return tuple(found)


def rival_step(method: str, workload: Workload) -> EagerStep:
    """The workload's step, done by that method."""
    parts = micro_batches(method)
    return CheckpointStep(workload) if parts is None else MicroBatchStep(workload, parts)


class CheckpointStep(EagerStep):
    """Eager's step with every block under `torch.utils.checkpoint`."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.blocks = blocks(workload.model)
        if not self.blocks:
            raise UsageError("the model has no submodule with parameters that could be checkpointed")

    def __call__(self) -> torch.Tensor | object:
        """One step. Returns the loss, or what the inference call returns."""
        with _checkpointed(self.blocks):
            return super().__call__()


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The children of the outermost repeated lists, each once; without such a list the model's children with
    parameters."""
    repeated = list(_in_repeated_lists(model))
    if not repeated:
        repeated = [child for child in model.children() if next(child.parameters(), None) is not None]
    return list(dict.fromkeys(repeated))


def _in_repeated_lists(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if not _is_repeated(module):
        for child in module.children():
            yield from _in_repeated_lists(child)
        return
    for child in module:  # type: ignore[attr-defined]
        yield from _called(child)


def _is_repeated(module: torch.nn.Module) -> bool:
    if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
        return False
    kinds = [type(child) for child in module]
    return len(set(kinds)) < len(kinds)


def _called(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The module itself, or what is in it where it is a mere list, whose `forward` nobody calls."""
    if not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
        yield module
        return
    for child in module.children():
        yield from _called(child)


@contextlib.contextmanager
def _checkpointed(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    own = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = partial(_call, module.forward)
    try:
        yield
    finally:
        for module, forward in zip(modules, own):
            del module.forward
            if forward is not None:
                module.forward = forward


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keywords are bound first: a block's own may be named like one of `checkpoint`'s."""
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=True)


class MicroBatchStep(EagerStep):
    """Eager's step over `parts` pieces of the batch: each piece's loss counts by its share of the batch, gradients
    add up, and the update, if the step has one, comes with the last piece. Without a loss outputs are joined."""

    def __init__(self, workload: Workload, parts: int) -> None:
        super().__init__(workload)
        self.parts = parts

    def __call__(self) -> torch.Tensor | object:
        """One step. Returns the loss, or what the inference call returns."""
        if self.workload.loss_fn is None:
            with torch.no_grad():
                return self._joined([self.workload.call(batch) for batch, _ in self._cut()])
        self.clear_gradients()
        losses = []
        for number, (batch, size) in enumerate(self._cut()):
            with self._updating() if number == self.parts - 1 else contextlib.nullcontext():
                loss = self.workload.call(batch) * (size / self.workload.batch_size)
                loss.backward()
            losses.append(loss.detach())
            del loss  # it keeps its graph, which the next piece need not live beside
        return torch.stack(losses).sum()

    def _sizes(self) -> list[int]:
        whole, more = divmod(self.workload.batch_size, self.parts)
        return [whole + 1] * more + [whole] * (self.parts - more)

    def _cut(self) -> Iterator[tuple[Any, int]]:
        """Each micro-batch, views of the batch, and its size."""
        leaves, structure, _ = flatten_batch(self.workload.batch)
        start = 0
        for size in self._sizes():
            cut = [leaf.narrow(0, start, size) if self._is_cut(leaf) else leaf for leaf in leaves]
            yield pytree.tree_unflatten(cut, structure), size
            start += size

    def _is_cut(self, leaf: object) -> bool:
        return _has_examples(leaf, self.workload.batch_size)

    def _joined(self, outputs: Sequence[Any]) -> Any:
        """The pieces' outputs as one; what has no value per example is the first piece's."""
        flat = [pytree.tree_flatten(output) for output in outputs]
        sizes = self._sizes()
        joined = [
            torch.cat(leaves) if all(map(_has_examples, leaves, sizes)) else leaves[0]
            for leaves in zip(*(leaves for leaves, _ in flat))
        ]
        return pytree.tree_unflatten(joined, flat[0][1])


def _has_examples(leaf: object, number: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == number


@dataclass(frozen=True)
class Deviation:
    """How far a method's results are from eager's: the largest relative error of a tensor (norm of the difference
    over norm of eager's), and the buffers that end differently."""

    max_rel_error: float
    buffers: tuple[str, ...]


def deviation(method: str, workload: Workload, captured: Captured, prepare: Callable[[], None]) -> Deviation:
    """Runs eager's step and the method's, each after `prepare`, and compares loss and gradients, or outputs.

    Where the step updates weights, the gradients that it updates them with are compared. Raises MismatchError when
    the method leaves other tensors than eager."""
    bare = replace(workload, update=None)
    prepare()
    eager, eager_buffers = _outcome(EagerStep(bare))
    prepare()
    ours, buffers = _outcome(rival_step(method, bare))
    prepare()
    errors = _errors(ours, eager)
    if any(errors.values()):
        scaled = captured if workload.update is None else capture(bare)
        for name, scale in result_scales(scaled, bare, errors).items():
            eps = core_dtype(eager[name].dtype).eps if eager[name].is_floating_point() else 0.0
            if max(_largest(eager[name]), _largest(ours[name])) <= scale.tolerance(eps):
                errors[name] = 0.0  # zero by mathematics, as a bias in front of a norm: what is there is rounding
    differing = [name for name, buffer in buffers.items() if not torch.equal(buffer, eager_buffers[name])]
    return Deviation(max(errors.values(), default=0.0), tuple(differing))


def _outcome(step: EagerStep) -> tuple[Results, Results]:
    results = {name: tensor.detach().clone() for name, tensor in step.results().items()}
    return results, {name: buffer.clone() for name, buffer in step.workload.model.named_buffers()}


def _errors(ours: Results, eager: Results) -> dict[str, float]:
    for name in sorted(ours.keys() | eager.keys()):
        shapes = [list(found[name].shape) if name in found else "absent" for found in (ours, eager)]
        if shapes[0] != shapes[1]:
            raise MismatchError(f"{name} is {shapes[0]}, eager's {shapes[1]}")
    return {name: _relative(ours[name].double(), eager[name].double()) for name in eager}


def _relative(ours: torch.Tensor, eager: torch.Tensor) -> float:
    distance, size = float((ours - eager).norm()), float(eager.norm())
    if distance == 0.0:
        return 0.0
    return distance / size if size > 0.0 and isfinite(distance) else float("inf")


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
