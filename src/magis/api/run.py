"""Runs a plan beside true eager PyTorch: proof, peak and time of both, each in its own process."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from magis.api.instance import Instance, instantiate
from magis.api.plan import Plan, cost_model, ratio
from magis.api.plan_file import save_plan
from magis.api.prove import ProofResult
from magis.api.rivals import check_methods
from magis.api.units import human_bytes, human_percent
from magis.api.worker import EAGER, PLAN, Worker, WorkerError
from magis.backend.resident import MMAP_THRESHOLD_BYTES
from magis.errors import UsageError
from magis.fission.tree import Program
from magis.ir.graph import Call, Graph
from magis.lower.launches import launches
from magis.lower.lower import lower
from magis.ops.registry import rule_for
from magis.sim.timeline import Timeline, timeline

Progress = Callable[[str], None]
PAIRS = 9
MEMORY_SHARE = 0.9
"""Of the memory that is free, how much a run may plan to fill."""
PROCESS_BYTES = 320 << 20
"""What a worker holds before it holds a model: the interpreter, PyTorch and a model library."""
HOLES = 1.5
"""A heap grows to up to this many times what is live in it: freed blocks leave holes (ADR 5)."""
RIVALS = 1.2
"""The heap that a rival's steps leave, as a multiple of the small blocks of eager's step."""
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True)
class SideMeasurement:
    """What was measured of one side. Bytes of PyTorch's allocator, residents included in `peak_bytes`;
    `latency_s` is the median of CPU seconds on one thread, `latency_spread_s` their interquartile range;
    `resident_growth_bytes` how far one warm step let the process grow, None where the system does not say."""

    peak_bytes: int
    step_peak_bytes: int
    latency_s: float
    latency_spread_s: float
    resident_growth_bytes: int | None
    storage_step_peak_bytes: int


@dataclass(frozen=True)
class RivalMeasurement:
    """A method that a user would apply by hand, measured like eager; all None but `failed` when it raised.

    `max_rel_error` is the largest relative error, in the norm of a tensor, of its gradients or outputs against
    eager's; `buffers` are those that end differently. Neither says that the method is wrong for its user."""

    method: str
    side: SideMeasurement | None = None
    step_memory_ratio: float | None = None
    latency_overhead: float | None = None
    max_rel_error: float | None = None
    buffers: tuple[str, ...] = ()
    failed: str | None = None


@dataclass(frozen=True)
class RunReport:
    """A plan beside eager, measured. `proof` is None when it was not asked for or could not be made."""

    baseline: SideMeasurement
    optimized: SideMeasurement
    predicted_peak_bytes: int
    predicted_storage_step_peak_bytes: int
    proof: ProofResult | None
    remedy: str
    pairs: int
    batch: int
    latency_overhead: float
    notes: tuple[str, ...] = ()
    beside: tuple[RivalMeasurement, ...] = ()

    @property
    def memory_ratio(self) -> float:
        """Peak, residents included, over eager's."""
        return ratio(self.optimized.peak_bytes, self.baseline.peak_bytes)

    @property
    def step_memory_ratio(self) -> float:
        """Peak above what was live before the step, over eager's."""
        return ratio(self.optimized.step_peak_bytes, self.baseline.step_peak_bytes)


def missed(plan: Plan, report: RunReport) -> str | None:
    """Which limit of the plan the measurements exceed, in words; None when they keep to it.

    Only what was predicted from measurements on this machine and ran at the planned batch size is judged."""
    limit = plan.limit
    if plan.latency_source != "measured" or report.batch != plan.batch:
        return None
    if limit.memory_bytes is not None and report.optimized.peak_bytes > limit.memory_bytes:
        peak = human_bytes(report.optimized.peak_bytes)
        return f"{peak} measured, {human_bytes(limit.memory_bytes)} allowed: plan again with a tighter --memory"
    if limit.max_slowdown is not None and 1 + report.latency_overhead > limit.max_slowdown:
        slower = human_percent(report.latency_overhead)
        allowed = f"{limit.max_slowdown:g} times eager's"
        return f"{slower} time measured, {allowed} allowed: time more --pairs, or plan again with less"
    return None


@dataclass
class _Side:
    """A worker and what it answered. A rival may fail; then `failed` says why, and nothing more is asked of it."""

    worker: Worker
    memory: dict[str, Any] = field(default_factory=dict)
    deviation: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    failed: str | None = None

    @property
    def rival(self) -> bool:
        return self.worker.kind not in (EAGER, PLAN)

    def build(self) -> None:
        self._or_failed(self.worker.ready)

    def measure_memory(self) -> None:
        if self.rival:
            self.deviation = self._ask("compare")
        self._ask("warm_up")
        self.memory = self._ask("resident") | self._ask("memory")

    def take_time(self) -> None:
        self.times += self._ask("time").values()

    def _ask(self, what: str) -> dict[str, Any]:
        return self._or_failed(lambda: self.worker.ask(what)) or {}

    def _or_failed(self, ask: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        if self.failed is not None:
            return None
        try:
            return ask()
        except WorkerError as error:
            if not self.rival:
                raise
            self.failed = error.reason
            return None

    def overhead(self, eager: _Side) -> float:
        """Extra time, as a fraction of eager's: the median over the steps taken in turn."""
        return statistics.median(own / other for other, own in zip(eager.times, self.times)) - 1.0

    def measured(self) -> SideMeasurement:
        quartiles = statistics.quantiles(self.times, n=4) if len(self.times) > 1 else [self.times[0]] * 3
        return SideMeasurement(
            self.memory["resident_bytes"] + self.memory["allocator_step_peak_bytes"],
            self.memory["allocator_step_peak_bytes"],
            statistics.median(self.times),
            quartiles[2] - quartiles[0],
            self.memory["growth_bytes"],
            self.memory["storage_step_peak_bytes"],
        )

    def beside(self, eager: _Side) -> RivalMeasurement:
        if self.failed is not None:
            return RivalMeasurement(self.worker.kind, failed=self.failed)
        own, other = self.measured(), eager.measured()
        return RivalMeasurement(
            self.worker.kind,
            own,
            ratio(own.step_peak_bytes, other.step_peak_bytes),
            self.overhead(eager),
            self.deviation["max_rel_error"],
            tuple(self.deviation["buffers"]),
        )


def run_plan(
    plan: Plan,
    steps: int | None = None,
    pairs: int = PAIRS,
    check: bool = True,
    progress: Progress = lambda _: None,
    beside: Sequence[str] = (),
    swap_dir: Path | None = None,
) -> RunReport:
    """Runs `pairs` rounds of steps, in each one of eager, of the plan and of every method in `beside` (`steps`
    overrides their number). Methods are `checkpoint` and `micro:K`. What the plan swaps goes to a file in `swap_dir`.

    Raises PlanError when the plan does not fit its model, UsageError when it cannot run on this machine."""
    if plan.device != "cpu" and plan.latency_source == "measured":
        raise UsageError(f"this plan was measured on {plan.device}: plan again for this machine with --device cpu")
    pairs = steps if steps is not None else pairs
    if pairs < 1:
        raise UsageError(f"--steps {pairs}: at least one step is needed")
    methods = check_methods(beside, plan.batch)
    progress("capturing the model again")
    instance, batch, notes = _that_fits(plan, check, len(methods))
    check_methods(methods, batch)
    progress("predicting the peak")
    routine = instance.routine()
    predicted = timeline(routine, _workspace(instance, progress)).peak_bytes
    exact = timeline(routine)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="magis-"))
        path = Path(folder) / "run.plan.json"
        save_plan(plan, path)
        sides = [_Side(stack.enter_context(Worker(kind, path, batch, swap_dir))) for kind in (EAGER, *methods, PLAN)]
        progress("building all sides")
        for side in sides:
            side.build()
        proof = None
        if check:
            progress("proving the numbers against eager")
            proof = ProofResult(**_tuples(sides[-1].worker.ask("prove")))
        _measure(sides, pairs, progress)
    eager, *rivals, planned = sides
    return RunReport(
        eager.measured(),
        planned.measured(),
        predicted,
        exact.peak_bytes - exact.resident_bytes,
        proof,
        planned.worker.remedy,
        pairs,
        batch,
        planned.overhead(eager),
        notes,
        tuple(rival.beside(eager) for rival in rivals),
    )


def _measure(sides: Sequence[_Side], pairs: int, progress: Progress) -> None:
    for side in sides:
        progress(f"measuring memory: {side.worker.kind}")
        side.measure_memory()
    for pair in range(pairs):
        progress(f"timing pair {pair + 1} of {pairs}")
        for side in sides if pair % 2 == 0 else reversed(sides):
            side.take_time()


def _tuples(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"failures": tuple(answer["failures"])}


def _workspace(instance: Instance, progress: Progress) -> Callable[[Call], int]:
    """What operators allocate inside, measured on this machine (cached)."""
    cost = cost_model("cpu")
    cost.prepare((call for call, _ in launches(instance.routine())), progress)
    return cost.workspace_bytes


def _that_fits(plan: Plan, check: bool, rivals: int) -> tuple[Instance, int, tuple[str, ...]]:
    """The plan at its batch size, or at the largest halving of it at which all processes fit this machine."""
    instance = instantiate(plan)
    needed, free = needed_bytes(instance, check, rivals), free_bytes()
    if free is None or needed <= MEMORY_SHARE * free:
        return instance, plan.batch, ()
    lacking = f"the run needs {needed / 2**30:.1f} GiB at batch {plan.batch}, {free / 2**30:.1f} GiB are free"
    larger = "run the plan on a larger machine"
    batch = plan.batch
    while batch > 1:
        batch //= 2
        try:
            instance = instantiate(plan, batch)
        except UsageError as error:
            raise UsageError(f"{lacking}; {larger}, since at batch {batch} it cannot: {error}") from error
        if needed_bytes(instance, check, rivals) <= MEMORY_SHARE * free:
            return instance, batch, (f"{lacking}: proof and measurements at batch {batch}",)
    raise UsageError(f"{lacking}, even batch 1 does not fit: {larger}")


def needed_bytes(instance: Instance, check: bool, rivals: int) -> int:
    """Memory that eager, the plan and `rivals` methods need: processes that live at the same time.

    Each holds its model, optimizer state and batch, a copy to start every step from, and the heap that its steps left:
    with holes for eager, without for the plan, whose heap follows what is live; a rival's is smaller than eager's. One
    at a time runs a step, or compares results with eager's: it holds both sides' and adds up squared terms in
    float64. The proof runs eager beside the plan, copies what the step writes, twice as results and once to start
    from."""
    graph = instance.captured.graph
    eager, planned = timeline(lower(Program(graph), instance.captured.schedule)), timeline(instance.routine())
    resident, small = eager.resident_bytes, _small_bytes(eager)
    needed = (2 + rivals) * (PROCESS_BYTES + 2 * resident) + int(HOLES * small) + int(rivals * RIVALS * small)
    needed += planned.peak_bytes - resident + max(eager.peak_bytes - resident - small, 0)
    if check:
        needed += eager.peak_bytes + 2 * resident
    if check or rivals:
        needed += 2 * sum(graph.spec(value).nbytes for value in graph.outputs) + _float64_bytes(graph)
    return needed


def _small_bytes(step: Timeline) -> int:
    """The most that is live at once of blocks too small to get pages of their own: these stay with the process."""
    change = [0] * (len(step.live_bytes) + 1)
    for lifetime in step.lifetimes:
        if lifetime.nbytes < MMAP_THRESHOLD_BYTES:
            change[lifetime.first] += lifetime.nbytes
            change[lifetime.last + 1] -= lifetime.nbytes
    return max(accumulate(change))


def _float64_bytes(graph: Graph) -> int:
    """The most that one operator needs to add up its squared terms in float64: its operands and their squares; a
    convolution lays one of them out once for each place of its kernel."""
    most = 0
    for node in graph.nodes.values():
        if node.is_input or rule_for(node.op).terms(graph.call(node), 0) <= 1:
            continue
        operands = [graph.spec(value) for value in node.inputs]
        numel = sum(spec.numel for spec in operands)
        if node.op.startswith("aten.convolution"):
            kernel = operands[2 if "backward" in node.op else 1].shape[2:]
            numel += prod(kernel) * max(spec.numel for spec in operands)
        most = max(most, 2 * 8 * numel)
    return most


def free_bytes() -> int | None:
    """Memory that new processes may use without swapping: what the machine has free, or less where this process's
    cgroup is limited. None where the system does not say."""
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    found = [int(fields["MemAvailable"].split()[0]) * 1024] if "MemAvailable" in fields else []
    return min([*found, *_left_in_cgroups()], default=None)


def _left_in_cgroups() -> Iterator[int]:
    """Bytes left below the limit of each cgroup that this process is in, version 1 or 2."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _left(CGROUPS / "memory", path, *files)


def _left(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """In a container the path may be the host's: then only the root, the container's own group, is found."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        try:
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # not there, or "max"
            continue
        yield max(0, most - used + int(stat.get(reclaimable, 0)))
