"""A process that holds one side of a run and answers requests, one JSON object a line; and its parent's end.

A side is eager's step, the plan's, or a method of `magis.api.rivals`. Each has a process of its own, all at the same
time, so that their steps can alternate; all but the plan's with the default malloc, each on one thread. What models
print goes to stderr.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from magis.errors import MagisError

EAGER, PLAN = "eager", "plan"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class WorkerError(MagisError):
    """A side failed; `reason` says why in one line, without naming the side."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"the {kind} side failed: {reason}")
        self.reason = reason


class Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, kind: str, plan: Path, batch: int, swap_dir: Path | None = None) -> None:
        self.kind = kind
        self.remedy = "none"
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "magis.api.worker",
                kind,
                str(plan),
                str(batch),
                *([] if swap_dir is None else [str(swap_dir)]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def ready(self) -> None:
        """Waits until the side is built. Raises WorkerError when that fails."""
        self.remedy = self._answer().get("remedy", "none")

    def ask(self, what: str) -> dict[str, Any]:
        """One question and its answer. Raises WorkerError when the worker fails."""
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
            killed = " (killed, most likely for lack of memory)" if code == -signal.SIGKILL else ""
            raise WorkerError(self.kind, f"its process ended with code {code}{killed}; {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(self.kind, answer["error"])
        return answer

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Side:
    """One side of a run: a real workload, its step, and a snapshot that every step starts from."""

    def __init__(self, kind: str, plan_path: Path, batch: int | None, swap_dir: Path | None) -> None:
        import torch

        from magis.api.eager import EagerStep, Snapshot, written_tensors
        from magis.api.instance import instantiate
        from magis.api.plan_file import load_plan
        from magis.api.rivals import rival_step

        torch.set_num_threads(1)
        self.plan = load_plan(plan_path)
        self.instance = instantiate(self.plan, batch)
        self.workload = self.instance.workload()
        self.eager = EagerStep(self.workload)
        state = self.instance.state(self.workload)
        self.snapshot = Snapshot(written_tensors(self.workload, state))
        self.residents = self.instance.captured.bind(self.workload)
        self.compiled = self.instance.compile(swap_dir) if kind == PLAN else None
        self.by_hand = self.eager if kind in (EAGER, PLAN) else rival_step(kind, self.workload)
        self.kind = kind

    def step(self) -> object:
        """One step; what it returns is dropped by the caller."""
        import torch

        if self.compiled is None:
            return self.by_hand()
        with torch.no_grad():
            return self.compiled(self.instance.captured.bind(self.workload))

    def prepare(self) -> None:
        """Puts weights, buffers, state and generator back where every step starts."""
        import torch

        self.eager.clear_gradients()
        self.snapshot.restore()
        torch.manual_seed(self.plan.seed)

    def warm_up(self) -> dict[str, Any]:
        """Runs a step and forgets it."""
        self.prepare()
        self.step()
        return {}

    def time(self) -> dict[str, Any]:
        """CPU seconds of one step."""
        self.prepare()
        start = time.process_time()
        self.step()
        return {"cpu_s": time.process_time() - start}

    def memory(self) -> dict[str, Any]:
        """Peak of the allocator, and of live storages, in one step each."""
        from magis.backend.meters import allocator_peak, storage_peak

        self.prepare()
        allocated = allocator_peak(self.step, warm_ups=0)
        self.prepare()
        stored = storage_peak(self.step, self.residents)
        resident = stored.resident_bytes
        return {
            "resident_bytes": resident,
            "allocator_step_peak_bytes": allocated.step_peak_bytes,
            "storage_step_peak_bytes": stored.step_peak_bytes,
        }

    def resident(self) -> dict[str, Any]:
        """Growth of the process's resident memory in one warm step."""
        from magis.backend.resident import PeakResident

        self.prepare()
        gc.collect()
        with PeakResident() as meter:
            self.step()
        return {"growth_bytes": meter.growth_bytes}

    def prove(self) -> dict[str, Any]:
        """The proof, from this process's weights."""
        from magis.api.prove import prove

        assert self.compiled is not None
        self.prepare()
        result = prove(self.workload, self.instance.captured, self.compiled, self.plan.seed)
        return asdict(result)

    def compare(self) -> dict[str, Any]:
        """How far the results are from eager's, from this process's weights."""
        from magis.api.rivals import deviation

        return asdict(deviation(self.kind, self.workload, self.instance.captured, self.prepare))


def serve(
    kind: str,
    plan_path: Path,
    batch: int | None,
    remedy: str,
    answer: Callable[[dict[str, Any]], None],
    swap_dir: Path | None = None,
) -> None:
    """Answers the requests on stdin until it ends. Errors are answered as {"error": line}."""
    try:
        side = Side(kind, plan_path, batch, swap_dir)
        answer({"ready": True, "remedy": remedy})
        for line in sys.stdin:
            answer(getattr(side, json.loads(line)["do"])())
    except MagisError as error:
        answer({"error": str(error), "kind": type(error).__name__})
    except MemoryError:
        answer({"error": "out of memory", "kind": "MemoryError"})
    except Exception as error:  # noqa: BLE001 - the border of a process: whatever happens is told to the parent
        traceback.print_exc()
        text = str(error).strip().splitlines()
        answer({"error": f"{type(error).__name__}: {text[0] if text else ''}", "kind": type(error).__name__})


def _end_with_parent() -> None:
    """A parent that was killed closes no process. Where the system can, it ends this one at once; elsewhere the
    request after the present one finds the pipe closed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        requests = select.poll()
        requests.register(sys.stdin, 0)
        if requests.poll(0):  # the pipe's other end is closed: the parent was gone before it could be watched
            sys.exit("the parent process is gone")


def main() -> None:
    """`python -m magis.api.worker KIND PLAN [BATCH [SWAP_DIR]]`."""
    _end_with_parent()
    kind, plan_path, *rest = sys.argv[1:]
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        protocol.write(json.dumps(message) + "\n")

    batch = int(rest[0]) if rest else None
    swap_dir = Path(rest[1]) if len(rest) > 1 else None
    if kind != PLAN:
        serve(kind, Path(plan_path), batch, "none", answer)
        return
    from magis.backend.resident import follow_live

    with follow_live() as remedy:
        serve(kind, Path(plan_path), batch, remedy.description, answer, swap_dir)


if __name__ == "__main__":
    main()
