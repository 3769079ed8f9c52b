"""How far resident memory grows in a warm step, and what the remedy costs (ADR 5).

    python benchmarks/resident_memory.py [--workloads peer-bert:checkpoint,peer-bert:generated] [--pairs 9]

For each workload two fresh processes of one thread, one with `follow_live` open and one without, take steps in
turn, so that a loaded machine slows both. Prints for each the peak of live bytes in a step (PyTorch's allocator),
the most that resident memory grew in one of three steps from a heap without free pages, the bound 1.25 x live +
64 MiB, CPU seconds a step (median and quartiles) and the median over the pairs of the time with the remedy over the
time without.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from magis import zoo
from magis.backend.meters import allocator_peak, cpu_time_s
from magis.backend.resident import PeakResident, follow_live
from magis.backend.runtime import compile_routine
from magis.capture.capture import capture
from magis.capture.workload import Workload
from magis.capture.workload import workload as as_workload
from magis.fission.tree import Program
from magis.lower.lower import lower

WORKLOADS = "peer-bert:checkpoint,peer-bert:eager,peer-resnet50:eager,peer-unet:eager"
MB = 1e6
WARM_UPS, GROWTH_STEPS = 2, 3
ALLOWED_BYTES = 64 << 20


def eager_step(given: Workload, checkpoint: bool) -> Callable[[], object]:
    """Forward and backward as a user writes them, the blocks of a Hugging Face model recomputed or not."""
    given.model.train()
    parameters = [parameter for parameter in given.model.parameters() if parameter.requires_grad]
    if checkpoint:
        options = {"use_reentrant": False}
        cast("Any", given.model).gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return lambda: torch.autograd.grad(given.call(given.batch), parameters, allow_unused=True)


def generated_step(given: Workload) -> Callable[[], object]:
    """The same as generated code, in the order of eager PyTorch."""
    captured = capture(given)
    inputs = [tensor.detach() for tensor in captured.bind(given)]
    compiled = compile_routine(lower(Program(captured.graph), captured.schedule))
    return torch.no_grad()(lambda: compiled(list(inputs)))


class Stepper:
    """A training step in this process."""

    def __init__(self, workload: str) -> None:
        name, _, way = workload.partition(":")
        torch.manual_seed(0)
        given = as_workload(zoo.build(name), name)
        self.step = generated_step(given) if way == "generated" else eager_step(given, way == "checkpoint")

    def time(self) -> float:
        """CPU seconds of one step."""
        return cpu_time_s(self.step)

    def growth(self) -> int | None:
        """Bytes by which one step lets resident memory grow."""
        gc.collect()
        with PeakResident() as meter:
            self.step()
        return meter.growth_bytes

    def live(self) -> int:
        """Peak of live bytes of one step."""
        return allocator_peak(self.step).step_peak_bytes


def serve(workload: str, with_remedy: bool) -> None:
    """Answers requests on stdin, one JSON line each."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        remedy = stack.enter_context(follow_live()).description if with_remedy else "none"
        stepper = Stepper(workload)
        for _ in range(WARM_UPS):
            stepper.time()
        print(json.dumps(remedy), flush=True)
        for line in sys.stdin:
            print(json.dumps(getattr(stepper, line.strip())()), flush=True)


@contextlib.contextmanager
def child(workload: str, remedy: str) -> Iterator[Callable[[str], Any]]:
    """A fresh process that serves one workload; yields what sends it a request and waits for the answer."""
    command = [sys.executable, __file__, "--child", workload, remedy]
    quiet = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(what: str) -> Any:
            if what:
                print(what, file=process.stdin, flush=True)
            answer = process.stdout.readline()
            if not answer:
                raise SystemExit(f"{workload} ({remedy}) ended early")
            return json.loads(answer)

        yield ask
        process.stdin.close()


def compare(workload: str, pairs: int) -> None:
    """Measures one workload with and without the remedy and prints its two lines."""
    with child(workload, "none") as plain, child(workload, "remedy") as remedied:
        sides = {"none": plain, "remedy": remedied}
        descriptions = {side: ask("") for side, ask in sides.items()}
        times: dict[str, list[float]] = {side: [] for side in sides}
        for pair in range(pairs):
            for side in sorted(sides, reverse=bool(pair % 2)):
                times[side].append(sides[side]("time"))
        growths = {side: [ask("growth") for _ in range(GROWTH_STEPS)] for side, ask in sides.items()}
        live = {side: ask("live") for side, ask in sides.items()}
    ratio = statistics.median(b / a for a, b in zip(times["none"], times["remedy"]))
    for side in sides:
        low, middle, high = statistics.quantiles(times[side], n=4)
        known = [growth for growth in growths[side] if growth is not None]
        grown = f"{max(known) / MB:7.0f}" if known else "unknown"
        bound = 1.25 * live[side] + ALLOWED_BYTES
        columns = f"{live[side] / MB:8.0f} {grown:>8} {bound / MB:8.0f}  {middle:6.3f} [{low:.3f}, {high:.3f}]"
        print(f"{workload:24} {side:8} {columns}  {ratio if side == 'remedy' else 1:5.3f}  {descriptions[side]}")
    sys.stdout.flush()


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", default=WORKLOADS, help="comma list of NAME:eager, NAME:checkpoint or NAME:generated"
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options.child[0], options.child[1] == "remedy")
        return
    print(f"{'MB':33} {'live':>8} {'growth':>8} {'bound':>8}  CPU s a step, quartiles  ratio")
    for workload in options.workloads.split(","):
        compare(workload, options.pairs)


if __name__ == "__main__":
    main()
