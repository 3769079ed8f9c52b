"""A user's mistakes: one line that says what to do, the right exit code, and nothing half-written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from saying import Magis, Said

PLAN = ("plan", "--device", "rtx3090", "-o", "out.json")


def refused(said: Said, code: int, *words: str) -> None:
    assert said.code == code
    assert said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and said.err.endswith("\n"), said.err
    for word in words:
        assert word in said.err, f"{word!r} is not in {said.err!r}"


MODELS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "unknown model": (("hf-brt",), 2, ("no model 'hf-brt'", "did you mean hf-bert", "`magis models`")),
    "nothing alike": (("zzz",), 2, ("no model 'zzz'", "`magis models`", "file.py:factory")),
    "file without factory": (("../m.py",), 2, ("is a file", "../m.py:factory")),
    "no such file": (("gone.py:make",), 2, ("no such file: gone.py",)),
    "no such function": (("../m.py:tinny",), 2, ("no function 'tinny'", "it has")),
    "module fails to import": (("no.such.module:make",), 2, ("no.such.module", "cannot be loaded")),
    "factory raises": (("../m.py:broken",), 2, ("raised RuntimeError: no weights",)),
    "factory ends the program": (("../m.py:ends",), 1, ("sys.exit",)),
    "wrong tuple": (("../m.py:pair",), 2, ("a tuple of 2 items", "return (model, loss_fn, batch)")),
    "no module": (("../m.py:no_module",), 2, ("not a torch.nn.Module",)),
    "no batch": (("../m.py:no_batch",), 2, ("the batch holds no tensor",)),
    "empty batch": (("../m.py:empty_batch",), 2, ("the batch is empty",)),
    "loss no scalar": (("../m.py:vector_loss",), 2, ("shape (16, 8)", "return a scalar")),
    "value of a tensor": (("../m.py:asking",), 1, (".item()", "m.py:", "torch.where")),
    "shapes do not fit": (("../m.py:misfit",), 1, ("up (", "m.py:")),
    "unknown size": (("../m.py:tiny", "--seq", "4"), 2, ("takes no 'seq' argument", "leave --seq out")),
    "zoo model without sequence": (("plain-mlp-toy", "--seq", "4"), 2, ("has no seq size", "leave --seq out")),
    "batch 0": (("plain-mlp-toy", "--batch", "0"), 2, ("--batch", "`magis plan --help`")),
    "batch too small": (("plain-mlp-toy", "--batch", "1"), 2, ("--batch 1 is too small", "at least 2")),
    "batch no number": (("plain-mlp-toy", "--batch", "many"), 2, ("--batch", "`magis plan --help`")),
    "unknown device": (("plain-mlp-toy", "--device", "rtx4090"), 2, ("unknown device 'rtx4090'", "rtx3090")),
    "no device file": (("plain-mlp-toy", "--device", "gone.toml"), 2, ("device file 'gone.toml'",)),
    "unknown option": (("plain-mlp-toy", "--batsch", "4"), 2, ("--batsch", "`magis plan --help`")),
    "missing argument": ((), 2, ("missing argument 'MODEL'", "`magis plan --help`")),
    "output is a folder": (("plain-mlp-toy", "-o", "."), 2, ("cannot write .", "a folder")),
    "no folder for the output": (("plain-mlp-toy", "-o", "a/b.json"), 2, ("cannot write", "no folder a")),
    "unwritable folder": (("plain-mlp-toy", "-o", "/proc/b.json"), 2, ("cannot write /proc/b.json",)),
    "output is a device": (("plain-mlp-toy", "-o", "/dev/null"), 2, ("no regular file",)),
}


@pytest.mark.parametrize("name", MODELS)
def test_plan_refuses(name: str, magis: Magis, folder: Path) -> None:
    arguments, code, words = MODELS[name]
    refused(magis(*PLAN, *arguments), code, *words)
    assert list(folder.iterdir()) == []


def test_an_unwritable_output_is_found_before_the_model_is_touched(magis: Magis) -> None:
    refused(magis("plan", "../m.py:broken", "--device", "rtx3090", "-o", "a/b.json"), 2, "no folder a")


def test_a_damaged_device_file(magis: Magis, folder: Path) -> None:
    (folder / "gpu.toml").write_text("sms = ")
    refused(magis(*PLAN, "plain-mlp-toy", "--device", "gpu.toml"), 2, "gpu.toml", "TOML")


def test_an_unknown_command(magis: Magis) -> None:
    refused(magis("plann"), 2, "plann", "`magis --help`")


@pytest.fixture
def plan_path(magis: Magis, folder: Path) -> Path:
    assert magis("plan", "../m.py:tiny", "--device", "rtx3090").code == 0
    return folder / "m-tiny.plan.json"


def _edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _renamed(plan: dict[str, Any], old: str, new: str) -> None:
    assert old in plan["program"]
    plan["program"] = plan["program"].replace(old, new)


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], tuple[str, ...]]] = {
    "other version": (lambda plan: plan.update(format=99), ("plan format 99", "reads format 3")),
    "missing field": (lambda plan: plan.pop("digest"), ("digest",)),
    "unknown field": (lambda plan: plan.update(extra=1), ("extra",)),
    "wrong type": (lambda plan: plan.update(batch="many"), ("batch",)),
    "program cut off": (lambda plan: plan.update(program=plan["program"][:-4]), ("program",)),
    "line unreadable": (lambda plan: _renamed(plan, "aten.relu.default(", "aten.relu.default["), ("line",)),
    "operator os.system": (lambda plan: _renamed(plan, "aten.relu.default(", "os.system("), ("os.system",)),
    "operator of the loader": (
        lambda plan: _renamed(plan, "aten.relu.default(", "load_library.__call__.x("),
        ("load_library",),
    ),
    "reads what is not there": (lambda plan: _renamed(plan, "mean.default(%", "mean.default(%9"), ("invalid",)),
    "schedule no order": (
        lambda plan: plan.update(schedule=" ".join(reversed(plan["schedule"].split()))),
        ("invalid", "runs before"),
    ),
    "schedule incomplete": (lambda plan: plan.update(schedule=plan["schedule"][:5]), ("invalid",)),
    "schedule no numbers": (lambda plan: plan.update(schedule="a b"), ("schedule",)),
    "regions": (
        lambda plan: plan.update(
            regions=[{"id": 0, "parent": None, "dimension": "batch", "length": 8, "parts": 2, "nodes": 3}]
        ),
        ("regions",),
    ),
}


@pytest.mark.parametrize("command", ["show", "run"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_plan(command: str, name: str, magis: Magis, plan_path: Path) -> None:
    change, words = DAMAGES[name]
    _edited(plan_path, change)
    before = plan_path.read_bytes()
    refused(magis(command, plan_path), 1, "m-tiny.plan.json", "plan again", *words)
    assert plan_path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"graph {}", b"\xff\x00", b"[1, 2]", b'{"a": 1}'])
def test_a_file_that_is_no_plan(content: bytes, magis: Magis, folder: Path) -> None:
    (folder / "x.json").write_bytes(content)
    refused(magis("show", "x.json"), 1, "x.json is no plan", "`magis plan MODEL -o x.json`")


def test_a_truncated_plan(magis: Magis, plan_path: Path) -> None:
    plan_path.write_bytes(plan_path.read_bytes()[:-300])
    refused(magis("show", plan_path), 1, "is no plan, or is damaged")


def test_a_plan_that_is_not_there(magis: Magis) -> None:
    refused(magis("run", "gone.json"), 2, "no such plan: gone.json", "`magis plan MODEL -o gone.json`")


def test_a_folder_as_plan(magis: Magis) -> None:
    refused(magis("show", "."), 2, "cannot read .", "directory")


def test_a_plan_of_another_size(magis: Magis, plan_path: Path) -> None:
    _edited(plan_path, lambda plan: plan["sizes"].update(batch=4))
    refused(magis("run", plan_path), 1, "batch 16, not 4", "`magis plan ../m.py:tiny --batch 4`")


def test_a_plan_of_another_model(magis: Magis, plan_path: Path) -> None:
    _edited(plan_path, lambda plan: plan.update(model="plain-mlp-toy"))
    refused(magis("run", plan_path), 1, "does not fit plain-mlp-toy", "plan again")


def test_code_or_json(magis: Magis, plan_path: Path) -> None:
    refused(magis("show", plan_path, "--code", "--json"), 2, "--code and --json")


def test_a_defect_is_one_line_and_how_to_see_more(magis: Magis, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise KeyError("what")

    monkeypatch.setattr("magis.api.models.resolve", defect)
    refused(magis("plan", "plain-mlp-toy"), 1, "KeyError", "MAGIS_TRACEBACK=1")
    monkeypatch.setenv("MAGIS_TRACEBACK", "1")
    said = magis("plan", "plain-mlp-toy")
    assert said.code == 1 and "Traceback" in said.err and "in defect" in said.err
