"""What the report on a peak says of operators' workspace: the plan's where there is a plan, and otherwise that it
is not known."""

from __future__ import annotations

import msgspec
import pytest

from magis.api.models import resolve
from magis.api.plan import Plan, make_plan
from magis.api.plan_file import program_of
from magis.api.why import PeakReport, why, why_plan

MIB = 1 << 20


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(resolve("plain-mlp-toy"), device="rtx3090")


def adds_up(report: PeakReport) -> bool:
    tensors = sum(tensor.nbytes for tensor in report.tensors)
    return report.peak_bytes == sum(report.residents.values()) + tensors + report.workspace_bytes


def test_a_model_alone_does_not_tell_the_workspace(plan: Plan) -> None:
    report = why(resolve("plain-mlp-toy"))
    assert not report.workspace_known
    assert report.workspace_bytes == 0 and adds_up(report)


def test_a_plan_tells_it(plan: Plan) -> None:
    report = why_plan(plan)
    assert report.workspace_known and adds_up(report)
    assert (report.model, report.batch) == ("plain-mlp-toy", plan.batch)
    assert (report.peak_bytes, report.step_peak_bytes) == (plan.optimized.peak_bytes, plan.optimized.step_peak_bytes)


def test_the_workspace_moves_the_worst_moment(plan: Plan) -> None:
    """One operator that takes much makes the peak, though more was live elsewhere."""
    program, schedule = program_of(plan)
    scheduled = [program.graph.nodes[n].op for n in schedule if not program.graph.nodes[n].is_input]
    place = scheduled.index("aten.mse_loss.default")
    workspaces = tuple(64 * MIB if i == place else 0 for i in range(len(scheduled)))
    quiet, report = why_plan(plan), why_plan(msgspec.structs.replace(plan, workspaces_bytes=workspaces))
    assert quiet.peak.step != report.peak.step == place
    assert report.peak.op == "aten.mse_loss.default"
    assert report.workspace_bytes == 64 * MIB and adds_up(report)
    assert report.peak_bytes == quiet.live_bytes[place] + 64 * MIB
