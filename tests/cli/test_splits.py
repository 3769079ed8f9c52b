"""`magis dims` and `magis plan --split`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saying import Magis

MODEL = ("plain-mlp-toy", "--batch", 8)


def test_dims(magis: Magis) -> None:
    said = magis("dims", *MODEL)
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0].split() == [
        "dimension", "length", "pieces", "operators", "bytes", "of", "all", "modules",
    ]  # fmt: skip
    found = json.loads(magis("dims", *MODEL, "--json").out)
    assert list(found) == ["model", "dimensions"]
    keys = ["name", "length", "components", "operators", "nbytes", "share", "modules", "halo"]
    assert all(list(dimension) == keys for dimension in found["dimensions"])
    batch = next(dimension for dimension in found["dimensions"] if dimension["name"] == "batch")
    assert batch["length"] == 8
    assert 0 < batch["share"] <= 1
    sizes = [dimension["nbytes"] for dimension in found["dimensions"]]
    assert sizes == sorted(sizes, reverse=True)


def test_a_split_by_hand(magis: Magis, folder: Path) -> None:
    said = magis("plan", *MODEL, "--device", "rtx3090", "--split", "features=4", "--split", "batch=2", "--json")
    assert (said.code, said.err) == (0, "")
    found = json.loads(said.out)
    assert found["search"]["stop_reason"] == "made by hand"
    assert {region["dimension"] for region in found["regions"]} == {"features", "batch"}
    keys = ["id", "parent", "dimension", "length", "parts", "nodes", "wide", "halo", "cuts"]
    assert all(list(region) == keys for region in found["regions"])
    assert all(region["parts"] == {"features": 4, "batch": 2}[region["dimension"]] for region in found["regions"])
    plan = folder / "plain-mlp-toy.plan.json"
    assert "# region 0:" in magis("show", plan).out
    assert "in range(1):" in magis("show", plan, "--code").out  # after the first part, which begins the sums
    damaged = plan.read_text().replace('"cuts": "', '"cuts": "9999:0.1.4 ', 1)
    plan.write_text(damaged)
    said = magis("show", plan)
    assert (said.code, len(said.err.splitlines())) == (1, 1)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("batch", "is no split"),
        ("batch=1", "is no split"),
        ("depth=2", "there is no dimension 'depth'"),
        ("batch=2@nowhere", "no operator belongs to a module 'nowhere'"),
    ],
)
def test_impossible_splits(magis: Magis, split: str, words: str) -> None:
    said = magis("plan", *MODEL, "--device", "rtx3090", "--split", split)
    assert (said.code, said.out, len(said.err.splitlines())) == (2, "", 1)
    assert words in said.err


def test_an_impossible_accumulator(magis: Magis) -> None:
    said = magis("plan", *MODEL, "--accumulate", "float64")
    assert said.code == 2
    assert "float32 or same" in said.err
