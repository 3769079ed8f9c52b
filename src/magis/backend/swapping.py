"""Copies to host memory and back while operators run: pinned memory for CUDA, a file for the CPU (ADR 10).

A plan for another device runs on a CPU too: it swaps to a file in memory then, which frees nothing there."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from magis.errors import MagisError, UsageError
from magis.lower.launches import steps
from magis.lower.routine import Load, Routine, Store


class Transfers(Protocol):
    """What generated code calls. `wait` takes what `store` or `load` gave, and returns when the copy is complete."""

    def store(self, tensor: torch.Tensor) -> Any: ...

    def load(self, stored: Any, device: torch.device) -> torch.Tensor: ...

    def wait(self, what: Any) -> None: ...


class SwapError(MagisError):
    """A tensor could not be swapped."""


def swaps(routine: Routine) -> bool:
    """Whether a routine needs `Transfers`."""
    return any(isinstance(instruction, Store) for instruction, _, _ in steps(routine))


def default_transfers(routine: Routine) -> Transfers:
    """Those of a routine's device."""
    loads = (instruction.spec.device for instruction, _, _ in steps(routine) if isinstance(instruction, Load))
    if next(loads, "cpu").startswith("cuda"):
        return PinnedMemory()
    return SwapFile()


@dataclass(eq=False)
class _Stored:
    """A tensor in a file."""

    offset: int
    nbytes: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    done: Future[None]


class SwapFile:
    """Tensors in a file without a name, in a folder, or in memory: nothing is left behind, however the process ends.
    One thread copies into it and one out of it. Raises UsageError if no file can be made there."""

    def __init__(self, folder: Path | None = None) -> None:
        try:
            self._file = _in_memory() if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"cannot swap to {folder}: {error.strerror}; pass a folder that can be written") from None
        self._folder = folder or "memory"
        weakref.finalize(self, self._file.close)
        self._length = 0
        self._free: dict[int, list[int]] = {}
        self._out = ThreadPoolExecutor(1, "magis-store")
        self._in = ThreadPoolExecutor(1, "magis-load")
        self._loading: dict[Hashable, Future[None]] = {}

    def store(self, tensor: torch.Tensor) -> _Stored:
        """Begins to copy. The tensor has to stay as it is until `wait`."""
        nbytes = tensor.numel() * tensor.element_size()
        offset = self._reserve(nbytes)
        done = self._out.submit(self._copy, tensor.data_ptr(), offset, nbytes, True)
        stored = _Stored(offset, nbytes, tensor.shape, tensor.stride(), tensor.dtype, done)
        weakref.finalize(stored, self._free.setdefault(_pages(nbytes), []).append, offset)
        return stored

    def load(self, stored: _Stored, device: torch.device) -> torch.Tensor:
        """Begins to copy back. The place in the file is free when nobody holds what is stored there."""
        tensor = torch.empty_strided(stored.shape, stored.strides, dtype=stored.dtype, device=device)
        self._loading[id(tensor)] = self._in.submit(self._back, stored, tensor.data_ptr())
        return tensor

    def wait(self, what: _Stored | torch.Tensor) -> None:
        """Raises SwapError when the copy failed."""
        done = what.done if isinstance(what, _Stored) else self._loading.pop(id(what), None)
        if done is None:
            return
        try:
            done.result()
        except OSError as error:
            raise SwapError(f"swapping in {self._folder} failed: {error.strerror}") from None

    def _reserve(self, nbytes: int) -> int:
        size = _pages(nbytes)
        places = self._free.get(size)
        if places:
            return places.pop()
        offset, self._length = self._length, self._length + size
        try:
            os.posix_fallocate(self._file.fileno(), offset, size)  # else a full disk is a SIGBUS
        except OSError as error:
            raise SwapError(
                f"no room for {size >> 20} MiB more in {self._folder} ({error.strerror}): pass a --swap-dir with more"
            ) from None
        return offset

    def _back(self, stored: _Stored, address: int) -> None:
        stored.done.result()
        self._copy(address, stored.offset, stored.nbytes, False)

    def _copy(self, address: int, offset: int, nbytes: int, out: bool) -> None:
        with mmap.mmap(self._file.fileno(), nbytes, offset=offset) as mapped:
            there = ctypes.addressof(anchor := ctypes.c_char.from_buffer(mapped))
            target, source = (there, address) if out else (address, there)
            ctypes.memmove(target, source, nbytes)
            del anchor  # a mapping with views cannot be closed


def _pages(nbytes: int) -> int:
    """The length of a place in the file."""
    return -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def link_bytes_per_s(folder: Path, nbytes: int = 64 << 20) -> float:
    """Bytes a second at which a file in a folder is written and read back, the slower of the two, measured. Raises
    UsageError if no file can be made there, SwapError if it has no room."""
    file, tensor = SwapFile(folder), torch.ones(nbytes, dtype=torch.uint8)
    slowest = 0.0
    for _ in range(2):  # the first round makes the file
        started = time.perf_counter()
        file.wait(stored := file.store(tensor))
        written = time.perf_counter()
        file.wait(file.load(stored, tensor.device))
        slowest = max(written - started, time.perf_counter() - written)
    return nbytes / slowest


def _in_memory() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("magis-swap"), "r+b")
    return tempfile.TemporaryFile()


class PinnedMemory:
    """Tensors in pinned host memory, copied on a stream of their own in each direction."""

    def __init__(self) -> None:
        self._out, self._in = torch.cuda.Stream(), torch.cuda.Stream()
        self._events: dict[int, torch.cuda.Event] = {}

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begins to copy. The tensor has to stay until `wait`."""
        options: dict[str, Any] = {"dtype": tensor.dtype, "device": "cpu", "pin_memory": True}
        stored = torch.empty_strided(tensor.shape, tensor.stride(), **options)
        self._copy(self._out, stored, tensor)
        return stored

    def load(self, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Begins to copy back."""
        tensor = torch.empty_strided(stored.shape, stored.stride(), dtype=stored.dtype, device=device)
        self._in.wait_stream(self._out)
        self._copy(self._in, tensor, stored)
        return tensor

    def wait(self, what: torch.Tensor) -> None:
        """The current stream goes on when the copy is complete; so memory that it frees is not used before."""
        event = self._events.pop(id(what), None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        self._events[id(target)] = event
