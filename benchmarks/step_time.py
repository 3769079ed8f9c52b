"""Time of the generated step against eager, in one process on one thread: alternating pairs of CPU time.

    python benchmarks/step_time.py [--models hf-bert-toy,peer-bert] [--pairs 15]

Prints the median over pairs of generated / eager, and both medians in seconds, with the default malloc and inside
`follow_live`.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics

import torch

from magis import zoo
from magis.api.eager import EagerStep
from magis.backend.meters import cpu_time_s
from magis.backend.resident import follow_live
from magis.backend.runtime import compile_routine
from magis.capture.capture import capture
from magis.capture.workload import workload
from magis.fission.tree import Program
from magis.lower.lower import lower


def compare(name: str, pairs: int) -> None:
    """Times one model and prints two lines."""
    made = workload(zoo.build(name), name)
    captured = capture(made)
    compiled = compile_routine(lower(Program(captured.graph), captured.schedule))
    eager = EagerStep(made)

    def generated() -> None:
        with torch.no_grad():
            compiled(captured.bind(made))

    for label, place in (("default malloc", contextlib.nullcontext), ("follow_live", follow_live)):
        with place():
            eager()
            generated()
            times: dict[bool, list[float]] = {True: [], False: []}
            for pair in range(pairs):
                for is_eager in (pair % 2 == 0, pair % 2 == 1):
                    times[is_eager].append(cpu_time_s(eager if is_eager else generated))
                eager.clear_gradients()
        ratio = statistics.median(ours / base for ours, base in zip(times[False], times[True]))
        base, ours = (statistics.median(times[side]) for side in (True, False))
        print(f"{name:<16}{label:<16} ratio {ratio:.3f}   eager {base:.4f} s   generated {ours:.4f} s", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="hf-bert-toy,peer-bert")
    parser.add_argument("--pairs", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models.split(","):
        compare(name, given.pairs)


if __name__ == "__main__":
    main()
