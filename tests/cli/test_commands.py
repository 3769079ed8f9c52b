"""What each command prints, as text (golden) and as JSON; and `run`, with the measuring left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from saying import Magis

Golden = Callable[[str, str], None]


def _plain(text: str) -> str:
    """Without what differs between versions."""
    return re.sub(r"made by magis \S+ with torch \S+", "made by magis X with torch Y", text)


@pytest.fixture
def plan_path(magis: Magis, folder: Path) -> Path:
    said = magis("plan", "../m.py:updated", "--device", "rtx3090")
    assert (said.code, said.err) == (0, "")
    return folder / "m-updated.plan.json"


def test_plan_text(magis: Magis, golden: Golden) -> None:
    said = magis("plan", "../m.py:updated", "--device", "rtx3090")
    golden("plan.txt", said.out)


def test_plan_json(magis: Magis, folder: Path) -> None:
    said = magis("plan", "../m.py:tiny", "--batch", 32, "--device", "a100-80g", "-o", "x.json", "--json")
    assert (said.code, said.err) == (0, "")
    found = json.loads(said.out)
    assert list(found) == [
        "model",
        "batch",
        "device",
        "latency_source",
        "limit",
        "met",
        "baseline",
        "optimized",
        "memory_ratio",
        "latency_overhead",
        "regions",
        "search",
        "plan",
    ]
    assert (found["model"], found["batch"], found["plan"]) == ("../m.py:tiny", 32, "x.json")
    assert (found["device"], found["latency_source"]) == ("a100-80g", "simulated")
    assert found["limit"] == {"max_slowdown": None, "memory_bytes": None} and found["met"] is True
    assert list(found["baseline"]) == ["peak_bytes", "step_peak_bytes", "latency_s", "parameter_bytes"]
    assert list(found["optimized"]) == ["peak_bytes", "step_peak_bytes", "latency_s"]
    assert (found["memory_ratio"], found["latency_overhead"], found["regions"]) == (1.0, 0.0, [])
    assert list(found["search"]) == ["seconds", "states", "stop_reason", "best_at_s", "rules", "starts", "evaluated"]
    parameters = 4 * (8 * 32 + 32 + 32 * 8 + 8)
    residents = parameters + 4 * 32 * 8
    assert found["baseline"]["parameter_bytes"] == parameters
    assert found["baseline"]["peak_bytes"] == found["baseline"]["step_peak_bytes"] + residents
    assert (folder / "x.json").is_file()


def test_plan_on_this_machine_is_measured(magis: Magis) -> None:
    said = magis("plan", "../m.py:updated", "--json")
    found = json.loads(said.out)
    assert (found["device"], found["latency_source"]) == ("cpu", "measured")
    assert 0 < found["baseline"]["latency_s"] < 1


def test_a_device_from_a_file(magis: Magis, folder: Path) -> None:
    numbers = {"peak_tflops_fp32": 1, "peak_tflops_bf16": 2, "bandwidth_gb_s": 3, "sms": 4, "memory_gib": 5}
    lines = [f"{key} = {value}" for key, value in (numbers | {"launch_us": 6, "link_gb_s": 7}).items()]
    (folder / "my-gpu.toml").write_text("\n".join(lines))
    found = json.loads(magis("plan", "../m.py:tiny", "--device", "my-gpu.toml", "--json").out)
    assert (found["device"], found["latency_source"]) == ("my-gpu", "simulated")


def test_what_a_factory_prints_stays_out_of_the_json(magis: Magis) -> None:
    said = magis("plan", "../m.py:talking", "--device", "rtx3090", "--json")
    assert json.loads(said.out)["met"] is True
    assert "hello from the factory" in said.err


def test_a_factory_that_needs_real_tensors(magis: Magis) -> None:
    assert magis("plan", "../m.py:only_real", "--device", "rtx3090").code == 0


def test_show_text(magis: Magis, plan_path: Path, golden: Golden) -> None:
    said = magis("show", plan_path)
    assert (said.code, said.err) == (0, "")
    golden("show.txt", _plain(said.out))


def test_show_code(magis: Magis, plan_path: Path, golden: Golden) -> None:
    said = magis("show", plan_path, "--code")
    compile(said.out, "shown", "exec")
    golden("show-code.txt", said.out)


def test_show_json(magis: Magis, plan_path: Path) -> None:
    found = json.loads(magis("show", plan_path, "--json").out)
    assert list(found) == [
        "model",
        "batch",
        "device",
        "latency_source",
        "torch",
        "digest",
        "peak",
        "operators",
        "regions",
        "program",
        "schedule",
        "certificate",
    ]
    names = ["id", "op", "direction", "module", "line", "nbytes", "latency_s", "step", "live_until", "hot", "times"]
    assert all(list(operator) == names for operator in found["operators"])
    inputs = found["program"].count("= input(")
    assert len(found["schedule"]) == inputs + len(found["operators"])
    assert found["peak"]["bytes"] == json.loads(plan_path.read_text())["optimized"]["peak_bytes"]
    assert found["certificate"] is None


def test_why_text(magis: Magis, golden: Golden) -> None:
    said = magis("why", "../m.py:updated", "--top", 4)
    assert (said.code, said.err) == (0, "")
    golden("why.txt", said.out)


def test_why_json(magis: Magis) -> None:
    found = json.loads(magis("why", "plain-mlp-toy", "--json", "--top", 3, "--batch", 128).out)
    assert (found["model"], found["batch"]) == ("plain-mlp-toy", 128)
    assert list(found["peak"]) == ["step", "direction", "module", "line", "op"]
    assert set(found["residents"]) == {"parameter", "buffer", "batch"}
    assert len(found["tensors"]) == len(found["modules"]) == 3
    assert list(found["tensors"][0]) == ["name", "purpose", "nbytes", "shape", "dtype", "born", "dies"]
    assert list(found["modules"][0]) == ["module", "nbytes", "tensors"]
    assert max(found["live_bytes"]) == found["peak_bytes"]
    assert found["live_bytes"][found["peak"]["step"]] == found["peak_bytes"]


def test_why_adds_up(magis: Magis) -> None:
    found = json.loads(magis("why", "plain-mlp-toy", "--json", "--top", 1000).out)
    tensors = sum(tensor["nbytes"] for tensor in found["tensors"])
    assert sum(entry["nbytes"] for entry in found["modules"]) == sum(found["purposes"].values()) == tensors
    assert tensors + found["workspace_bytes"] == found["step_peak_bytes"]
    assert found["step_peak_bytes"] + sum(found["residents"].values()) == found["peak_bytes"]


def test_ops(magis: Magis) -> None:
    said = magis("ops")
    lines = {line.split()[0]: line for line in said.out.splitlines() if line.startswith(" aten.")}
    assert said.code == 0 and len(lines) > 300
    assert "matmul" in lines["aten.mm.default"]
    assert "random" in lines["aten.native_dropout.default"]


def test_ops_missing(magis: Magis, monkeypatch: pytest.MonkeyPatch) -> None:
    said = magis("ops", "missing", "../m.py:tiny")
    assert said.code == 0 and "have a rule" in said.out
    from magis.ops.registry import UNKNOWN, rule_for

    monkeypatch.setattr("magis.ops.registry.rule_for", lambda op: UNKNOWN if op == "aten.t.default" else rule_for(op))
    said = magis("ops", "missing", "../m.py:tiny")
    assert said.code == 1 and re.search(r"aten\.t\.default +\d", said.out)
    assert "1 of" in said.out


def test_lists_as_json(magis: Magis) -> None:
    models = json.loads(magis("models", "--json").out)["models"]
    assert models[0]["name"] == "resnet50" and models[0]["sizes"] == {"batch": 64, "seq": None, "image": 224}
    devices = json.loads(magis("devices", "--json").out)
    assert devices["measured"] == ["cpu"] and devices["simulated"][0]["name"] == "rtx3090"
    operators = {entry["operator"]: entry for entry in json.loads(magis("ops", "--json").out)["operators"]}
    assert operators["aten.mm.default"]["recomputable"] is True
    missing = json.loads(magis("ops", "missing", "../m.py:tiny", "--json").out)
    assert missing["missing"] == {} and missing["operators"] > 5


def test_models_and_devices(magis: Magis) -> None:
    models, devices = magis("models").out, magis("devices").out
    assert re.search(r"hf-bert +32 +512 +transformers", models)
    assert re.search(r"cpu +measured", devices) and re.search(r"rtx3090 +simulated +35\.6 +71", devices)


def _report(proof: Any) -> Any:
    side = SimpleNamespace(
        peak_bytes=2000, step_peak_bytes=1500, latency_s=0.2, latency_spread_s=0.01, resident_growth_bytes=None
    )
    less = SimpleNamespace(**{**vars(side), "peak_bytes": 1000, "step_peak_bytes": 500})
    ratios = {"memory_ratio": 0.5, "step_memory_ratio": 1 / 3, "latency_overhead": 0.05}
    return SimpleNamespace(
        baseline=side,
        optimized=less,
        predicted_peak_bytes=1010,
        proof=proof,
        remedy="none (not glibc)",
        pairs=9,
        notes=("a note",),
        **ratios,
    )


GOOD = SimpleNamespace(ok=True, max_rel_error=1e-7, tensors=5, batch=16, failures=())
BAD = SimpleNamespace(ok=False, max_rel_error=0.5, tensors=5, batch=16, failures=("grad:up.weight: 0.5",))


@pytest.mark.parametrize(
    ("proof", "arguments", "code", "words"),
    [
        (GOOD, (), 0, "proven equal to eager"),
        (BAD, (), 4, "PROOF FAILED"),
        (None, (), 4, "not proven"),
        (None, ("--no-check",), 0, "not proven"),
    ],
)
def test_run_exit_codes(
    proof: Any,
    arguments: tuple[str, ...],
    code: int,
    words: str,
    magis: Magis,
    plan_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    def run_plan(plan: Any, **options: Any) -> Any:
        asked.update(options)
        return _report(proof)

    monkeypatch.setattr("magis.api.run.run_plan", run_plan)
    said = magis("run", plan_path, "--pairs", 3, *arguments)
    assert said.code == code and words in said.out and said.err == "a note\n"
    assert asked["pairs"] == 3 and asked["steps"] is None and asked["check"] is (not arguments)
    certificate = json.loads(plan_path.read_text())["certificate"]
    assert (certificate is not None) == (proof is GOOD)


def test_run_json(magis: Magis, plan_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr("magis.api.run.run_plan", lambda plan, **options: _report(GOOD))
    golden("run.json", magis("run", plan_path, "--json").out)


def test_a_failed_proof_takes_the_certificate_away(
    magis: Magis, plan_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for proof in (GOOD, None, BAD):
        before = json.loads(plan_path.read_text())["certificate"]
        monkeypatch.setattr("magis.api.run.run_plan", lambda plan, proof=proof, **options: _report(proof))
        magis("run", plan_path)
        after = json.loads(plan_path.read_text())["certificate"]
        assert (after is not None) == (proof is GOOD or (proof is None and before is not None))
    assert "not proven yet" in magis("show", plan_path).out


def test_the_certificate_is_shown(magis: Magis, plan_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magis.api.run.run_plan", lambda plan, **options: _report(GOOD))
    magis("run", plan_path)
    assert "proven equal to eager: 5 tensors" in magis("show", plan_path).out
    assert [path for path in plan_path.parent.iterdir() if path.name.startswith(".")] == []
