"""`--swap-dir` and `--host-memory`: really executed on a CPU, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saying import Magis

WIDE = """
import torch


def wide(batch=512):
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    x = torch.randn(batch, 512)
    return model, lambda model, x: model(x).square().mean(), x
"""


@pytest.fixture
def wide(folder: Path) -> str:
    (folder / "wide.py").write_text(WIDE)
    (folder / "swap").mkdir()
    return "wide.py:wide"


def test_a_plan_swaps_to_a_file_and_is_proven(magis: Magis, wide: str, folder: Path) -> None:
    asked = ("plan", wide, "--max-slowdown", 1.3, "--iterations", 12, "-o", "a.plan.json", "--swap-dir", "swap")
    said = magis(*asked, "--json")
    assert said.code == 0
    if not [rule for rule in json.loads(said.out)["search"]["rules"] if rule["name"] == "swap" and rule["kept"]]:
        pytest.skip("recomputing was faster than this disk")
    said = magis("run", "a.plan.json", "--swap-dir", "swap", "--pairs", 1, "--json")
    found = json.loads(said.out)
    assert found["proof"]["ok"]
    assert found["optimized"]["peak_bytes"] == pytest.approx(found["predicted_peak_bytes"], rel=0.03)
    assert list((folder / "swap").iterdir()) == []


def test_a_plan_for_a_gpu_that_swaps_is_proven_here(magis: Magis, wide: str) -> None:
    said = magis("plan", wide, "--device", "rtx3090", "--max-slowdown", 1.05, "--iterations", 12, "--json")
    kept = {rule["name"]: rule["kept"] for rule in json.loads(said.out)["search"]["rules"]}
    assert said.code == 0
    assert kept["swap"] > 0
    code = magis("show", "wide-wide.plan.json", "--code").out
    assert code.count(" = store(") == code.count(" = load(") == kept["swap"]
    assert "proven equal to eager" in magis("run", "wide-wide.plan.json", "--pairs", 1).out


def test_no_host_memory_is_no_swapping(magis: Magis, wide: str) -> None:
    asked = (
        "plan",
        wide,
        "--device",
        "rtx3090",
        "--max-slowdown",
        1.05,
        "--iterations",
        8,
        "--host-memory",
        "0",
        "--json",
    )
    kept = {rule["name"]: rule["kept"] for rule in json.loads(magis(*asked).out)["search"]["rules"]}
    assert kept["swap"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host-memory", "10%"), "no size of host memory"),
        (("--host-memory", "much"), "no memory limit"),
        (("--swap-dir", "nowhere"), "cannot swap to nowhere"),
    ],
)
def test_what_nothing_can_be_swapped_to(magis: Magis, wide: str, arguments: tuple[str, str], words: str) -> None:
    said = magis("plan", wide, "--max-slowdown", 1.1, *arguments)
    assert said.code == 2
    assert words in said.err
    assert said.err.count("\n") == 1
