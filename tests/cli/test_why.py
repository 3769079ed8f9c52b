"""`magis why` of a plan: the peak that the plan predicts, with the workspace that it knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saying import Magis

NOT_MEASURED = "operators' workspace is not measured: `magis plan` on the model finds it"


@pytest.fixture
def plan_path(magis: Magis, folder: Path) -> Path:
    assert magis("plan", "../m.py:updated", "--device", "rtx3090").code == 0
    path = folder / "m-updated.plan.json"
    content = json.loads(path.read_text())
    content["workspaces_bytes"] = [3 << 20] * len(content["workspaces_bytes"])
    path.write_text(json.dumps(content))
    return path


def test_the_workspace_is_a_row(magis: Magis, plan_path: Path) -> None:
    said = magis("why", plan_path)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("../m.py:updated, batch 16: peak 3.0 MiB\n")
    rows = [line.split() for line in said.out.splitlines() if line.startswith(" workspace of ")]
    assert [row[3:] for row in rows] == [["3.0", "MiB", "99.7%"]] and rows[0][2] == "threshold_backward"
    assert NOT_MEASURED not in said.out


def test_without_a_plan_it_says_that_it_is_not_known(magis: Magis) -> None:
    said = magis("why", "../m.py:updated")
    assert NOT_MEASURED in said.out and "workspace of" not in said.out


def test_as_json(magis: Magis, plan_path: Path) -> None:
    of_plan, of_model = (json.loads(magis("why", of, "--json").out) for of in (plan_path, "../m.py:updated"))
    assert (of_plan["workspace_known"], of_plan["workspace_bytes"]) == (True, 3 << 20)
    assert (of_model["workspace_known"], of_model["workspace_bytes"]) == (False, 0)
    assert of_plan["peak_bytes"] == of_model["peak_bytes"] + (3 << 20)


def test_mistakes(magis: Magis, plan_path: Path, folder: Path) -> None:
    said = magis("why", plan_path, "--seq", 4)
    assert (said.code, said.out) == (2, "") and "leave --seq out" in said.err
    assert magis("why", "gone.json").code == 2
    (folder / "x.json").write_text("{}")
    said = magis("why", "x.json")
    assert said.code == 1 and "x.json is no plan" in said.err
