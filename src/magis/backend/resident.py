"""Resident memory of this process: how far it grows, and a remedy that lets it follow the live tensors (ADR 5).

glibc's `memalign` asks its heap for more than the block and cuts the rest off, so a freed block is too small for
the next one of its size, and small objects settle in the cut-offs. PyTorch takes every CPU tensor that way.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""Larger blocks get pages of their own. The largest that glibc takes, and where its own adjustment ends up."""
ALIGNMENT_BYTES: Final = 16
"""malloc's own on 64-bit systems: up to here `posix_memalign` is `malloc`."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = -1
_ADJUSTED_TRIM_BYTES = 2 * MMAP_THRESHOLD_BYTES  # what glibc's adjustment sets beside the mmap threshold
_ALIGNMENT_SYMBOL = b"_ZN3c1021c10_compute_alignmentEm"
_PYTORCH_ALIGNMENT_BYTES = 64
_STATM, _STATUS, _MAPS = Path("/proc/self/statm"), Path("/proc/self/status"), Path("/proc/self/maps")
_CLEAR_REFS = Path("/proc/self/clear_refs")

Undo = Callable[[], object]


def _nothing() -> None:
    pass


def resident_bytes() -> int | None:
    """Bytes of this process in physical memory now; None where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


class PeakResident:
    """How far resident memory rises inside a `with` block above what was there on entry.

    `growth_bytes` is set on exit, from the kernel's high-water mark; None where the kernel does not let the mark
    be reset. Free memory is handed back on entry, or filling it again would not be seen. The mark belongs to the
    process: blocks must not nest, and other threads count."""

    def __init__(self) -> None:
        self.growth_bytes: int | None = None
        self._before: int | None = None

    def __enter__(self) -> PeakResident:
        release_free_memory()
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            self._before = None
        else:
            self._before = resident_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            mark = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
            self.growth_bytes = max(0, int(mark[1]) * 1024 - self._before) if mark else None


def release_free_memory() -> bool:
    """Hands the pages of freed blocks back to the system; False where there is no glibc to ask.

    The next step has to fetch them again, at 1 to 3 microseconds a 4 KiB page: not for every step."""
    libc = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))


@dataclass(frozen=True, slots=True)
class Remedy:
    """What `follow_live` changed in this process, for reports."""

    active: bool
    description: str


class FollowLive:
    """The remedy of this process and how many blocks hold it (`follow_live`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._remedy = Remedy(False, "none")
        self._undo: Undo = _nothing

    def __enter__(self) -> Remedy:
        with self._lock:
            if not self._holders:
                self._remedy, self._undo = _apply()
            self._holders += 1
            return self._remedy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._undo()


def follow_live() -> FollowLive:
    """Lets this process's resident memory follow the live tensors while the `with` block is open, which gives
    the `Remedy`.

    On Linux with glibc, for all threads, for eager PyTorch as well as generated steps:

    * PyTorch's CPU allocator asks for blocks aligned to 16 bytes instead of 64, which `posix_memalign` answers with
      plain `malloc`: freed blocks fit the next of their size. To this end libc10's jump to `c10_compute_alignment`
      is led to `pthread_getconcurrency`, which gives the number set before, and means nothing else on Linux.
    * `mallopt` fixes the size from which blocks get pages of their own at 32 MiB, and keeps the free end of the
      heap instead of handing it back and faulting it in again in every step.

    Tensors from inside stay valid after the block, and those from before inside it. Blocks may overlap; the end of
    the last leads the jump back, hands free memory back and sets the thresholds to 32 and 64 MiB, where glibc's
    own adjusting ends up (it cannot be switched on again). Thresholds that the user set in the environment are
    left alone. Elsewhere nothing happens, and the `Remedy` says why.

    Open it once around many steps, not in every step: at its end the pages are lost, and the next step pays."""
    return _process


_process = FollowLive()


def _apply() -> tuple[Remedy, Undo]:
    libc = _glibc()
    if libc is None:
        return Remedy(False, "none (not 64-bit Linux with glibc's malloc)"), _nothing
    if os.environ.get("THP_MEM_ALLOC_ENABLE", "0") not in ("", "0"):  # PyTorch then relies on whole pages
        return Remedy(False, "none (THP_MEM_ALLOC_ENABLE is set)"), _nothing
    undo_alignment = _align_as_malloc(libc)
    if undo_alignment is None:
        return Remedy(False, "none (this PyTorch build's alignment cannot be changed)"), _nothing
    description = f"tensors from malloc, {ALIGNMENT_BYTES}-byte aligned"
    if _thresholds_are_the_users():
        return Remedy(True, f"{description}; malloc thresholds from the environment"), undo_alignment
    libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)

    def undo() -> None:
        undo_alignment()
        libc.mallopt(_M_TRIM_THRESHOLD, _ADJUSTED_TRIM_BYTES)
        libc.malloc_trim(0)

    return Remedy(True, f"{description}; mallopt mmap_threshold={MMAP_THRESHOLD_BYTES}, no trim"), undo


def _glibc() -> ctypes.CDLL | None:
    """This process's symbols if malloc is glibc's own (a preloaded allocator is not)."""
    if not sys.platform.startswith("linux") or struct.calcsize("P") != 8:
        return None
    process = ctypes.CDLL(None)
    try:
        libc = ctypes.CDLL("libc.so.6")
        same = _address(process.malloc) == _address(libc.malloc)
        return process if same and hasattr(libc, "gnu_get_libc_version") else None
    except (OSError, AttributeError):
        return None


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _thresholds_are_the_users() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    return any(name in os.environ for name in names) or "threshold" in tunables


def _align_as_malloc(libc: ctypes.CDLL) -> Undo | None:
    """Points libc10's jump to its alignment at a constant, malloc's; None if that cannot be done or does nothing."""
    slot = _jump_slot(_ALIGNMENT_SYMBOL)
    if slot is None or not hasattr(libc, "pthread_setconcurrency"):
        return None
    libc.pthread_setconcurrency(ALIGNMENT_BYTES)
    if libc.pthread_getconcurrency() != ALIGNMENT_BYTES:
        return None
    undo = partial(setattr, slot, "value", slot.value)
    slot.value = _address(libc.pthread_getconcurrency)
    if _is_aligned_as_pytorch_does():
        undo()
        return None
    return undo


def _is_aligned_as_pytorch_does() -> bool:
    blocks = [torch.empty(4096 + ALIGNMENT_BYTES * i, dtype=torch.uint8) for i in range(32)]
    return all(block.data_ptr() % _PYTORCH_ALIGNMENT_BYTES == 0 for block in blocks)


def _jump_slot(symbol: bytes) -> ctypes.c_uint64 | None:
    """Where libc10 keeps the address to jump to for `symbol`, if it is there and can be written to."""
    mappings = _mappings()
    path = next((m.path for m in mappings if m.path.rpartition("/")[2].startswith("libc10.so")), None)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # never a second copy, if the file was replaced
    except OSError:
        return None
    address = _jump_slot_address(library, symbol)
    if address is None or not any(m.low <= address < m.high and m.rights.startswith("rw") for m in mappings):
        return None
    return ctypes.c_uint64.from_address(address)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A line of `/proc/self/maps`: addresses from `low` to below `high`, rights such as "r-xp", the file's path."""

    low: int
    high: int
    rights: str
    path: str


def _mappings() -> list[_Mapping]:
    """This process's memory mappings; none where the system does not say. A path may hold spaces, and any bytes but
    a newline, which the kernel writes as an octal escape."""
    try:
        lines = os.fsdecode(_MAPS.read_bytes()).split("\n")
    except OSError:
        return []
    found = []
    for span, rights, _offset, _device, _inode, *path in (line.split(maxsplit=5) for line in lines if line):
        low, high = (int(end, 16) for end in span.split("-"))
        found.append(_Mapping(low, high, rights, path[0].replace(r"\012", "\n") if path else ""))
    return found


def _jump_slot_address(library: ctypes.CDLL, symbol: bytes) -> int | None:
    """Reads the library's dynamic section in memory (ELF, 64 bits; names as in elf.h)."""
    link_map = ctypes.c_void_p()
    rtld_di_linkmap, dt_null, dt_pltrelsz, dt_strtab, dt_symtab, dt_jmprel = 2, 0, 2, 5, 6, 23
    dlinfo = ctypes.CDLL(None).dlinfo
    dlinfo.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    if dlinfo(library._handle, rtld_di_linkmap, ctypes.byref(link_map)) != 0 or link_map.value is None:
        return None
    base, _, dynamic = struct.unpack("3Q", ctypes.string_at(link_map.value, 24))
    entries: dict[int, int] = {}
    while (entry := struct.unpack("qQ", ctypes.string_at(dynamic, 16)))[0] != dt_null:
        entries[entry[0]] = entry[1]
        dynamic += 16
    if not {dt_pltrelsz, dt_strtab, dt_symtab, dt_jmprel} <= entries.keys():
        return None
    names, symbols, jumps = (
        at if at >= base else at + base for at in (entries[dt_strtab], entries[dt_symtab], entries[dt_jmprel])
    )
    for offset, info, _ in struct.iter_unpack("QQq", ctypes.string_at(jumps, entries[dt_pltrelsz])):
        name = ctypes.c_uint32.from_address(symbols + 24 * (info >> 32)).value
        if ctypes.string_at(names + name) == symbol:
            return int(base + offset)
    return None
