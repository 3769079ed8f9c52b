"""The plan file: what is written comes back, damage is refused, a file is whole or not there."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from magis.api.models import resolve
from magis.api.plan import Certificate, Plan, make_plan, program_hash
from magis.api.plan_file import (
    check_plan,
    check_writable,
    default_path,
    load_plan,
    program_of,
    save_plan,
    with_certificate,
)
from magis.errors import PlanError, UsageError
from magis.ir.fingerprint import digest


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(resolve("plain-mlp-toy"), "rtx3090")


def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    proven = with_certificate(plan, Certificate(program_hash(plan), str(torch.__version__), "cpu", 64, 13, 1e-7))
    save_plan(proven, path)
    assert load_plan(path) == proven
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]
    program, schedule = program_of(proven)
    assert digest(program.graph) == plan.digest
    assert schedule == tuple(program.graph.nodes)


def test_an_edited_plan_is_not_proven(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    proof = Certificate(program_hash(plan), str(torch.__version__), "cpu", 64, 13, 1e-7)
    first, second, *rest = plan.schedule.split()
    save_plan(replace(plan, certificate=proof, schedule=" ".join([second, first, *rest])), path)
    assert load_plan(path).certificate is None


def test_the_same_plan_twice(plan: Plan) -> None:
    again = make_plan(resolve("plain-mlp-toy"), "rtx3090")
    same = ("digest", "program", "schedule", "latencies_s", "cost_table", "baseline", "optimized")
    assert all(getattr(again, name) == getattr(plan, name) for name in same)


@pytest.mark.parametrize("model", ["plain-mlp-toy", "resnet50-toy"])
def test_it_fits_the_model_built_for_real(model: str) -> None:
    from magis.capture.capture import capture

    source = resolve(model)
    check_plan(make_plan(source, "rtx3090"), capture(source.build(fake=False)))


def test_another_size_does_not_fit(plan: Plan) -> None:
    other = resolve("plain-mlp-toy", {"batch": 32}).capture()
    with pytest.raises(PlanError, match=r"batch 64, not 32.*f32\[64,64\] when planned and is f32\[32,64\]"):
        check_plan(plan, other)


def test_another_model_does_not_fit(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"the plan does not fit resnet50-toy: .*plan again"):
        check_plan(plan, resolve("resnet50-toy").capture())


def test_other_operators_do_not_fit(plan: Plan) -> None:

    captured = resolve("plain-mlp-toy").capture()
    with pytest.raises(PlanError, match="the operators of plain-mlp-toy are not those that were planned"):
        check_plan(replace(plan, digest="0" * 32), captured)
    with pytest.raises(PlanError, match=r"planned with torch 2\.9, this is"):
        check_plan(replace(plan, digest="0" * 32, torch="2.9"), captured)


def test_other_results_do_not_fit(plan: Plan) -> None:

    swapped = plan.program.replace('"loss"', '"gain"')
    with pytest.raises(PlanError, match="hands back other results"):
        check_plan(replace(plan, program=swapped), resolve("plain-mlp-toy").capture())


def test_every_damage_is_a_plan_error(plan: Plan, tmp_path: Path) -> None:
    """Hundreds of random edits of the file: each is refused in one line, or changes nothing that is checked."""
    path = tmp_path / "a.json"
    save_plan(plan, path)
    content = path.read_bytes()
    random_ = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        place = random_.randrange(len(damaged))
        match random_.randrange(3):
            case 0:
                damaged[place] = random_.randrange(256)
            case 1:
                del damaged[place : place + random_.randrange(1, 40)]
            case 2:
                damaged[place:place] = bytes(random_.choices(b'()[]{}%",.0aZ#&!-\\', k=3))
        path.write_bytes(damaged)
        try:
            load_plan(path)
        except PlanError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 150


def test_a_reader_never_sees_half_a_plan(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    save_plan(plan, path)
    writer = threading.Thread(target=lambda: [save_plan(plan, path) for _ in range(20)])
    writer.start()
    while writer.is_alive():
        json.loads(path.read_bytes())
    writer.join()


def test_a_failed_write_leaves_the_old_plan(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="no space left on device"):
        save_plan(plan, path)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("hf-bert", "hf-bert.plan.json"),
        ("dir/my model.py:make", "my-model-make.plan.json"),
        ("../m.py:tiny", "m-tiny.plan.json"),
        ("package.module:factory", "package.module-factory.plan.json"),
    ],
)
def test_default_name(model: str, name: str) -> None:
    assert default_path(model) == Path(name)


def test_check_writable_leaves_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []
    for path in (tmp_path, tmp_path / "no" / "a.json", Path("/dev/null")):
        with pytest.raises(UsageError, match="cannot write"):
            check_writable(path)
