"""A process that holds one side of a run, eager or optimized, and answers requests, one JSON object a line.

Eager runs in its own process with the default malloc; the optimized side runs beside it, so that their steps
can alternate. Both use one thread. What models print goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from magis.errors import MagisError

EAGER, OPTIMIZED = "eager", "optimized"


class Side:
    """One side of a run: a real workload, its step, and a snapshot that every step starts from."""

    def __init__(self, kind: str, plan_path: Path, batch: int | None) -> None:
        import torch

        from magis.api.eager import EagerStep, Snapshot, written_tensors
        from magis.api.instance import instantiate
        from magis.api.plan_file import load_plan

        torch.set_num_threads(1)
        self.plan = load_plan(plan_path)
        self.instance = instantiate(self.plan, batch)
        self.workload = self.instance.workload()
        self.eager = EagerStep(self.workload)
        state = self.instance.state(self.workload)
        self.snapshot = Snapshot(written_tensors(self.workload, state))
        self.residents = self.instance.captured.bind(self.workload)
        self.compiled = self.instance.compile() if kind == OPTIMIZED else None
        self.kind = kind

    def step(self) -> object:
        """One step; what it returns is dropped by the caller."""
        import torch

        if self.compiled is None:
            return self.eager()
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


def serve(kind: str, plan_path: Path, batch: int | None, remedy: str, answer: Callable[[dict[str, Any]], None]) -> None:
    """Answers the requests on stdin until it ends. Errors are answered as {"error": line}."""
    try:
        side = Side(kind, plan_path, batch)
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


def main() -> None:
    """`python -m magis.api.worker KIND PLAN [BATCH]`."""
    kind, plan_path, *rest = sys.argv[1:]
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        protocol.write(json.dumps(message) + "\n")

    batch = int(rest[0]) if rest else None
    if kind == EAGER:
        serve(kind, Path(plan_path), batch, "none", answer)
        return
    from magis.backend.resident import follow_live

    with follow_live() as remedy:
        serve(kind, Path(plan_path), batch, remedy.description, answer)


if __name__ == "__main__":
    main()
