"""Runs a captured step and eager from the same state, and compares every number, the generator and the peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from magis.backend.meters import storage_peak
from magis.backend.runtime import compile_routine
from magis.capture.capture import Captured, capture
from magis.capture.workload import Workload, batch_tensors, flatten_batch, workload
from magis.fission.tree import Program
from magis.ir.text import parse_graph, print_graph
from magis.lower.lower import lower
from magis.sim.timeline import timeline

SEED = 5


class Of(nn.Module):
    """A module around a function of itself, with named children, parameters and buffers."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def check(*made: Any, atol: float = 0.0) -> Captured:
    """Captures the workload that a factory returned, and checks the step against eager: outputs, gradients,
    parameters, buffers and batch afterwards within `atol` (0: bitwise), the generator's state, and that the
    predicted peak is the executed one. The model is left as it was."""
    step = workload(made)
    before = snapshot(step)
    captured = capture(step)
    assert_same(snapshot(step), before)
    assert parse_graph(print_graph(captured.graph)) == captured.graph
    routine = lower(Program(captured.graph), captured.schedule)
    run = compile_routine(routine)

    torch.manual_seed(SEED)
    with torch.no_grad():
        results = dict(zip(captured.graph.output_names, [t.clone() for t in run(captured.bind(step))]))
    state = torch.get_rng_state()
    after = snapshot(step)
    restore(step, before)

    torch.manual_seed(SEED)
    expected = eager(step)
    assert torch.equal(torch.get_rng_state(), state), "the random generator ends in another state"
    assert results.keys() == expected.keys()
    assert_same(results, expected, atol)
    assert_same(after, snapshot(step), atol)
    restore(step, before)

    def once() -> None:
        with torch.no_grad():
            run(captured.bind(step))

    measured = storage_peak(once, captured.bind(step))
    assert timeline(routine).peak_bytes == measured.peak_bytes
    restore(step, before)
    return captured


def eager(step: Workload) -> dict[str, torch.Tensor]:
    """Results of the step in eager PyTorch, under the names that a captured graph gives them."""
    if step.loss_fn is None:
        with torch.no_grad():
            leaves, _, names = flatten_batch(step.call(step.batch))
        return {f"output:{n}": t for n, t in zip(names, leaves) if isinstance(t, torch.Tensor)}
    inputs = {**dict(step.model.named_parameters()), **dict(batch_tensors(step.batch))}
    for tensor in inputs.values():
        tensor.grad = None
    loss = step.call(step.batch)
    loss.backward()
    results = {f"grad:{n}": t.grad for n, t in inputs.items() if t.is_leaf and t.grad is not None}
    for tensor in inputs.values():
        tensor.grad = None
    return {"loss": loss.detach(), **results}


def snapshot(step: Workload) -> dict[str, torch.Tensor]:
    """Copies of all the caller's tensors."""
    return {name: tensor.detach().clone() for name, tensor in _tensors(step)}


def restore(step: Workload, saved: Mapping[str, torch.Tensor]) -> None:
    """Puts a snapshot back."""
    with torch.no_grad():
        for name, tensor in _tensors(step):
            tensor.copy_(saved[name])


def _tensors(step: Workload) -> Iterator[tuple[str, torch.Tensor]]:
    yield from step.model.named_parameters()
    yield from step.model.named_buffers()
    yield from batch_tensors(step.batch)


def assert_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], atol: float = 0.0) -> None:
    """Every tensor equal within `atol`, NaN equal to NaN."""
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=0.0, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def mean_loss(model: Any, batch: Any) -> torch.Tensor:
    """The mean of the squared output."""
    return model(batch).square().mean()
