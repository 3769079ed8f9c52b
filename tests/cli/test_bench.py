"""`magis bench limits`: the table, and what it calls worse."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from saying import Magis

from magis.bench import limits, planner
from magis.bench.limits import Cell, cells
from magis.bench.planner import Speed

CELL = Cell("unet", "time <= 1.10", 0.0664, 0.066, True, 0.0664, 0.09, ("batch=16",), 100, 10.0, 4.0)


def test_figures_are_compared_at_three_decimals() -> None:
    assert CELL.good
    assert not replace(CELL, figure=0.0666).good
    assert not replace(CELL, met=False).good


def test_the_table(magis: Magis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cells", lambda models, budget_s: iter([CELL, replace(CELL, figure=0.07)]))
    said = magis("bench", "limits", "unet")
    assert said.code == 1
    assert "worse" in said.out
    found = json.loads(magis("bench", "limits", "--json").out)
    assert [cell["good"] for cell in found["cells"]] == [True, False]


def test_a_network_that_is_not_published(magis: Magis) -> None:
    said = magis("bench", "limits", "vgg")
    assert said.code == 2
    assert "vgg is none of the published networks" in said.err


def test_a_cell_is_a_plan() -> None:
    found = list(cells(["unet"], budget_s=60, iterations=1))
    assert [cell.limit for cell in found] == [limit.name for limit in limits.LIMITS]
    assert all(cell.figure > 0 or cell.latency_overhead == 0 for cell in found)


def test_the_speed(magis: Magis, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Speed("bert", 9.0, 5.0, 50_000, 20, 0.09, 0.162)
    slow = replace(fast, evaluated=5000)
    assert fast.evaluated_per_s == 10_000 and fast.good and not slow.good
    assert not replace(fast, memory_ratio=0.17).good
    monkeypatch.setattr(planner, "speeds", lambda models: iter([fast, slow]))
    said = magis("bench", "planner")
    assert said.code == 1
    assert "10,000" in said.out and "worse" in said.out
    assert [line["good"] for line in json.loads(magis("bench", "planner", "--json").out)["speeds"]] == [True, False]
