"""Measured memory and time of a step, eager or generated. The meters see tensors and allocations, no routine."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True)
class MemoryMeasurement:
    """Measured bytes of one step: the highest total of what the step allocated, and what was there before.

    `meter` is "storages" (exact bytes of live tensors; `resident_bytes` are the caller's tensors, each storage
    once) or "allocator" (all that PyTorch's allocator hands out, operators' workspace included;
    `resident_bytes` is 0 on a CPU, whose allocator does not say)."""

    step_peak_bytes: int
    resident_bytes: int
    meter: str

    @property
    def peak_bytes(self) -> int:
        """Residents included."""
        return self.step_peak_bytes + self.resident_bytes


def storage_peak(fn: Callable[[], object], resident_tensors: Iterable[torch.Tensor]) -> MemoryMeasurement:
    """Runs `fn` once and counts the bytes of live storages after every operator, exactly.

    Tensors that an operator reads, that no operator of the step made and that are not among
    `resident_tensors`, were there before the step: they count as resident too."""
    meter = _StorageMeter(resident_tensors)
    with meter:
        result = fn()
    measurement = MemoryMeasurement(meter.peak, meter.resident, "storages")
    del result
    return measurement


class _StorageMeter(TorchDispatchMode):  # type: ignore[misc]
    """Follows storages by identity from the operator that makes them to their finalizer."""

    def __init__(self, resident_tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.resident = 0
        self._known: dict[int, tuple[weakref.ref[Any], int | None]] = {}  # bytes; None: resident
        for tensor in resident_tensors:
            self._found(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            self._found(tensor)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._made(leaf)
        if func._schema.is_mutable:  # it may have resized what it wrote
            for tensor in tensors:
                self._resized(tensor)
        self.peak = max(self.peak, self.live)
        return result

    def _found(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self.resident += storage.nbytes()
            self._follow(storage, None)

    def _made(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            nbytes = storage.nbytes()
            self.live += nbytes
            self._follow(storage, nbytes)

    def _resized(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference, counted = self._known[storage._cdata]
        if counted is not None:
            self.live += storage.nbytes() - counted
            self._known[storage._cdata] = reference, storage.nbytes()

    def _follow(self, storage: Any, counted: int | None) -> None:
        key = storage._cdata

        def gone(_: object) -> None:
            _, nbytes = self._known.pop(key)
            self.live -= nbytes or 0

        self._known[key] = weakref.ref(storage, gone), counted


def allocator_peak(fn: Callable[[], object], device: str = "cpu", warm_ups: int = 1) -> MemoryMeasurement:
    """Runs `fn` `warm_ups` times, then once more, and gives the peak of what PyTorch's allocator handed out
    in that run, less what it took back: tensors, operators' workspace, and nothing from before."""
    for _ in range(warm_ups):
        fn()
    gc.collect()
    if torch.device(device).type == "cuda":
        return _cuda_peak(fn, device)
    with _discarded_stderr():  # the profiler announces itself there
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        profiler.__enter__()
    try:
        result = fn()
    finally:
        with _discarded_stderr():
            profiler.__exit__(None, None, None)
    del result
    live = peak = 0
    for _, nbytes in sorted(_allocations(profiler), key=itemgetter(0)):
        live += nbytes
        peak = max(peak, live)
    return MemoryMeasurement(peak, 0, "allocator")


def _allocations(profiler: Any) -> Iterator[tuple[int, int]]:
    """Time in ns and bytes of each allocation (positive) and release (negative) on the CPU."""
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            yield event.start_ns(), event.nbytes()


def _cuda_peak(fn: Callable[[], object], device: str) -> MemoryMeasurement:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = fn()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    return MemoryMeasurement(peak - before, before, "allocator")


@contextlib.contextmanager
def _discarded_stderr() -> Iterator[None]:
    kept = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(sink)
        os.close(kept)


def cpu_time_s(fn: Callable[[], object]) -> float:
    """Seconds of CPU time, over all threads of this process, that one call takes; its result is dropped within."""
    start = time.process_time()
    fn()
    return time.process_time() - start
