"""Resident memory: the meter against a known allocation, the remedy against the holes of the heap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from magis.backend import resident
from magis.backend.resident import PeakResident, Remedy, follow_live, release_free_memory, resident_bytes

MIB = 1 << 20
LIVE_MIB = 48
CHURN = f"""
import contextlib, random, sys, torch
from magis.backend.resident import PeakResident, follow_live

torch.set_num_threads(1)

def ones(nbytes):
    return torch.ones(nbytes, dtype=torch.uint8)

def step():
    rng, live, small = random.Random(0), [], []
    for _ in range(800):
        live.append(ones(rng.choice((1, 1, 2, 4)) << 20))
        small.append([ones(16 * size) for size in range(1, 12)])  # between the large ones, to the end
        while sum(tensor.numel() for tensor in live) > {LIVE_MIB} << 20:
            del live[rng.randrange(len(live))]

with follow_live() if sys.argv[1] == "remedy" else contextlib.nullcontext():
    for _ in range(2):
        step()
    with PeakResident() as meter:
        step()
print(meter.growth_bytes)
"""


@pytest.fixture
def active() -> None:
    """Skips where there is nothing to remedy."""
    with follow_live() as remedy:
        if not remedy.active:
            pytest.skip(remedy.description)


def offsets(count: int = 32) -> set[int]:
    """Where new tensors lie, in bytes from a multiple of 64."""
    tensors = [torch.empty(4096 + 16 * i, dtype=torch.uint8) for i in range(count)]
    return {tensor.data_ptr() % 64 for tensor in tensors}


def churned_bytes(side: str) -> int:
    """Growth of a fresh process in which tensors of many sizes come and go, at most `LIVE_MIB` at a time."""
    command = [sys.executable, "-c", CHURN, side]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_growth_of_a_known_allocation() -> None:
    with PeakResident() as meter:
        block = torch.ones(100_000_000, dtype=torch.uint8)
        del block
    if meter.growth_bytes is None:
        pytest.skip("the kernel's high-water mark cannot be reset here")
    assert 98e6 < meter.growth_bytes < 130e6


def test_growth_without_an_allocation() -> None:
    with PeakResident() as meter:
        pass
    assert meter.growth_bytes is None or meter.growth_bytes < 8 * MIB


def test_resident_bytes_rise_with_what_is_filled() -> None:
    before = resident_bytes()
    if before is None:
        pytest.skip("no /proc here")
    block = torch.ones(100_000_000, dtype=torch.uint8)
    after = resident_bytes()
    assert after is not None and after - before > 60e6
    assert block[-1] == 1


@pytest.mark.usefixtures("active")
def test_memory_follows_the_live_tensors() -> None:
    remedied, plain = churned_bytes("remedy"), churned_bytes("none")
    assert remedied < 2 * LIVE_MIB * MIB
    version = (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0.0").split()[-1].split(".")
    if tuple(map(int, version[:2])) < (2, 38):  # later ones look for an aligned block among the freed ones
        assert 2 * remedied < plain


@pytest.mark.usefixtures("active")
def test_the_end_of_the_last_block_undoes_it() -> None:
    earlier = torch.arange(1000)
    assert offsets() == {0}
    with follow_live() as outer:
        with follow_live() as inner:
            assert inner is outer
            del earlier
        assert offsets() != {0}
        made = torch.arange(1000)
    assert offsets() == {0}
    assert made.sum() == 499_500


@pytest.mark.usefixtures("active")
def test_an_error_inside_undoes_it_too() -> None:
    with pytest.raises(ZeroDivisionError), follow_live():
        1 / 0  # noqa: B018
    assert offsets() == {0}


@pytest.mark.usefixtures("active")
def test_thresholds_from_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    with follow_live() as remedy:
        assert remedy.active
        assert remedy.description.endswith("malloc thresholds from the environment")


def test_elsewhere_it_only_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_glibc", lambda: None)
    assert release_free_memory() is False
    with follow_live() as remedy:
        assert remedy == Remedy(False, "none (not 64-bit Linux with glibc's malloc)")
        assert offsets() == {0}


def test_another_malloc_is_not_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = iter((1, 2))
    monkeypatch.setattr(resident, "_address", lambda function: next(addresses))
    assert resident._glibc() is None


@pytest.mark.usefixtures("active")
def test_a_build_without_the_jump_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_ALIGNMENT_SYMBOL", b"no_such_symbol")
    with follow_live() as remedy:
        assert not remedy.active
        assert "alignment" in remedy.description


@pytest.mark.usefixtures("active")
def test_an_alignment_that_does_not_change_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_is_aligned_as_pytorch_does", lambda: True)
    with follow_live() as remedy:
        assert not remedy.active
        assert offsets() == {0}


@pytest.mark.usefixtures("active")
def test_whole_pages_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    with follow_live() as remedy:
        assert remedy == Remedy(False, "none (THP_MEM_ALLOC_ENABLE is set)")


def test_a_kernel_that_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resident, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
    monkeypatch.setattr(resident, "_STATM", tmp_path / "none" / "statm")
    with PeakResident() as meter:
        pass
    assert meter.growth_bytes is None
    assert resident_bytes() is None


@pytest.mark.usefixtures("active")
def test_a_folder_with_spaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps = Path("/proc/self/maps").read_text()
    library = next(line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libc10.so" in line)
    folder = tmp_path / "my libs\nand more"
    folder.mkdir()
    (folder / "libc10.so").symlink_to(library)
    escaped = str(folder / "libc10.so").replace("\n", "\\012")
    written = tmp_path / "maps"
    written.write_text(maps.replace(library, escaped))
    monkeypatch.setattr(resident, "_MAPS", written)
    with follow_live() as remedy:
        assert remedy.active


@pytest.mark.parametrize("library", ["/gone/libc10.so", "/gone/libc10.so (deleted)", ""])
def test_a_library_that_is_not_where_the_maps_say(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = tmp_path / "maps"
    written.write_text(f"7f0000000000-7f0000001000 r-xp 00000000 00:1f 42   {library}\n")
    monkeypatch.setattr(resident, "_MAPS", written)
    assert resident._jump_slot(b"any") is None


def test_no_maps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resident, "_MAPS", tmp_path / "none")
    assert resident._jump_slot(b"any") is None
