"""Which measurements exceed a plan's limits."""

import msgspec
import pytest

from magis.api.plan import Limit, plan
from magis.api.run import RunReport, SideMeasurement, missed


@pytest.fixture(scope="module")
def planned():
    return msgspec.structs.replace(plan("plain-mlp-toy", device="rtx3090"), latency_source="measured")


def report(peak_bytes: int, overhead: float, batch: int = 64) -> RunReport:
    side = SideMeasurement(peak_bytes, peak_bytes, 1.0, 0.0, None, peak_bytes)
    return RunReport(side, side, peak_bytes, peak_bytes, None, "none", 1, batch, overhead)


@pytest.mark.parametrize(
    ("limit", "found", "words"),
    [
        (Limit(), report(10**9, 9.0), None),
        (Limit(1.1), report(10, 0.1), None),
        (Limit(1.1), report(10, 0.11), "+11.0 % time measured"),
        (Limit(None, 1024), report(1024, 9.0), None),
        (Limit(None, 1024), report(1025, 0.0), "1.0 KiB allowed"),
        (Limit(None, 1024), report(1025, 0.0, batch=32), None),
    ],
)
def test_limits_are_judged_by_what_was_measured(planned, limit, found, words) -> None:
    said = missed(msgspec.structs.replace(planned, limit=limit), found)
    assert said is None if words is None else words in said


def test_a_simulated_plan_is_not_judged_by_this_machine(planned) -> None:
    simulated = msgspec.structs.replace(planned, latency_source="simulated", limit=Limit(1.0))
    assert missed(simulated, report(10, 1.0)) is None
