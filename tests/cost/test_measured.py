from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.cost.calibrate import DISPATCH_S, FARTHEST, Calibration, work
from magis.cost.measured import Coverage, MeasuredCost
from magis.cost.model import CostModel
from magis.cost.profile import CallMeasurement, Environment, ProfileCache
from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.rule import dense

HERE = Environment("cpu", 1, "a processor", "2.13.0")
RATE = {"aten.mm.default": 50e9, "aten.gelu.default": 2e9, "aten.exp.default": 1e9}


def mm(m: int, n: int, k: int, dtype: DType = DType.F32) -> Call:
    return Call(
        "aten.mm.default",
        (Slot(0), Slot(1)),
        (),
        (dense((m, k), dtype), dense((k, n), dtype)),
        (dense((m, n), dtype),),
    )


def pointwise(op: str, *shape: int) -> Call:
    return Call(f"aten.{op}.default", (Slot(0),), (), (dense(shape),), (dense(shape),))


def view(rows: int) -> Call:
    out = replace(dense((rows,)), alias_of=0, storage_bytes=0)
    return Call("aten.view.default", (Slot(0), (rows,)), (), (dense((1, rows)),), (out,))


def true_s(call: Call) -> float:
    """A machine on which every call takes 10 us, and work at one rate an operator."""
    done = work(call)
    assert done is not None
    return 10e-6 + done.size / RATE[call.op]


class Machine:
    """A measurer that computes what it would have measured, and keeps a list."""

    environment = HERE

    def __init__(self, clock: Callable[[float], None] = lambda seconds: None, workspace: bool = False) -> None:
        self.clock = clock
        self.workspace = workspace
        self.measured: list[Call] = []
        self.refuses: set[str] = set()
        self.unsliceable: set[str] = set()

    def measure(self, call: Call) -> CallMeasurement | None:
        self.measured.append(call)
        if call.op in self.refuses:
            return None
        self.clock(0.03 + 6 * true_s(call))
        rows = call.inputs[0].shape[0]
        return CallMeasurement(true_s(call), 1e-6, 3, 1000 + 8 * rows if self.workspace else 0)

    def with_fewer_rows(self, call: Call, fraction: float) -> Call | None:
        first, *others = call.inputs
        rows = max(1, int(first.shape[0] * fraction))
        if call.op in self.unsliceable or rows >= first.shape[0]:
            return None
        out = call.outputs[0]
        assert out is not None
        inputs = (dense((rows, *first.shape[1:])), *others)
        return replace(call, inputs=inputs, outputs=(dense((rows, *out.shape[1:])),))

    def operand_bytes(self, call: Call) -> int:
        return sum(spec.nbytes for spec in (*call.inputs, *call.outputs) if spec is not None)


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(tmp_path / "costs.sqlite")


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that moves when told to."""
    now = [0.0]
    monkeypatch.setattr("magis.cost.measured.time.monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_each_distinct_call_is_measured_once_ever(cache: ProfileCache) -> None:
    machine = Machine()
    costs = MeasuredCost(cache, machine)
    calls = [mm(64, 64, 64), pointwise("gelu", 1000), mm(64, 64, 64), view(8)]
    assert costs.prepare(calls).calls == costs.coverage(calls).calls == {"measured": 3}
    assert sorted(call.op for call in machine.measured) == ["aten.gelu.default", "aten.mm.default"]
    assert costs.latency_s(calls[0]) == true_s(calls[0])
    assert costs.latency_s(calls[3]) == 0.0
    again = Machine()
    costs = MeasuredCost(cache, again)
    assert costs.prepare(calls).calls == {"measured": 3}
    assert again.measured == []


def test_a_long_call_is_measured_on_a_slice(cache: ProfileCache) -> None:
    machine = Machine(workspace=True)
    costs = MeasuredCost(cache, machine)
    call = mm(40_000, 2000, 2000)
    assert true_s(call) > 6
    assert costs.prepare([call]).calls == {"scaled": 1}
    assert max(true_s(part) for part in machine.measured) < 0.3
    assert costs.latency_s(call) == pytest.approx(true_s(call), rel=0.01)
    assert costs.workspace_bytes(call) == pytest.approx(1000 + 8 * 40_000, rel=1e-6)


def test_the_workspace_of_a_call_whose_slice_is_one_row(cache: ProfileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magis.cost.measured.DIRECT_S", 0.02)
    monkeypatch.setattr("magis.cost.measured.SLICE_S", 0.01)
    machine = Machine(workspace=True)
    costs = MeasuredCost(cache, machine)
    call = mm(4, 15_000, 15_000)
    assert costs.prepare([call]).calls == {"scaled": 1}
    assert [part.inputs[0].shape[0] for part in machine.measured] == [1, 2]
    assert costs.workspace_bytes(call) == pytest.approx(1000 + 8 * 4, abs=1)


def test_a_call_on_too_much_memory_is_measured_on_a_slice(cache: ProfileCache) -> None:
    machine = Machine()
    costs = MeasuredCost(cache, machine)
    call = pointwise("gelu", 1_000_000, 300)
    costs.prepare([call])
    assert max(machine.operand_bytes(part) for part in machine.measured) <= 1 << 30
    assert costs.latency_s(call) == pytest.approx(true_s(call), rel=0.01)


def test_a_call_that_only_looked_long_is_measured_whole(cache: ProfileCache) -> None:
    machine = Machine()
    costs = MeasuredCost(cache, machine)
    call = mm(2900, 2500, 1000)  # 0.36 s at the default rate, 0.29 s on this machine
    assert costs.prepare([call]).calls == {"measured": 1}
    assert costs.latency_s(call) == true_s(call)


def test_a_long_call_without_slices_is_estimated(cache: ProfileCache) -> None:
    machine = Machine()
    machine.unsliceable.add("aten.mm.default")
    costs = MeasuredCost(cache, machine)
    long, short = mm(4000, 2000, 2000), mm(500, 400, 300)
    assert costs.prepare([long, short]).calls == {"measured": 1, "estimated": 1}
    assert machine.measured == [short]
    assert costs.latency_s(long) == pytest.approx(true_s(long), rel=0.01)


def test_a_call_that_refuses_is_estimated_and_not_tried_again(cache: ProfileCache) -> None:
    machine = Machine()
    machine.refuses.add("aten.exp.default")
    costs = MeasuredCost(cache, machine)
    calls = [pointwise("exp", 10_000), pointwise("gelu", 10_000)]
    for _ in range(2):
        assert costs.prepare(calls).calls == {"measured": 1, "estimated": 1}
    assert len(machine.measured) == 2
    assert costs.latency_s(calls[0]) == pytest.approx(true_s(calls[1]), rel=0.5)


def test_the_cap_leaves_out_what_matters_least(cache: ProfileCache, passing: Callable[[float], None]) -> None:
    machine = Machine(clock=passing)
    costs = MeasuredCost(cache, machine)
    heavy = [mm(1000 + i, 1000, 1000) for i in range(4)]
    light = [pointwise("gelu", 100 + i) for i in range(300)]
    words: list[str] = []
    coverage = costs.prepare([*light, *(heavy * 10)], progress=words.append, budget_s=2.0)
    assert set(heavy) <= set(machine.measured)
    assert len(machine.measured) < 304
    assert coverage.calls["measured"] >= 40
    assert sum(coverage.calls.values()) == 340
    assert coverage.share_s("measured") > 0.9
    assert all("of at most 2 s" in word for word in words)


def test_the_cap_holds(cache: ProfileCache, passing: Callable[[float], None]) -> None:
    machine = Machine(clock=passing)
    MeasuredCost(cache, machine).prepare([mm(1000 + i, 1000, 1000) for i in range(2000)], budget_s=20.0)
    assert 15 < sum(0.03 + 6 * true_s(call) for call in machine.measured) <= 20


def test_asking_never_measures_and_answers_stay(cache: ProfileCache) -> None:
    machine = Machine()
    costs = MeasuredCost(cache, machine)
    call = mm(512, 512, 512)
    before = costs.latency_s(call)
    assert machine.measured == []
    cache.store(HERE, call, CallMeasurement(1.0, 0.0, 3, 0))
    assert costs.latency_s(call) == before
    costs.prepare([])
    assert costs.latency_s(call) == 1.0


def test_the_hash_is_of_the_costs_that_were_used(cache: ProfileCache) -> None:
    def used(*calls: Call) -> str:
        costs = MeasuredCost(cache, Machine())
        for call in calls:
            costs.latency_s(call)
        return costs.table_hash()

    first, second = mm(64, 64, 64), mm(32, 64, 64)
    MeasuredCost(cache, Machine()).prepare([first, second])
    assert used(first, second) == used(second, first)
    assert len({used(first), used(second), used(first, second), used()}) == 4
    before = used(first)
    cache.store(HERE, second, CallMeasurement(1.0, 0.0, 3, 0))
    assert used(first) == before
    cache.store(HERE, first, CallMeasurement(1.0, 0.0, 3, 0))
    assert used(first) != before


def test_a_row_that_cannot_be_read_costs_nothing_but_itself(cache: ProfileCache) -> None:
    known, odd = mm(64, 64, 64), mm(32, 64, 64)
    MeasuredCost(cache, Machine()).prepare([known, odd])
    assert cache.path is not None
    with sqlite3.connect(cache.path) as connection:
        connection.execute("UPDATE costs SET call = 'scrambled' WHERE call LIKE '%f32[32,64]%'")
    connection.close()
    costs = MeasuredCost(cache, Machine())
    assert costs.coverage([known, odd]).calls == {"measured": 1, "interpolated": 1}
    assert costs.coverage([pointwise("exp", 10)]).calls == {"estimated": 1}


def test_coverage_in_words() -> None:
    assert str(Coverage()) == "nothing to measure"
    coverage = Coverage({"measured": 3, "estimated": 1}, {"measured": 0.9, "estimated": 0.1})
    assert str(coverage) == "3 measured (90 % of the time), 1 estimated (10 % of the time)"
    assert coverage.share_s("scaled", "estimated") == pytest.approx(0.1)


def test_it_is_a_cost_model(cache: ProfileCache) -> None:
    model: CostModel = MeasuredCost(cache, Machine())
    assert model.source == "measured"
    assert model.transfer_s(10**9) == pytest.approx(1.0, rel=1e-4)


def _calibrated(*calls: Call) -> Calibration:
    calibration = Calibration()
    for call in calls:
        calibration.add(call, CallMeasurement(true_s(call), 0.0, 3, call.inputs[0].shape[0]))
    return calibration


@given(st.integers(9, 100), st.integers(100, 3000), st.integers(1, 8))
def test_a_size_between_two_measured_ones(low: int, more: int, rows: int) -> None:
    between = low + more // (rows + 1)
    known = _calibrated(mm(low, 256, 256), mm(low + more, 256, 256))
    if max(between / low, (low + more) / between) > FARTHEST:
        return
    found = known.interpolated(mm(between, 256, 256))
    assert found is not None
    assert found.latency_s == pytest.approx(true_s(mm(between, 256, 256)))
    assert found.workspace_bytes == pytest.approx(between, abs=1)


def test_a_size_beyond_the_measured_ones_is_in_proportion() -> None:
    found = _calibrated(mm(1000, 512, 512)).interpolated(mm(250, 512, 512))
    assert found is not None
    expected = DISPATCH_S + (true_s(mm(1000, 512, 512)) - DISPATCH_S) / 4
    assert found.latency_s == pytest.approx(expected)
    assert found.workspace_bytes == 250


def test_only_one_dimension_by_one_factor_may_differ() -> None:
    known = _calibrated(mm(1000, 512, 512))
    assert known.interpolated(mm(1000, 512, 256)) is not None  # K is one dimension of each operand
    assert known.interpolated(mm(500, 256, 512)) is None
    assert known.interpolated(mm(1000 * 2 * FARTHEST, 512, 512)) is None
    assert known.interpolated(mm(500, 512, 512, DType.BF16)) is None
    inputs = (replace(dense((500, 512)), strides=(1, 500)), dense((512, 512)))
    assert known.interpolated(replace(mm(500, 512, 512), inputs=inputs)) is None


def test_literal_sizes_follow_or_stay() -> None:
    def expand_like(rows: int, pad: int) -> Call:
        return replace(pointwise("gelu", rows, 4), args=(Slot(0), (rows, 4), pad))

    known = _calibrated(expand_like(100, 1))
    assert known.interpolated(expand_like(50, 1)) is not None
    assert known.interpolated(expand_like(100, 2)) is not None  # as if all sizes were equal but this one
    assert known.interpolated(expand_like(50, 7)) is None


def test_the_roofline_takes_the_rate_of_the_nearest_call_of_the_kind() -> None:
    known = _calibrated(mm(512, 512, 512), mm(64, 64, 64), pointwise("gelu", 1_000_000))
    wanted = mm(700, 300, 500)
    assert known.roofline(wanted).latency_s == pytest.approx(true_s(wanted), rel=0.05)
    assert known.roofline(pointwise("exp", 3_000_000)).latency_s == pytest.approx(24e6 / 2e9, rel=0.05)
    assert known.roofline(mm(1024, 512, 256)).workspace_bytes == 512
    skinny = mm(1, 4000, 4000)  # bound by the bytes of the matrix, not by its operations
    assert known.roofline(skinny).latency_s == pytest.approx(4 * 16_008_000 / 2e9, rel=0.05)


def test_nothing_measured_gives_default_rates() -> None:
    assert Calibration().roofline(mm(1000, 1000, 1000)).latency_s == pytest.approx(0.05, rel=0.01)
    assert Calibration().roofline(view(3)).latency_s == DISPATCH_S


def test_the_order_of_measurements_does_not_matter() -> None:
    calls = [mm(100, 64, 64), mm(400, 64, 64), mm(200, 128, 64), mm(100, 64, 128)]
    wanted = [mm(200, 64, 64), mm(200, 64, 128), mm(77, 33, 11)]
    one, other = _calibrated(*calls), _calibrated(*reversed(calls))
    for call in wanted:
        assert one.interpolated(call) == other.interpolated(call)
        assert one.roofline(call) == other.roofline(call)
