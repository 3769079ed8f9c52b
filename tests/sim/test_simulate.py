"""The simulator on small routines worked out by hand, and loops against their unrolled selves."""

from __future__ import annotations

import pytest
import torch

from builder import record
from magis.ir.graph import Call, Value
from magis.lower.routine import Compute, Free, Loop, Piece, Routine, Slice, expand
from magis.ops.rule import dense
from magis.sim.simulate import simulate
from magis.sim.timeline import Lifetime, no_latency, timeline
from routines import LOOPS, mlp_by_batch

X = torch.arange(12.0).reshape(3, 4)  # 48 bytes


def second(call: Call) -> float:
    return 1.0


def test_inputs_and_outputs_of_an_operator_overlap() -> None:
    routine = record(lambda x: x.exp().neg().sum(), [X]).routine()
    found = timeline(routine)
    assert found.resident_bytes == 48
    assert found.live_bytes == (48 + 48, 48 + 96, 48 + 48 + 4)
    assert found.nodes == (1, 2, 3)
    assert found.peak_steps == (1,)
    assert found.hotspots == {Value(routine.body[0].node), Value(routine.body[1].node)}  # type: ignore[union-attr]
    assert simulate(routine, second).latency_s == 3.0


def test_views_own_nothing_and_keep_their_storage() -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        rows = y.narrow(0, 0, 2)
        z = torch.ones(100)
        return z.sum() + rows.sum()

    found = timeline(record(code, [X]).routine())
    exp = found.lifetimes[0]
    assert (exp.nbytes, exp.first) == (48, 0)
    assert exp.last == found.nodes.index(6)  # the sum over the rows
    assert found.live_bytes[1] == 96  # the view adds nothing
    assert found.live_bytes[2] == 48 + 48 + 400


def test_a_storage_goes_with_its_last_view() -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        first, second = x.exp().chunk(2, 1)
        return first.sum(), second.sum()  # type: ignore[return-value]

    found = timeline(record(code, [X]).routine())
    assert found.lifetimes[0].last == 3


def test_a_view_of_an_input_and_a_write_cost_nothing() -> None:
    def code(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        total = g[0].exp().sum()
        w.t().t().add_(g, alpha=-1)
        return total

    found = timeline(record(code, [X, X + 1]).routine())
    assert found.resident_bytes == 96
    assert found.live_bytes[-1] == 96 + 4
    assert found.hotspots == {Value(3), Value(4)}  # type: ignore[arg-type]


def test_unread_results_live_for_their_step() -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        values, _ = x.max(1)
        return values.sum()

    found = timeline(record(code, [X]).routine())
    assert found.live_bytes == (48 + 12 + 24, 48 + 12 + 4)


def test_all_worst_moments_make_hotspots() -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        a = x.exp().sum()
        b = x.neg()
        return b.add(a).sum()

    found = timeline(record(code, [X]).routine())
    assert len(found.peak_steps) == 1
    flat = timeline(record(lambda x: (x.exp().sum(), x.neg().sum()), [X]).routine())
    assert flat.live_bytes == (96, 100, 100, 104)


def test_empty_tensors_are_no_hotspots() -> None:
    found = timeline(record(lambda x: (x[:0].exp(), x.exp()), [X]).routine())
    assert found.hotspots == {Value(3)}  # type: ignore[arg-type]
    assert len(found.lifetimes) == 2


def test_results_live_to_the_end() -> None:
    found = timeline(record(lambda x: (x.exp(), x.sum()), [X]).routine())
    assert found.lifetimes == (Lifetime(Value(1), 48, 0, 1), Lifetime(Value(2), 4, 1, 1))  # type: ignore[arg-type]


def test_nothing_to_do() -> None:
    routine = record(lambda x: x, [X]).routine()
    found = timeline(routine)
    assert (found.peak_bytes, found.live_bytes, found.hotspots) == (48, (), frozenset())
    assert simulate(routine, second).latency_s == 0.0


def test_workspace_counts_at_its_step_only() -> None:
    routine = record(lambda x: x.exp().neg().sum(), [X]).routine()

    def workspace(call: Call) -> int:
        return 1000 if call.op == "aten.sum.default" else 0

    assert timeline(routine, workspace).live_bytes == (96, 144, 1100)
    estimate = simulate(routine, second, workspace)
    assert (estimate.peak_bytes, estimate.step_peak_bytes) == (1100, 1052)


def by_hash(call: Call) -> float:
    """A latency that no sum of rounded numbers hits by accident."""
    return (hash((call.op, call.inputs[0].shape if call.inputs else ())) % 9973) / 3e7


def fill_bytes(call: Call) -> int:
    return 7 * len(call.op)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_equal_their_unrolled_selves(name: str) -> None:
    routine, _, _ = LOOPS[name]()
    assert simulate(routine, by_hash, fill_bytes) == simulate(expand(routine), by_hash, fill_bytes)


def test_steps_of_a_loop_appear_once_with_their_count() -> None:
    routine, _, _ = mlp_by_batch(8, 4)
    found = timeline(routine)
    flat = timeline(expand(routine))
    assert sum(found.repeats) == len(flat.live_bytes)
    assert set(found.repeats) == {1, 4}
    assert found.peak_bytes == flat.peak_bytes
    assert found.hotspots == flat.hotspots


def test_thousands_of_parts_cost_one_walk() -> None:
    part = dense((1, 4))
    call = Call("aten.exp.default", (), (), (part,), (part,))
    view = Slice(1, 0, dense((1, 4)), Piece(0, 1))
    inner = Loop(1000, (view, Compute(1, call, (1,), (2,)), Free((1, 2))))  # type: ignore[arg-type]
    routine = Routine("deep", (0,), (dense((1000, 4)),), (0,), (Loop(3, (inner,)),), (), (), {})
    found = timeline(routine)
    assert found.repeats == (3000, 3000)
    assert simulate(routine, lambda c: 0.1).latency_s == pytest.approx(600.0)
    assert simulate(routine, no_latency).peak_bytes == 16000 + 32
