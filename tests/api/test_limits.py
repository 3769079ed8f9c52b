"""Limits as a caller writes them, and plans made within them: saved, read back, run at another batch size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import magis
from magis.api.instance import instantiate
from magis.api.limits import BUDGET_S, Budget, Limits, budget, limits
from magis.api.plan import Limit, Plan
from magis.api.plan_file import load_plan, save_plan
from magis.api.prove import exact_results, prove
from magis.errors import PlanError, UsageError
from magis.fission.tree import Program
from magis.lower.lower import lower
from magis.rules.registry import rules
from magis.sim.simulate import simulate
from magis.sim.timeline import no_latency, timeline


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (None, Limits()),
        ("8GiB", Limits(memory_bytes=8 << 30)),
        ("500MB", Limits(memory_bytes=500_000_000)),
        (" 1.5 KiB ", Limits(memory_bytes=1536)),
        (".5MiB", Limits(memory_bytes=1 << 19)),
        ("2TB", Limits(memory_bytes=2 * 10**12)),
        ("1024", Limits(memory_bytes=1024)),
        ("1024B", Limits(memory_bytes=1024)),
        (1024, Limits(memory_bytes=1024)),
        (1, Limits(memory_bytes=1)),
        ("40%", Limits(memory_share=0.4)),
        ("40 %", Limits(memory_share=0.4)),
        ("150%", Limits(memory_share=1.5)),
        (0.4, Limits(memory_share=0.4)),
        (1.0, Limits(memory_share=1.0)),
    ],
)
def test_memory_limits(asked: int | float | str | None, wanted: Limits) -> None:
    assert limits(memory=asked) == wanted


@pytest.mark.parametrize(
    "asked",
    [
        *("", "%", "much", "8 gib", "8gb", "GiB", "8G", "-1", "-8GiB", "1e9", "nan", "inf", "4 0%", "1.2.3MB", "8GiB!"),
        *("0", "0%", "0.0GiB", "0.1B", "9" * 400 + "%"),
        *(0, -1, 0.0, -0.4, 1.0001, 2.5, float("nan"), float("inf")),
    ],
)
def test_impossible_memory_limits(asked: int | float | str) -> None:
    with pytest.raises(UsageError) as error:
        limits(memory=asked)
    assert "\n" not in str(error.value)
    assert "pass bytes, a size such as 8GiB or 500MB, or a share of eager's peak such as 40%" in str(error.value)


@pytest.mark.parametrize("slowdown", [0.0, 0.99, -1.0, float("nan"), float("inf")])
def test_impossible_slowdowns(slowdown: float) -> None:
    with pytest.raises(UsageError, match="pass a factor of eager's time from 1 on"):
        limits(max_slowdown=slowdown)


def test_both_limits() -> None:
    assert limits(1.1, "40%") == Limits(1.1, None, 0.4)
    assert limits(1) == Limits(1)


def test_a_share_is_of_eagers_peak() -> None:
    assert limits(memory="40%").peak_bytes(1001) == 400
    assert limits(memory=7).peak_bytes(1001) == 7
    assert limits(1.1).peak_bytes(1001) is None


def test_budgets() -> None:
    assert budget() == Budget(BUDGET_S, None)
    assert budget(0, 0) == Budget(0, 0)
    assert budget(None, 5) == Budget(None, 5)


@pytest.mark.parametrize("bad", [(-1.0, None), (float("nan"), None), (float("inf"), None), (30.0, -1)])
def test_impossible_budgets(bad: tuple[float, int | None]) -> None:
    with pytest.raises(UsageError, match="impossible"):
        budget(*bad)


@pytest.fixture(scope="module")
def plan() -> Plan:
    pytest.importorskip("transformers")
    return magis.plan("hf-bert-toy", device="rtx3090", max_slowdown=1.1, budget_s=None, iterations=20)


def test_a_plan_within_a_slowdown(plan: Plan) -> None:
    assert plan.met
    assert plan.limit == Limit(1.1, None)
    assert plan.optimized.latency_s <= 1.1 * plan.baseline.latency_s
    assert plan.optimized.peak_bytes < 0.9 * plan.baseline.peak_bytes
    assert {rule for rule, _ in plan.history} <= rules().keys()
    assert [start.name for start in plan.search.starts[:2]] == ["eager", "recompute each block"]
    assert {rule.name: rule.kept for rule in plan.search.rules} == {
        name: [rule for rule, _ in plan.history].count(name) for name in rules()
    }


def test_a_plan_with_a_history_reads_back(plan: Plan, tmp_path: Path) -> None:
    assert plan.history
    save_plan(plan, tmp_path / "a.plan.json")
    assert load_plan(tmp_path / "a.plan.json") == plan


def test_the_same_plan_from_the_same_iterations(plan: Plan) -> None:
    again = magis.plan("hf-bert-toy", device="rtx3090", max_slowdown=1.1, budget_s=None, iterations=20)
    same = ("digest", "program", "schedule", "history", "optimized", "met", "latencies_s", "workspaces_bytes")
    assert all(getattr(again, name) == getattr(plan, name) for name in same)


@pytest.mark.parametrize("batch", [None, 2, 8])
def test_a_plan_is_proven_at_its_batch_size_and_at_smaller_ones(plan: Plan, batch: int | None) -> None:
    torch.set_num_threads(1)
    small = instantiate(plan, batch=batch)
    made = small.workload()
    proof = prove(made, small.captured, small.compile(), reference=exact_results(made))
    assert proof.failures == ()
    assert proof.batch == (batch or plan.batch)
    eager = simulate(lower(Program(small.captured.graph), small.captured.schedule), no_latency)
    assert timeline(small.routine()).peak_bytes < eager.peak_bytes


def test_a_history_of_another_model_is_refused(plan: Plan) -> None:
    other = replace(plan, history=(("recompute", (1, 10**6, 10**6 + 1)),))
    with pytest.raises(PlanError, match="step 1 of its history"):
        instantiate(other, batch=1)
