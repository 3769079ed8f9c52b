"""Runs a plan beside true eager PyTorch: proof, peak and time of both, each in its own process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magis.api.instance import Instance, instantiate
from magis.api.plan import Plan, cost_model, ratio
from magis.api.plan_file import save_plan
from magis.api.prove import ProofResult
from magis.api.worker import EAGER, OPTIMIZED
from magis.errors import MagisError, UsageError
from magis.ir.graph import Call
from magis.lower.routine import Routine
from magis.sim.timeline import timeline

Progress = Callable[[str], None]
PAIRS = 9
MEMORY_SHARE = 0.85
"""Of the machine's free memory, how much a run may fill: the proof holds results of both sides."""


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

    @property
    def memory_ratio(self) -> float:
        """Peak, residents included, over eager's."""
        return ratio(self.optimized.peak_bytes, self.baseline.peak_bytes)

    @property
    def step_memory_ratio(self) -> float:
        """Peak above what was live before the step, over eager's."""
        return ratio(self.optimized.step_peak_bytes, self.baseline.step_peak_bytes)


def run_plan(
    plan: Plan,
    steps: int | None = None,
    pairs: int = PAIRS,
    check: bool = True,
    progress: Progress = lambda _: None,
) -> RunReport:
    """Runs `pairs` alternating steps of eager and of the plan (`steps` overrides their number).

    Raises PlanError when the plan does not fit its model, UsageError when it cannot run on this machine."""
    if plan.device != "cpu" and plan.latency_source == "measured":
        raise UsageError(f"this plan was measured on {plan.device}: plan again for this machine with --device cpu")
    pairs = steps if steps is not None else pairs
    if pairs < 1:
        raise UsageError(f"--steps {pairs}: at least one step is needed")
    progress("capturing the model again")
    batch, notes = _batch_that_fits(plan)
    instance = instantiate(plan, batch)
    routine = instance.routine()
    progress("predicting the peak")
    workspace = _workspace(instance, progress)
    predicted = timeline(routine, workspace).peak_bytes
    exact = timeline(routine)
    with tempfile.TemporaryDirectory(prefix="magis-") as folder:
        path = Path(folder) / "run.plan.json"
        save_plan(plan, path)
        with _Worker(EAGER, path, batch) as eager, _Worker(OPTIMIZED, path, batch) as optimized:
            progress("building both sides")
            eager.ready()
            optimized.ready()
            proof = None
            if check:
                progress("proving the numbers against eager")
                proof = ProofResult(**_tuples(optimized.ask("prove")))
            measured = _measure(eager, optimized, pairs, progress)
    eager_times, own_times = measured["times"]
    overhead = statistics.median(o / e for e, o in zip(eager_times, own_times)) - 1.0
    return RunReport(
        _side(measured[EAGER], eager_times),
        _side(measured[OPTIMIZED], own_times),
        predicted,
        exact.peak_bytes - exact.resident_bytes,
        proof,
        measured["remedy"],
        pairs,
        batch,
        overhead,
        notes,
    )


def _measure(eager: _Worker, optimized: _Worker, pairs: int, progress: Progress) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for worker in (eager, optimized):
        progress(f"measuring memory: {worker.kind}")
        worker.ask("warm_up")
        found[worker.kind] = worker.ask("resident") | worker.ask("memory")
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        progress(f"timing pair {pair + 1} of {pairs}")
        first, second = (eager, optimized) if pair % 2 == 0 else (optimized, eager)
        for worker in (first, second):
            times[worker is optimized].append(worker.ask("time")["cpu_s"])
    found["times"] = times
    found["remedy"] = optimized.remedy
    return found


def _side(measured: dict[str, Any], times: list[float]) -> SideMeasurement:
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return SideMeasurement(
        measured["resident_bytes"] + measured["allocator_step_peak_bytes"],
        measured["allocator_step_peak_bytes"],
        statistics.median(times),
        quartiles[2] - quartiles[0],
        measured["growth_bytes"],
        measured["storage_step_peak_bytes"],
    )


def _tuples(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"failures": tuple(answer["failures"])}


def _workspace(instance: Instance, progress: Progress) -> Callable[[Call], int]:
    """What operators allocate inside, measured on this machine (cached)."""
    cost = cost_model("cpu")
    calls = [instance.program.graph.call(node) for node in instance.program.graph.nodes.values() if not node.is_input]
    cost.prepare(calls, progress)
    return cost.workspace_bytes


def _batch_that_fits(plan: Plan) -> tuple[int, tuple[str, ...]]:
    """The planned batch size, or the largest halving of it at which eager and the proof fit this machine."""
    free = _free_bytes()
    needed = plan.baseline.peak_bytes
    if free is None or needed <= MEMORY_SHARE * free:
        return plan.batch, ()
    batch = plan.batch
    while batch > 1:
        batch //= 2
        routine: Routine = instantiate(plan, batch).routine()
        if timeline(routine).peak_bytes <= MEMORY_SHARE * free:
            note = (
                f"eager needs {needed / 2**30:.1f} GiB at batch {plan.batch}, this machine has "
                f"{free / 2**30:.1f} GiB free: proof and measurements at batch {batch}"
            )
            return batch, (note,)
    raise UsageError(
        f"eager needs {needed / 2**30:.1f} GiB and this machine has {free / 2**30:.1f} GiB free, even batch 1 "
        "does not fit: run the plan on a larger machine"
    )


def _free_bytes() -> int | None:
    """Memory that new processes may use without swapping, where the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


class _Worker:
    """A worker process and its questions."""

    def __init__(self, kind: str, plan: Path, batch: int) -> None:
        self.kind = kind
        self.remedy = "none"
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "magis.api.worker", kind, str(plan), str(batch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def ready(self) -> None:
        """Waits until the side is built."""
        self.remedy = self._answer().get("remedy", "none")

    def ask(self, what: str) -> dict[str, Any]:
        """One question and its answer. Raises MagisError when the worker fails."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer below says why
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            killed = " (killed, most likely for lack of memory)" if code == -9 else ""
            raise MagisError(f"the {self.kind} process ended with code {code}{killed}; {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise MagisError(f"the {self.kind} side failed: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"
