"""`magis plan` under limits: what it prints, its exit codes, its one-line errors."""

import json
from pathlib import Path

import pytest
from saying import Magis

from magis.rules.registry import rules

DEEP = """
import torch


def deep(batch=16):
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Dropout(0.1))]
    model = torch.nn.Sequential(*layers)
    x = torch.randn(batch, 32)
    return model, lambda model, x: model(x).square().mean(), x
"""


@pytest.fixture
def deep(folder: Path) -> str:
    (folder / "deep.py").write_text(DEEP)
    return "deep.py:deep"


def planned(magis: Magis, *arguments: object) -> tuple[int, dict, str]:
    said = magis("plan", *arguments, "--device", "rtx3090", "--json", "-o", "deep.plan.json")
    return said.code, json.loads(said.out), said.err


def test_a_memory_limit_is_met(magis: Magis, deep: str) -> None:
    code, found, err = planned(magis, deep, "--batch", 512, "--memory", "80%", "--iterations", 40)
    assert (code, err, found["met"]) == (0, "", True)
    assert found["optimized"]["peak_bytes"] <= found["limit"]["memory_bytes"] < found["baseline"]["peak_bytes"]
    assert found["limit"]["memory_bytes"] == int(0.8 * found["baseline"]["peak_bytes"])
    assert found["latency_overhead"] > 0
    assert [rule["name"] for rule in found["search"]["rules"]] == list(rules())
    assert "eager" in [start["name"] for start in found["search"]["starts"]]


def test_a_slowdown_limit_is_kept(magis: Magis, deep: str) -> None:
    code, found, _ = planned(magis, deep, "--batch", 512, "--max-slowdown", 1.2, "--iterations", 40)
    assert (code, found["limit"]["max_slowdown"]) == (0, 1.2)
    assert found["memory_ratio"] < 1
    assert found["optimized"]["latency_s"] <= 1.2 * found["baseline"]["latency_s"]


def test_a_limit_that_is_missed_is_exit_code_3_and_the_best_plan_is_written(magis: Magis, deep: str) -> None:
    code, found, err = planned(magis, deep, "--batch", 512, "--memory", "1%", "--iterations", 40)
    assert (code, found["met"]) == (3, False)
    assert (
        found["memory_ratio"]
        <= min(s["peak_bytes"] for s in found["search"]["starts"]) / found["baseline"]["peak_bytes"]
    )
    assert err.count("\n") == 1 and "the lowest peak known is" in err
    shown = magis("run", "deep.plan.json", "--pairs", 1, "--json")
    assert (shown.code, json.loads(shown.out)["proof"]["ok"]) == (0, True)


def test_both_limits(magis: Magis, deep: str) -> None:
    code, found, _ = planned(magis, deep, "--batch", 512, "--memory", "30%", "--max-slowdown", 1.01, "--iterations", 40)
    assert (code, found["met"]) == (3, False)
    assert found["optimized"]["latency_s"] <= 1.01 * found["baseline"]["latency_s"]


def test_the_table_says_how_the_plan_was_found(magis: Magis, deep: str) -> None:
    said = magis("plan", deep, "--batch", 512, "--device", "rtx3090", "--memory", "80%", "--iterations", 30)
    assert said.code == 0
    for words in ("started from", "recompute each block", "choice", "variants", "rule", "kept", "iterations used up"):
        assert words in said.out
    shown = magis("show", "deep-deep.plan.json").out
    assert "of eager's" in shown and ": met\n" in shown and "# computed again: " in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--memory", "0"), "memory limit of 0"),
        (("--memory", "-1GiB"), "'-1GiB' is no memory limit"),
        (("--memory", "abc"), "'abc' is no memory limit"),
        (("--memory", "8GX"), "'8GX' is no memory limit"),
        (("--memory", "0%"), "memory limit of 0%"),
        (("--max-slowdown", "0"), "slowdown of at most 0"),
        (("--max-slowdown", "0.9"), "slowdown of at most 0.9"),
        (("--max-slowdown", "nan"), "slowdown of at most nan"),
        (("--budget", "-1"), "budget of -1 s"),
        (("--iterations", "-1"), "-1 iterations"),
    ],
)
def test_impossible_limits_are_one_line(magis: Magis, arguments: tuple[str, str], words: str) -> None:
    said = magis("plan", "plain-mlp-toy", *arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1 and words in said.err and "pass" in said.err


@pytest.mark.parametrize(
    "options", [("--starts", "none"), ("--search", "paper"), ("--without", "split", "--without", "swap")]
)
def test_ways_to_search(magis: Magis, deep: str, options: tuple[str, ...]) -> None:
    _, found, _ = planned(magis, deep, "--batch", 512, "--max-slowdown", 1.2, "--iterations", 40, *options)
    assert found["met"] and found["memory_ratio"] < 1
    starts = {start["name"] for start in found["search"]["starts"]}
    assert ("recompute each block" in starts) == (options[0] == "--without")
    used = {rule["name"] for rule in found["search"]["rules"] if rule["kept"]}
    assert not used.intersection(options[1::2])


@pytest.mark.parametrize("rule", ["recompute", "parts", "split"])
def test_a_rule_that_is_left_out_is_nowhere(magis: Magis, deep: str, rule: str) -> None:
    _, found, _ = planned(magis, deep, "--batch", 512, "--max-slowdown", 1.2, "--iterations", 60, "--without", rule)
    (use,) = (use for use in found["search"]["rules"] if use["name"] == rule)
    assert (use["sites"], use["applied"], use["kept"]) == (0, 0, 0)
    assert rule != "recompute" or "recompute each block" not in {each["name"] for each in found["search"]["starts"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--starts", "some"), "pass all or none"),
        (("--search", "worst"), "pass best or paper"),
        (("--without", "magic"), "there are add to elements, "),
    ],
)
def test_ways_to_search_that_are_none(magis: Magis, deep: str, options: tuple[str, ...], words: str) -> None:
    said = magis("plan", deep, *options)
    assert said.code == 2 and words in said.err
