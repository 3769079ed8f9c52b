"""Real models at toy size: the predicted peak is the measured one, to the byte."""

from __future__ import annotations

import pytest
import torch
from test_memory import recomputed, shuffled

from builder import Recorded
from magis import zoo
from magis.backend.meters import storage_peak
from magis.backend.runtime import compile_routine
from magis.capture.capture import capture
from magis.capture.workload import workload
from magis.fission.tree import Program
from magis.lower.check import verify_routine
from magis.lower.lower import lower
from magis.sim.simulate import simulate
from magis.sim.timeline import no_latency

QUICK = ("hf-bert-dropout-toy", "resnet50-toy", "plain-mlp-toy")
REST = tuple(name for name in zoo.names() if name.endswith("-toy") and name not in QUICK)


@pytest.mark.model
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_predicted_peak_is_the_measured_one(name: str) -> None:
    torch.manual_seed(0)
    given = workload(zoo.build(name), name)
    captured = capture(given)
    routine = lower(Program(captured.graph), captured.schedule)
    verify_routine(routine)
    step = compile_routine(routine)
    inputs = [tensor.detach() for tensor in captured.bind(given)]
    with torch.no_grad():
        found = storage_peak(lambda: step(list(inputs)), inputs)
    estimate = simulate(routine, no_latency)
    assert (found.step_peak_bytes, found.resident_bytes) == (estimate.step_peak_bytes, estimate.resident_bytes)


@pytest.mark.model
@pytest.mark.parametrize("name", ["hf-bert-dropout-toy", pytest.param("unet-toy", marks=pytest.mark.slow)])
def test_recomputed_and_reordered_steps_stay_exact_and_bitwise(name: str) -> None:
    torch.manual_seed(0)
    given = workload(zoo.build(name), name)
    captured = capture(given)
    program = Recorded(captured.graph, [tensor.detach() for tensor in captured.bind(given)])
    plain = lower(Program(captured.graph), captured.schedule)
    runs = []
    for routine in (plain, shuffled(recomputed(program, 1), 1), shuffled(recomputed(program, 2), 2)):
        step, inputs, results = compile_routine(routine), program.fresh_inputs(), list[torch.Tensor]()
        torch.manual_seed(3)
        with torch.no_grad():
            found = storage_peak(lambda: results.extend(step(list(inputs))), inputs)  # noqa: B023
        assert found.step_peak_bytes == simulate(routine, no_latency).step_peak_bytes
        runs.append([*results, *inputs, torch.default_generator.get_state()])
    for ours in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ours, runs[0], strict=True))
