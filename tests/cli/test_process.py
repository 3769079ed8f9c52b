"""The command line as a process: light to start, clean output, interruption, a reader that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

MAGIS = (sys.executable, "-m", "magis")
LIGHT = """
import sys
from magis.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert ended.code == 0, ended.code
heavy = {"torch", "numpy", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


def _run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("models",), ("devices",), ("plan", "--help")])
def test_light_commands_do_not_import_torch(arguments: tuple[str, ...], folder: Path) -> None:
    done = _run(sys.executable, "-c", LIGHT, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_importing_magis_is_light() -> None:
    code = "import sys, magis; magis.PlanError, magis.__version__, dir(magis); assert 'torch' not in sys.modules"
    assert _run(sys.executable, "-c", code).returncode == 0


def test_help_starts_at_once() -> None:
    """In CPU seconds, best of three: the machine may be busy."""

    def cpu_s() -> float:
        before = os.times()
        _run(*MAGIS, "--help")
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(cpu_s() for _ in range(3)) < 0.5


def test_json_and_nothing_else(folder: Path) -> None:
    done = _run(*MAGIS, "plan", "../m.py:talking", "--device", "rtx3090", "--json")
    assert json.loads(done.stdout)["plan"] == "m-talking.plan.json"
    assert "hello" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["m-talking.plan.json"]


def test_a_mistake_in_the_model_is_one_line(folder: Path) -> None:
    done = _run(*MAGIS, "plan", "../m.py:misfit", "--device", "rtx3090")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: up (") and done.stderr.count("\n") == 1
    assert list(folder.iterdir()) == []


def test_interrupted(folder: Path) -> None:
    (folder / "slow.py").write_text("import time\nprint('started', flush=True)\ntime.sleep(60)\n")
    arguments = (*MAGIS, "plan", "slow.py:make", "--device", "rtx3090")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs hand down that it is ignored
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "error: interrupted\n"
        assert process.wait() == 130
    assert [path.name for path in folder.iterdir() if path.suffix == ".json"] == []


def test_a_reader_that_goes_away(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run((*MAGIS, "models"), stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_plan_run_show(folder: Path) -> None:
    """All of it for real: measured plan, proof, certificate."""
    planned = _run(*MAGIS, "plan", "../m.py:updated", "-o", "x.json")
    assert (planned.returncode, planned.stderr) == (0, "")
    done = _run(*MAGIS, "run", "x.json", "--pairs", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["proof"]["ok"] is True and found["proof"]["batch"] == 16
    assert found["optimized"]["peak_bytes"] == pytest.approx(found["predicted_peak_bytes"], rel=0.03)
    assert json.loads((folder / "x.json").read_text())["certificate"]["tensors"] == found["proof"]["tensors"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_run_leaves_no_process_behind(
    how: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, it can remove no folder; terminated, it does."""
    assert _run(*MAGIS, "plan", "../m.py:updated", "--device", "rtx3090", "-o", "x.json").returncode == 0
    (folder / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "temporary"))
    arguments = (*MAGIS, "run", "x.json", "--pairs", "1000000", "--beside", "checkpoint")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        workers = _soon(lambda: _children(process.pid), 3)
        assert list((folder / "temporary").glob("magis-*"))
        process.send_signal(how)
        said = process.stderr.read()
        assert process.wait() == (143 if how == signal.SIGTERM else -how)
    _soon(lambda: [worker for worker in workers if _runs(worker)], 0)
    if how == signal.SIGTERM:
        assert said == "error: terminated\n"
        assert list((folder / "temporary").glob("magis-*")) == []


def _soon(look: Callable[[], list[int]], number: int) -> list[int]:
    """What `look` finds once it finds so many."""
    for _ in range(300):
        found = look()
        if len(found) == number:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{len(found)} processes, not {number}")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    """Whether a process is there and not merely waiting for its parent to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
