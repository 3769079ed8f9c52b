"""A planned step for one's own training loop: `step(batch).backward()` fills `.grad` as eager does."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.autograd.function import once_differentiable

from magis.api.costs import Costs, Progress, cost_model, silent
from magis.api.limits import BUDGET_S, Budget, Limits
from magis.api.limits import budget as check_budget
from magis.api.limits import limits as check_limits
from magis.api.planning import Planned, plan_step
from magis.api.pytorch import check_torch
from magis.api.units import human_bytes, human_percent
from magis.backend.runtime import CompiledStep, compile_routine
from magis.capture.capture import Captured, capture
from magis.capture.workload import Workload, flatten_batch, workload
from magis.errors import InfeasibleError, UsageError
from magis.lower.lower import lower
from magis.sim.estimate import Estimate

MOST_PLANS = 16
"""Plans that a step keeps, one for each shape of batch and state of the model; the least recently used goes first."""
GRADIENT = "grad:"

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]


def optimize(
    model: torch.nn.Module,
    loss_fn: LossFunction | None,
    batch: Any,
    *,
    max_slowdown: float | None = None,
    memory_limit: int | float | str | None = None,
    budget_s: float | None = BUDGET_S,
    iterations: int | None = None,
    device: str = "cpu",
    strict: bool = True,
    progress: Progress | None = None,
) -> OptimizedStep:
    """Plans the step `loss_fn(model, batch)` within limits and returns it as a function of the batch.

    `max_slowdown` is a factor of eager's time; `memory_limit` is bytes, a size such as "8GiB", or a share of eager's
    peak (0.4 or "40%"). Without `loss_fn` the step is the inference call `model(batch)`. The model stays as it is.
    `device` says what operators cost: "cpu" (measured), or a preset that is like the model's GPU.

    Raises UsageError for limits that nothing can keep to, CaptureError when the step cannot be captured, and
    InfeasibleError when no plan within the limits is known; with `strict=False` that is a warning."""
    check_torch()
    wanted, allowed = check_limits(max_slowdown, memory_limit), check_budget(budget_s, iterations)
    given = workload((model, loss_fn, batch), type(model).__name__)
    place = next((p.device.type for p in model.parameters()), "cpu")
    if place != "cpu" and device == "cpu":
        raise UsageError(f"the model is on {place}: pass device= with a preset that is like it (`magis devices`)")
    _refuse_wrappers(model)
    return OptimizedStep(given, wanted, allowed, cost_model(device), strict, progress or _shown())


def _refuse_wrappers(model: torch.nn.Module) -> None:
    """DistributedDataParallel averages gradients around its own forward call, which a captured step does not make."""
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and module.process_group.size() > 1:
            raise UsageError(
                "gradients would not be averaged over the processes of DistributedDataParallel: pass its .module, and "
                "average each gradient in a hook (parameter.register_post_accumulate_grad_hook)"
            )


@dataclass(frozen=True)
class _Ready:
    """A plan for one shape of batch and one state of the model."""

    captured: Captured
    planned: Planned
    compiled: CompiledStep


class OptimizedStep:
    """The planned step. Call it with a batch; `loss.backward()` hands the gradients over.

    Another shape of batch, a module's other mode, a parameter that is frozen, or autocast switched on or off is planned
    for when it is first seen, within the same limits."""

    def __init__(
        self, given: Workload, limits: Limits, budget: Budget, costs: Costs, strict: bool, progress: Progress
    ) -> None:
        self._given, self._limits, self._budget = given, limits, budget
        self._costs, self._strict, self._progress = costs, strict, progress
        self._plans: OrderedDict[Hashable, _Ready] = OrderedDict()
        first = self._ready(_own_storage(given.batch)).planned
        self._first = first
        if limits.memory_share is not None:
            self._limits = Limits(limits.max_slowdown, first.peak_limit_bytes)  # of the first batch, for all
        self._given = replace(given, batch=None)

    @property
    def met(self) -> bool:
        """Whether the plan for the first batch keeps to the limits."""
        return self._first.met

    @property
    def baseline(self) -> Estimate:
        """Predicted latency and memory of the first batch's step as eager runs it."""
        return self._first.baseline

    @property
    def optimized(self) -> Estimate:
        """Predicted latency and memory of the planned step of the first batch."""
        return self._first.optimized

    @property
    def memory_ratio(self) -> float:
        """Predicted peak of the first batch's step, as a fraction of eager's."""
        return self.optimized.peak_bytes / self.baseline.peak_bytes if self.baseline.peak_bytes else 1.0

    def __call__(self, batch: Any) -> Any:
        """Runs forward and backward and returns the loss, whose `backward()` adds the gradients; or, for an inference
        call, what the model returns.

        Raises what `optimize` raises when the batch has to be planned for."""
        held = _own_storage(batch)
        ready = self._ready(held)
        given = replace(self._given, batch=held)
        if given.loss_fn is None:
            structure, returned = ready.captured.output_structure, _run(ready, given)
            return returned if structure is None else structure.filled(returned)
        leaves = _leaves(given.model, batch)
        names = [name.removeprefix(GRADIENT) for name in ready.captured.graph.output_names[1:]]

        def run() -> tuple[torch.Tensor, list[torch.Tensor | None]]:
            loss, *gradients = _run(ready, given)
            of = dict(zip(names, gradients))
            return loss, [of.get(name) for name in leaves]

        return _Step.apply(run, *leaves.values())

    def _ready(self, batch: Any) -> _Ready:
        """The plan for a batch and the model as they are, made at first sight."""
        given = replace(self._given, batch=batch)
        key = _situation(given)
        known = self._plans.get(key)
        if known is None:
            known = self._plans[key] = self._plan(given)
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return known

    def _plan(self, given: Workload) -> _Ready:
        self._progress(f"capturing {given.name}")
        with _without_gradient_hooks(given.model), torch.enable_grad():
            captured = capture(given)
        graph, order = captured.graph, captured.schedule
        planned = plan_step(graph, order, self._costs, self._limits, self._budget, self._progress)
        self._progress("")
        if not planned.met:
            self._miss(planned)
        return _Ready(captured, planned, compile_routine(lower(planned.program, planned.schedule)))

    def _miss(self, planned: Planned) -> None:
        lowest = planned.optimized.peak_bytes
        share = lowest / planned.baseline.peak_bytes
        text = (
            f"no plan within the limits is known; the lowest peak known is {human_bytes(lowest)} ({share:.1%} of "
            "eager's): allow more, or pass strict=False to take that plan"
        )
        if self._strict:
            raise InfeasibleError(text, lowest)
        warnings.warn(text, stacklevel=4)

    def __repr__(self) -> str:
        before, after = self.baseline, self.optimized
        slower = after.latency_s / before.latency_s - 1 if before.latency_s else 0.0
        return (
            f"OptimizedStep({self._given.name}: peak {human_bytes(after.peak_bytes)} of "
            f"{human_bytes(before.peak_bytes)} ({self.memory_ratio:.0%}), {human_percent(slower)} time, predicted)"
        )

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UsageError("an optimized step cannot be pickled or copied: call magis.optimize where it is needed")


class _Step(torch.autograd.Function):
    """Loss and gradients, computed together; the gradients wait for `backward()`."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], tuple[torch.Tensor, list[torch.Tensor | None]]], *leaves: Any) -> Any:
        loss, gradients = run()
        ctx.gradients = gradients if torch.is_grad_enabled() or any(ctx.needs_input_grad) else None
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:
        gradients: list[torch.Tensor | None] | None = ctx.gradients
        if gradients is None:
            raise RuntimeError(
                "backward() was called before on this loss and has handed its gradients over: run the step again"
            )
        ctx.gradients = None
        if bool(tangent != 1):
            for i, gradient in enumerate(gradients):  # one at a time: never two copies of all
                gradients[i] = None if gradient is None else gradient * tangent.to(gradient.dtype)
        found = tuple(gradients)
        gradients.clear()
        return None, *found


def _run(ready: _Ready, given: Workload) -> tuple[torch.Tensor, ...]:
    """Executes the program; what autocast would cast is already cast in it."""
    with torch.no_grad(), ExitStack() as stack:
        for place in ("cpu", "cuda"):
            if torch.is_autocast_enabled(place):
                stack.enter_context(torch.autocast(place, enabled=False))
        return ready.compiled(ready.captured.bind(given))


def _leaves(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """What autograd hands gradients to, by the name of the gradient: parameters, and batch tensors that ask for it."""
    found: dict[str, torch.Tensor] = {}
    leaves, _, names = flatten_batch(batch)
    for name, leaf in zip(names, leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            found[name] = leaf
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = parameter
    return found


def _own_storage(batch: Any) -> Any:
    """The batch with tensors that begin in the middle of a storage, or share one, in storages of their own: programs
    hold for shapes and strides, wherever a loader's slices lie."""
    leaves, structure, _ = flatten_batch(batch)
    seen: dict[int, torch.Tensor] = {}
    own = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            before = seen.setdefault(leaf.untyped_storage()._cdata, leaf)
            if leaf.storage_offset() or before is not leaf:
                leaf = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        own.append(leaf)
    return pytree.tree_unflatten(own, structure)


def _situation(given: Workload) -> Hashable:
    """All that a program depends on beside the tensors' values."""
    leaves, structure, names = flatten_batch(given.batch)
    first = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
    batch = tuple(
        (name, first[id(leaf)], *_kind(leaf)) if isinstance(leaf, torch.Tensor) else (name, repr(leaf))
        for name, leaf in zip(names, leaves)
    )
    model = given.model
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    number: dict[int, int] = {}
    state = tuple((name, number.setdefault(id(t), len(number)), *_kind(t)) for name, t in tensors)
    modes = tuple(module.training for module in model.modules())
    casts = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    return str(structure), batch, state, modes, casts


def _kind(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


@contextmanager
def _without_gradient_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Hides hooks on gradients while a step is captured: autograd calls them when the gradients are handed over."""
    hidden = []
    for parameter in model.parameters():
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if any(hooks):
            hidden.append((parameter, hooks))
            parameter._backward_hooks = None
            parameter._post_accumulate_grad_hooks = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter, (of_gradient, of_accumulation) in hidden:
            parameter._backward_hooks = of_gradient
            parameter._post_accumulate_grad_hooks = of_accumulation  # type: ignore[attr-defined]


def _shown() -> Progress:
    """Progress on one line of standard error, where a person watches."""
    if not sys.stderr.isatty():
        return silent
    return lambda message: print(f"\r\x1b[K{message[:150]}", end="", file=sys.stderr, flush=True)
