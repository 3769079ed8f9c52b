"""Baselines of the published networks on rtx3090: peak and latency within 2 % of the published ones."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from magis.api.models import resolve
from magis.api.plan import make_plan

PUBLISHED = {  # peak in GB (1e9 bytes), latency in ms
    "resnet50": (2.71, 99),
    "bert": (12.97, 449),
    "vit": (7.71, 304),
    "unet": (8.58, 467),
    "unetpp": (11.01, 432),
    "gptneo": (28.86, 2391),
    "btlm": (55.27, 5000),
}
SLOW = {"vit", "gptneo", "btlm"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PUBLISHED]
)
def test_baseline(name: str) -> None:
    baseline = make_plan(resolve(name), "rtx3090").baseline
    peak_gb, latency_ms = PUBLISHED[name]
    assert baseline.peak_bytes / 1e9 == pytest.approx(peak_gb, rel=0.02)
    assert baseline.latency_s * 1e3 == pytest.approx(latency_ms, rel=0.02)


@pytest.mark.slow
def test_planning_a_large_model_is_quick_and_small(tmp_path: Path) -> None:
    arguments = (sys.executable, "-m", "magis", "plan", "gptneo", "--device", "rtx3090", "--json", "-o", "x.json")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True)
    elapsed_s = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert json.loads(done.stdout)["baseline"]["peak_bytes"] > 28e9
    assert min(elapsed_s, cpu_s) < 30
    assert after.ru_maxrss < 1_000_000  # KiB, of the largest child so far
