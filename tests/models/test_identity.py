"""Every zoo model at toy size: the identity plan is proven, and its peak is predicted to the byte."""

import pytest
import torch

from magis import zoo
from magis.api.prove import exact_results, prove
from magis.backend.measure import measure_call
from magis.backend.meters import allocator_peak, storage_peak
from magis.backend.runtime import compile_routine
from magis.capture.capture import capture
from magis.capture.workload import workload
from magis.fission.tree import Program
from magis.ir.text import parse_graph, print_graph
from magis.ir.verify import verify
from magis.lower.lower import lower
from magis.sim.timeline import timeline

pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def prepared(toy):
    model = zoo.model(toy)
    if model.requires:
        pytest.importorskip(model.requires)
    made = workload(zoo.build(toy), toy)
    captured = capture(made)
    return made, captured, lower(Program(captured.graph), captured.schedule)


def test_identity_plan_is_proven_against_float64(prepared):
    made, captured, routine = prepared
    result = prove(made, captured, compile_routine(routine), reference=exact_results(made))
    assert result.failures == ()
    assert result.ok
    assert result.tensors >= 1


def test_predicted_peak_is_the_executed_peak(prepared):
    made, captured, routine = prepared
    step = compile_routine(routine)

    def run():
        with torch.no_grad():
            step(captured.bind(made))

    measured = storage_peak(run, captured.bind(made))
    predicted = timeline(routine)
    assert predicted.peak_bytes == measured.peak_bytes
    assert predicted.resident_bytes == measured.resident_bytes

    workspace = {}

    def workspace_bytes(call):
        if call not in workspace:
            found = measure_call(call)
            workspace[call] = 0 if found is None else found.workspace_bytes
        return workspace[call]

    with_workspace = timeline(routine, workspace_bytes)
    allocated = allocator_peak(run)
    assert allocated.step_peak_bytes == pytest.approx(with_workspace.peak_bytes - predicted.resident_bytes, rel=0.03)


def test_captured_graph_reads_back(prepared):
    _, captured, _ = prepared
    read = parse_graph(print_graph(captured.graph))
    verify(read, captured.schedule)
    assert read == captured.graph
