"""Whether a run fits this machine: what it needs, what is free, and what is done when it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from magis.api import run
from magis.api.instance import instantiate
from magis.api.plan import Plan, plan
from magis.errors import UsageError
from magis.fission.tree import Program
from magis.lower.lower import lower
from magis.sim.timeline import timeline

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up machine with 8000 MiB free and no cgroup."""
    monkeypatch.setattr(run, "PROC", tmp_path / "proc")
    monkeypatch.setattr(run, "CGROUPS", tmp_path / "cgroup")
    _write(tmp_path / "proc/meminfo", f"MemTotal: {9000 * 1024} kB\nMemAvailable: {8000 * 1024} kB\n")
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _group_v2(machine: Path, path: str, limit: str, used: int, inactive: int = 0) -> None:
    folder = machine / "cgroup" / path
    _write(folder / "memory.max", f"{limit}\n")
    _write(folder / "memory.current", f"{used * MIB}\n")
    _write(folder / "memory.stat", f"anon 5\ninactive_file {inactive * MIB}\n")


def _group_v1(machine: Path, path: str, limit: int, used: int) -> None:
    folder = machine / "cgroup/memory" / path
    _write(folder / "memory.limit_in_bytes", f"{limit * MIB}\n")
    _write(folder / "memory.usage_in_bytes", f"{used * MIB}\n")
    _write(folder / "memory.stat", f"inactive_file 0\ntotal_inactive_file {10 * MIB}\n")


def test_without_a_group(machine: Path) -> None:
    assert run.free_bytes() == 8000 * MIB


def test_where_nothing_is_known(machine: Path) -> None:
    (machine / "proc/meminfo").unlink()
    assert run.free_bytes() is None


def test_the_tightest_group_counts_and_its_idle_file_pages_are_free(machine: Path) -> None:
    _write(machine / "proc/self/cgroup", "0::/a/b\n")
    _group_v2(machine, "a/b", "max", 100)
    _group_v2(machine, "a", str(1000 * MIB), 300, inactive=50)
    assert run.free_bytes() == 750 * MIB
    _group_v2(machine, "a/b", str(200 * MIB), 100)
    assert run.free_bytes() == 100 * MIB
    _group_v2(machine, "a/b", str(200 * MIB), 300)
    assert run.free_bytes() == 0


def test_a_wide_group_does_not_add_memory(machine: Path) -> None:
    _write(machine / "proc/self/cgroup", "0::/\n")
    _group_v2(machine, ".", str(10**6 * MIB), 300)
    assert run.free_bytes() == 8000 * MIB


@pytest.mark.parametrize("path", ["/docker/abc", "/"])
def test_version_1_also_where_the_path_is_the_hosts(path: str, machine: Path) -> None:
    _write(machine / "proc/self/cgroup", f"5:cpu:{path}\n4:memory:{path}\n0::/\n")
    _group_v1(machine, ".", 2000, 500)
    assert run.free_bytes() == 1510 * MIB


# ---- what is needed


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan("plain-mlp-toy", device="rtx3090")


def test_all_processes_and_their_copies_are_counted(planned: Plan) -> None:
    instance = instantiate(planned)
    found = timeline(lower(Program(instance.captured.graph), instance.captured.schedule))
    resident, step = found.resident_bytes, found.peak_bytes - found.resident_bytes
    process = run.PROCESS_BYTES + 2 * resident
    assert run.needed_bytes(instance, check=False, rivals=0) == 2 * process + int(1.5 * step) + step
    one, two = (run.needed_bytes(instance, check=False, rivals=number) for number in (1, 2))
    assert two - one == pytest.approx(process + 1.2 * step, abs=2)
    gradients = planned.baseline.parameter_bytes
    assert one >= 3 * process + int(3.5 * step) + 2 * gradients
    proven = run.needed_bytes(instance, check=True, rivals=0)
    assert proven >= 2 * process + int(3.5 * step) + 3 * resident + 2 * gradients


def test_large_blocks_do_not_stay_with_a_process(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = instantiate(planned)
    found = timeline(instance.routine())
    monkeypatch.setattr(run, "MMAP_THRESHOLD_BYTES", 0)
    step = found.peak_bytes - found.resident_bytes
    process = run.PROCESS_BYTES + 2 * found.resident_bytes
    assert run.needed_bytes(instance, check=False, rivals=0) == 2 * process + 2 * step


def test_a_convolution_in_float64_is_laid_out_for_its_kernel() -> None:
    """PyTorch's own float64 convolution: 3 x 3 times the input, and its square."""
    instance = instantiate(plan("monai-unet-toy", device="rtx3090"))
    widest = 4 * 32 * 128 * 128  # examples, channels and pixels of the last block's input
    alone = run.needed_bytes(instance, check=False, rivals=0)
    assert run.needed_bytes(instance, check=False, rivals=1) > alone + 9 * 16 * widest


def _free(monkeypatch: pytest.MonkeyPatch, nbytes: float) -> None:
    monkeypatch.setattr(run, "free_bytes", lambda: int(nbytes))


def test_what_fits_runs_as_planned(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, run.needed_bytes(instantiate(planned), True, 0) / run.MEMORY_SHARE + 2)
    instance, batch, notes = run._that_fits(planned, True, 0)
    assert (batch, notes, instance.program.graph.name) == (64, (), "plain-mlp-toy")


def test_what_does_not_fit_runs_at_a_smaller_batch(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, run.needed_bytes(instantiate(planned, 16), True, 1) / run.MEMORY_SHARE + 2)
    _, batch, notes = run._that_fits(planned, True, 1)
    assert batch == 16
    assert len(notes) == 1 and "at batch 64" in notes[0] and notes[0].endswith("proof and measurements at batch 16")
    assert run._that_fits(planned, False, 0)[1] == 64  # fewer processes, no proof


def test_a_method_must_fit_the_smaller_batch(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, run.needed_bytes(instantiate(planned, 16), True, 1) / run.MEMORY_SHARE + 2)
    with pytest.raises(UsageError, match="the batch has 16 examples"):
        run.run_plan(planned, beside=["micro:32"])


def test_what_never_fits_is_refused(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 100 * MIB)
    with pytest.raises(UsageError, match=r"needs 0\.\d GiB at batch 64, 0\.1 GiB are free; .* at batch 1 it cannot"):
        run.run_plan(planned)
