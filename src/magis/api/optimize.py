"""A planned step for one's own training loop: `step(batch).backward()` fills `.grad` as eager does."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from magis.api.costs import Costs, Progress, cost_model, silent
from magis.api.limits import BUDGET_S, Budget, Limits
from magis.api.limits import budget as check_budget
from magis.api.limits import limits as check_limits
from magis.api.lowering import lowered
from magis.api.planning import Planned, plan_step
from magis.api.pytorch import check_torch
from magis.api.units import human_bytes, human_percent
from magis.backend.runtime import CompiledStep, compile_routine
from magis.backend.swapping import SwapFile
from magis.capture.capture import Captured, capture
from magis.capture.workload import Workload, flatten_batch, workload
from magis.errors import CaptureError, InfeasibleError, UsageError
from magis.ir.graph import Graph, Value
from magis.sim.estimate import Estimate

MOST_PLANS = 16
"""Plans that a step keeps, one for each shape of batch and state of the model; the least recently used goes first."""
GRADIENT = "grad:"

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
_PLAIN = (bool, int, float, str)
_OF_THE_CODE = (LookupError, TypeError, AttributeError, ValueError)  # errors that have nothing to do with tracing


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
    swap_dir: Path | None = None,
    host_memory: int | str | None = None,
) -> OptimizedStep:
    """Plans the step `loss_fn(model, batch)` within limits and returns it as a function of the batch.

    `max_slowdown` is a factor of eager's time; `memory_limit` is bytes, a size such as "8GiB", or a share of eager's
    peak (0.4 or "40%"). Without `loss_fn` the step is the inference call `model(batch)`. The model stays as it is.
    `device` says what operators cost: "cpu" (measured), or a preset that is like the model's GPU. At most `host_memory`
    (bytes or a size) is swapped out at a time; on a CPU nothing is without `swap_dir`, a folder for a file.

    Raises UsageError for limits that nothing can keep to, CaptureError when the step cannot be captured, and
    InfeasibleError when no plan within the limits is known; with `strict=False` that is a warning."""
    check_torch()
    wanted, allowed = check_limits(max_slowdown, memory_limit), check_budget(budget_s, iterations)
    given = workload((model, loss_fn, batch), type(_inner(model)).__name__)
    _refuse_wrapped_parts(model)
    place = next((p.device.type for p in model.parameters()), "cpu")
    if place == "meta":
        raise UsageError("the model is on the meta device, where it has no weights to train: build it without")
    if place != "cpu" and device == "cpu":
        raise UsageError(f"the model is on {place}: pass device= with a preset that is like it (`magis devices`)")
    costs = cost_model(device, swap_dir, host_memory)
    return OptimizedStep(given, wanted, allowed, costs, strict, progress or _shown(), swap_dir)


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _refuse_wrapped_parts(model: torch.nn.Module) -> None:
    """DistributedDataParallel averages gradients around its own forward call, which a captured step makes only for the
    whole model."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and (name or module.mixed_precision is not None):
            raise UsageError(
                f"{name or 'the model'}: only a whole model may be wrapped in DistributedDataParallel, without "
                "mixed_precision; use torch.autocast for that"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise UsageError(
                f"{name} is spread over several devices (fully_shard); only whole parameters can be planned for"
            )


@dataclass(frozen=True)
class _Ready:
    """A plan for one shape of batch and one state of the model. `shared` are places among the results (the loss, then
    gradients) that lie in memory of another one, or of the caller's."""

    captured: Captured
    planned: Planned
    compiled: CompiledStep
    shared: frozenset[int]
    writes_batch: bool

    def run(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Executes the program on its inputs, whose list it empties; what autocast would cast is already cast in it."""
        with torch.no_grad(), ExitStack() as stack:
            for place in ("cpu", "cuda"):
                if torch.is_autocast_enabled(place):
                    stack.enter_context(torch.autocast(place, enabled=False))
            return self.compiled(inputs)


class OptimizedStep:
    """The planned step. Call it with a batch; `loss.backward()` hands the gradients over.

    Another shape of batch, a module's other mode, a parameter that is frozen, or autocast switched on or off is planned
    for when it is first seen, within the same limits."""

    def __init__(
        self,
        given: Workload,
        limits: Limits,
        budget: Budget,
        costs: Costs,
        strict: bool,
        progress: Progress,
        swap_dir: Path | None = None,
    ) -> None:
        self._transfers = None if swap_dir is None else SwapFile(swap_dir)
        self._given, self._asked, self._limits, self._budget = given, limits, limits, budget
        self._costs, self._strict, self._progress = costs, strict, progress
        self._plans: OrderedDict[_Situation, _Ready] = OrderedDict()
        first = self._ready(replace(given, batch=_own_storage(given.batch))).planned
        self._first = first
        if limits.memory_share is not None:
            self._limits = Limits(limits.max_slowdown, first.peak_limit_bytes)
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
        given = replace(self._given, batch=_own_storage(batch))
        ready, model = self._ready(given), given.model
        if ready.writes_batch and given.batch is not batch:
            raise UsageError(
                "the step writes into its batch, of which a tensor is part of a larger one, shares memory with another "
                "or was computed with gradients: pass it as .detach().clone()"
            )
        inputs = ready.captured.bind(given)
        if given.loss_fn is None or not torch.is_grad_enabled():
            returned = _inside(model, lambda: ready.run(inputs))
            structure = ready.captured.output_structure
            return returned[0] if structure is None else structure.filled(returned)
        of, results = _leaves(model, batch), ready.captured.graph.output_names
        leaves = [of[name.removeprefix(GRADIENT)] for name in results if name.startswith(GRADIENT)]
        return _inside(model, lambda: _Step.apply(ready, inputs, *leaves))

    def _ready(self, given: Workload) -> _Ready:
        """The plan for a batch and the model as they are, made at first sight."""
        situation = _situation(given)
        known = self._plans.get(situation)
        if known is None:
            self._explain_new(situation)
            known = self._plans[situation] = self._plan(given)
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(situation)
        return known

    def _explain_new(self, situation: _Situation) -> None:
        """Warns when nothing but a constant changed, which may well do so at each step."""
        for other in reversed(self._plans):
            if other.tensors == situation.tensors:
                changed = dict(situation.constants).items() ^ dict(other.constants).items()
                name = min(name for name, _ in changed)
                _warn(
                    f"planning again, because {name} is another: what is no tensor is part of the plan. Keep it out of "
                    f"the batch and the model if the step does not need it, or make it a tensor. {MOST_PLANS} plans "
                    "are kept"
                )
                return

    def _plan(self, given: Workload) -> _Ready:
        self._progress(f"capturing {given.name}")
        captured = self._capture(given)
        graph, order, within = captured.graph, captured.schedule, self._limits
        planned = plan_step(graph, order, self._costs, within, self._budget, self._progress)
        if not planned.met and within != self._asked:  # a larger batch than the first: the same share of a larger peak
            planned = plan_step(graph, order, self._costs, self._asked, self._budget, self._progress)
        self._progress("")
        if not planned.met:
            self._miss(planned)
        compiled = compile_routine(lowered(planned.program, planned.schedule), self._transfers)
        return _Ready(captured, planned, compiled, _shared(planned.program.graph), _writes_batch(graph))

    def _capture(self, given: Workload) -> Captured:
        """The step. Of a later batch that the user's code cannot take, its own error tells most."""
        try:
            with _capturable(given.model):
                return capture(given)
        except CaptureError as error:
            cause = error.__cause__
            if not self._plans or not isinstance(cause, _OF_THE_CODE):
                raise
            cause.add_note(f"in a batch for which there is no plan yet: {error}")
            raise cause from None

    def _miss(self, planned: Planned) -> None:
        lowest = planned.optimized.peak_bytes
        share = lowest / planned.baseline.peak_bytes
        text = (
            f"no plan within the limits is known; the lowest peak known is {human_bytes(lowest)} ({share:.1%} of "
            "eager's): allow more, or pass strict=False to take that plan"
        )
        if self._strict:
            raise InfeasibleError(text, lowest)
        _warn(text)

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
    def forward(ctx: Any, ready: _Ready, inputs: list[torch.Tensor], *leaves: torch.Tensor) -> torch.Tensor:
        loss, *gradients = ready.run(inputs)
        ctx.gradients, ctx.shared = gradients, ready.shared
        return loss.clone() if 0 in ready.shared else loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:
        gradients: list[torch.Tensor] | None = ctx.gradients
        if gradients is None:
            raise RuntimeError(
                "backward() was called before on this loss and has handed its gradients over: run the step again"
            )
        ctx.gradients = None
        factor = tangent.item()
        for i, gradient in enumerate(gradients):  # one at a time: never two copies of all
            if factor != 1:
                gradients[i] = gradient * factor
            elif i + 1 in ctx.shared:
                gradients[i] = gradient.clone()
        found = tuple(gradients)
        gradients.clear()
        return None, None, *found


def _shared(graph: Graph) -> frozenset[int]:
    """Which results need memory of their own before they become `.grad`, where eager copies, too: what changes one
    gradient in place (clipping) must change no other. Slices of one storage that do not meet stay as they are."""
    found: set[int] = set()
    taken: list[tuple[Value, int, int]] = []
    for place, value in enumerate(graph.outputs):
        root, spec = graph.root(value), graph.spec(value)
        first = spec.offset * spec.dtype.nbytes
        past = first + (1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides))) * spec.dtype.nbytes
        if graph.nodes[root.node].is_input or any(root == r and first < p and f < past for r, f, p in taken):
            found.add(place)
        taken.append((root, first, past))
    return frozenset(found)


def _writes_batch(graph: Graph) -> bool:
    written = (graph.root(n.inputs[i]) for n in graph.nodes.values() for i in n.written())
    return any(graph.nodes[root.node].kind == "batch" for root in written)


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
    hold for shapes and strides, wherever a loader's slices lie. What another graph computed is detached from it."""
    leaves, structure, _ = flatten_batch(batch)
    seen: dict[int, torch.Tensor] = {}
    own: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            before = seen.setdefault(leaf.untyped_storage()._cdata, leaf)
            if leaf.storage_offset() or before is not leaf:
                own[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            elif not leaf.is_leaf:
                own[id(leaf)] = leaf.detach().requires_grad_(leaf.requires_grad)
    return pytree.tree_unflatten([own.get(id(leaf), leaf) for leaf in leaves], structure) if own else batch


class _Situation(NamedTuple):
    """All that a program depends on beside the tensors' values: layouts and modes; constants by name."""

    tensors: Hashable
    constants: tuple[tuple[str, Hashable], ...]


def _situation(given: Workload) -> _Situation:
    leaves, _, names = flatten_batch(given.batch)
    kinds: list[type] = []  # of containers and leaves, in their order
    pytree.tree_leaves(given.batch, is_leaf=lambda item: bool(kinds.append(type(item))))  # type: ignore[func-returns-value]
    model = given.model
    of_model = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    of_batch = [(name, leaf) for name, leaf in zip(names, leaves) if isinstance(leaf, torch.Tensor)]
    number: dict[int, int] = {}
    tensors = tuple((name, number.setdefault(id(t), len(number)), *_kind(t)) for name, t in (*of_model, *of_batch))
    hooks = tuple((*m._forward_pre_hooks, *m._forward_hooks, *m._backward_hooks) for m in model.modules())
    modes = tuple(module.training for module in model.modules())
    casts = tuple(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "cuda"))
    constants = [
        (f"the batch's {name}", _constant(leaf))
        for name, leaf in zip(names, leaves)
        if not isinstance(leaf, torch.Tensor)
    ]
    constants += [
        (f"{name or given.name}.{key}", value)
        for name, module in _inner(model).named_modules()
        for key, value in vars(module).items()
        if type(value) in _PLAIN and key != "training"
    ]
    return _Situation((tuple(kinds), tuple(names), tensors, hooks, modes, casts), tuple(constants))


def _kind(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _constant(leaf: Any) -> Hashable:
    """Equal for leaves of a batch that mean the same to a step."""
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype.str, leaf.tobytes()
    return (type(leaf), leaf if isinstance(leaf, Hashable) else repr(leaf))


class _Called(torch.nn.Module):
    """Stands for a module, whose buffers it has, and runs what it is handed."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def _inside(model: torch.nn.Module, run: Callable[[], Any]) -> Any:
    """Runs the step where a wrapper runs its module: DistributedDataParallel prepares around it for gradients that it
    averages as they are handed over."""
    if not isinstance(model, DistributedDataParallel):
        return run()
    wrapped, model.module = model.module, _Called(model.module)
    try:
        return model(run)
    finally:
        model.module = wrapped


@contextmanager
def _capturable(model: torch.nn.Module) -> Iterator[None]:
    """Takes away what has its turn in each step: hooks on gradients, which autograd calls when they are handed over,
    and what a wrapper does around its module."""
    hidden = []
    for parameter in model.parameters():
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if any(hooks):
            hidden.append((parameter, hooks))
            parameter._backward_hooks = None
            parameter._post_accumulate_grad_hooks = None  # type: ignore[attr-defined]
    if isinstance(model, DistributedDataParallel):
        vars(model)["forward"] = model.module.__call__
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        if isinstance(model, DistributedDataParallel):
            del vars(model)["forward"]
        for parameter, (of_gradient, of_accumulation) in hidden:
            parameter._backward_hooks = of_gradient
            parameter._post_accumulate_grad_hooks = of_accumulation  # type: ignore[attr-defined]


def _warn(text: str) -> None:
    """Warns at the line that called into this file."""
    level, frame = 1, sys._getframe()
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def _shown() -> Progress:
    """Progress on one line of standard error, where a person watches."""
    if not sys.stderr.isatty():
        return silent
    return lambda message: print(f"\r\x1b[K{message[:150]}", end="", file=sys.stderr, flush=True)
