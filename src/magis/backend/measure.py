"""Measures single operator calls on real tensors: latency as a step would see it, and workspace (ADR 4)."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from magis.aten.convert import overload
from magis.backend.meters import allocator_peak
from magis.backend.operands import arguments, operand_bytes, operands
from magis.backend.slicing import with_fewer_rows
from magis.cost.measured import MeasuredCost
from magis.cost.profile import CallMeasurement, Environment, ProfileCache
from magis.errors import PlanError
from magis.ir.graph import Call

log = logging.getLogger(__name__)

METHOD = 1
"""Changes whenever the way of measuring does: older measurements are then left aside."""
RUNS = 3
SAMPLE_S = 400e-6
"""A sample repeats the call until it takes so long: a thousand steps of the clock."""
LONG_S = 1.0
"""A call that turns out to take longer is sampled once."""
SETS_BYTES = 4 << 20
"""Small operands are made so many times over, to be used in turn, that together they exceed a core's own cache:
in a step other operators ran since an operand was last touched. Not more: what the operator before has just
made does come from a cache, and parts of a split are faster for it."""
MAX_SETS = 16
WRITING_REPEATS = 50
"""In-place writes are repeated no more often, lest their values run away to zero or infinity."""

Run = Callable[[], object]
Clock = Callable[[list[Run]], float]
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, PlanError)


class Measurer:
    """Measures calls on one device of this machine (`magis.cost.measured.Measurer`)."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.environment = environment(device)

    def measure(self, call: Call) -> CallMeasurement | None:
        """Runs the call alone; None when it refuses to."""
        return measure_call(call, self.device)

    def with_fewer_rows(self, call: Call, fraction: float) -> Call | None:
        """The same call on about that fraction of its rows; None when it has none."""
        return with_fewer_rows(call, fraction)

    def operand_bytes(self, call: Call) -> int:
        """Bytes that measuring the call allocates."""
        return operand_bytes(call)


def measured_cost(device: str = "cpu", cache: ProfileCache | None = None) -> MeasuredCost:
    """Costs measured on this machine, kept in the user's table of measurements."""
    return MeasuredCost(ProfileCache() if cache is None else cache, Measurer(device))


def measure_call(call: Call, device: str = "cpu") -> CallMeasurement | None:
    """Latency (median of `RUNS` after a warm-up, the dispatch of the operator included) and workspace.

    None when the operator does not run on made-up operands or this machine has too little memory. The state
    of the random generator is left as it was."""
    is_cuda = torch.device(device).type == "cuda"
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if is_cuda else []):
            runs = _runs(call, device)
            samples = _samples(call, runs, _cuda_clock if is_cuda else _cpu_clock)
            workspace = _workspace_bytes(call, runs[0], device)
    except _REFUSALS as error:
        log.debug("%s cannot be measured alone: %s", call.op, error)
        return None
    return CallMeasurement(median(samples), max(samples) - min(samples), len(samples), workspace)


def environment(device: str = "cpu") -> Environment:
    """What measurements made now, in this process, depend on."""
    processor = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else processor_name()
    return Environment(device, torch.get_num_threads(), processor, str(torch.__version__), METHOD)


def processor_name() -> str:
    """The CPU's model as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    names = [value.strip() for key, _, value in pairs if key.strip() in ("model name", "cpu model", "Model")]
    return names[0] if names else platform.processor() or platform.machine() or "unknown"


def _runs(call: Call, device: str) -> list[Run]:
    function = overload(call.op)
    sets = SETS_BYTES // max(1, operand_bytes(call)) if call.inputs else 1
    first = operands(call, device)
    others = ([_copied(tensor) for tensor in first] for _ in range(min(sets, MAX_SETS) - 1))
    return [_bound(function, *arguments(call, tensors)) for tensors in (first, *others)]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor in storage of its own, gaps included."""
    storage = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _bound(function: Callable[..., object], args: list[Any], kwargs: dict[str, Any]) -> Run:
    return (lambda: function(*args, **kwargs)) if kwargs else (lambda: function(*args))


def _samples(call: Call, runs: list[Run], clock: Clock) -> list[float]:
    """Seconds of one run, `RUNS` times; each the mean over a sample's repetitions."""
    once_s = clock(runs[:1])
    if once_s < 100 * SAMPLE_S:
        once_s = max(clock(runs[:2]) / len(runs[:2]), 1e-7)
    repeats = 1 if once_s >= SAMPLE_S else int(SAMPLE_S / once_s) + 1
    if any(spec is not None and spec.writes for spec in call.outputs):
        repeats = min(repeats, WRITING_REPEATS)
    in_turn = cycle(runs)
    samples = 1 if once_s > LONG_S else RUNS
    return [clock(list(islice(in_turn, repeats))) / repeats for _ in range(samples)]


def _cpu_clock(runs: list[Run]) -> float:
    """Seconds that the runs take together: CPU time when PyTorch computes in this thread alone, since other
    work on the machine lengthens it less; else wall time."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = now()
    for run in runs:
        run()
    return now() - start


def _cuda_clock(runs: list[Run]) -> float:
    """Seconds between two events around the runs."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for run in runs:
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _workspace_bytes(call: Call, run: Run, device: str) -> int:
    """Peak of what one run allocates, beyond the results that it leaves."""
    if torch.device(device).type == "cpu":
        events = _allocations(run)
        if events is not None:
            live = peak = 0
            for nbytes in events:
                live += nbytes
                peak = max(peak, live)
            return peak - live
    made = sum(spec.storage_bytes for spec in call.outputs if spec is not None)
    return max(0, allocator_peak(run, device, warm_ups=0).step_peak_bytes - made)


def _allocations(run: Run) -> list[int] | None:
    """Bytes of every allocation (positive) and release (negative) while `run` runs and its result is held.

    Of the older profiler: it starts in 0.1 ms, while `torch.profiler` imports for a second and announces itself
    on stderr. None where this PyTorch no longer has it or another profiler is active."""
    try:
        from torch.autograd import _disable_profiler_legacy
        from torch.autograd.profiler_legacy import profile
    except ImportError:
        return None
    profiler = profile(profile_memory=True)
    try:
        profiler._start_trace()
    except RuntimeError:
        return None
    result = None
    try:
        result = run()
    finally:
        records = _disable_profiler_legacy()
    del result
    events = (event for thread in records for event in thread)
    return [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]
