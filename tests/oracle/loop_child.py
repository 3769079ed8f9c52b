"""The search for missing loops in a process of its own: kernels that check no shapes may crash it.

Parent and child send each other pickles over pipes, each after its length: questions; numbers of candidates before they
are run, and loops found. A candidate during which the child dies, or is silent for too long, counts as invalid; a new
child continues after it.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from magis.ops.loop import Loop
from magis.ops.registry import rule_for
from magis.ops.rule import OpRule, Sample
from oracle.loop_excuses import excuse
from oracle.loop_search import searchable, valid_loops
from oracle.loops import described
from oracle.run import Case, case_of, execute

SAFE = ("concat", "create", "gather", "matmul", "pointwise", "reduce", "softmax", "view")
"""Families of operators that check what they are given. Wrong candidates of others crash, or silently spoil the memory
of the process: a copy of it runs each call."""

DONE, DIED = "done", "died"

_STARTS_SECONDS = 120
_RUNS_SECONDS = 2.0  # of a short call: spoilt memory may also make it hang
_RUNS_LONG_SECONDS = 20.0
_SHORT = 10**6


class LoopChild:
    """A process that searches loops; made when first needed, made anew after a crash."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LoopChild:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None

    def missing(self, case: Case, rule: OpRule | None = None, most: int = 300) -> list[str]:
        """Loops that the case's rule (or another one) lacks, one sentence each."""
        if not searchable(case):
            return []
        loops = list((rule or rule_for(case.call.op)).loops(case.call))
        found = [loop for loop in self.valid(case, loops, most) if excuse(case.call, loop) is None]
        return [f"{case.call.op} may run along a {described(loop)}, which its rule lacks" for loop in found]

    def runs(self, call: Sample | Case) -> bool:
        """Whether PyTorch accepts a call, and survives it."""
        process = self.process or self._start()
        found: list[Loop] = []
        return self._ask(process, call, _RUNS_SECONDS, found) is None

    def valid(self, case: Case, loops: Sequence[Loop], most: int) -> list[Loop]:
        """`valid_loops` in the child."""
        start, found = 0, list(loops)
        short = rule_for(case.call.op).flops(case.call) < _SHORT
        patience = _RUNS_SECONDS if short else _RUNS_LONG_SECONDS
        while True:
            process = self.process or self._start()
            last = self._ask(process, (case, found, start, most), patience, found)
            if last is None:
                return found[len(loops) :]
            if last < start:
                raise RuntimeError(f"the search for loops of {case.call.op} dies")
            start = last + 1

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "oracle.loop_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,  # nothing is read ahead of what is waited for
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(_STARTS_SECONDS) or receive(self.process.stdout) != DONE:
                raise RuntimeError("the process that searches loops does not start")
        return self.process

    def _ask(
        self, process: subprocess.Popen[bytes], question: object, patience: float, found: list[Loop]
    ) -> int | None:
        """Adds the loops that are found; the number of the candidate during which the child died or was silent for
        longer than `patience` (-1: before all), None when it came to the end."""
        assert process.stdin is not None and process.stdout is not None
        at = -1
        try:
            send(process.stdin, question)
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while selector.select(patience):
                    message = receive(process.stdout)
                    if message in (DONE, DIED):
                        return None if message == DONE else at
                    if isinstance(message, Loop):
                        found.append(message)
                    else:
                        at = message
        except (EOFError, BrokenPipeError):
            pass
        self.close()
        return at


def send(pipe: IO[bytes], message: object) -> None:
    """Writes one message."""
    data = pickle.dumps(message)
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[pipe.write(data) :]


def receive(pipe: IO[bytes]) -> Any:
    """Reads one message. Raises EOFError when the other side is gone."""
    size = _exactly(pipe, 8)
    return pickle.loads(_exactly(pipe, int.from_bytes(size, "little")))


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = pipe.read(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def main() -> None:
    """Answers questions until the parent is gone."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what kernels print does not come between
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    send(answers, DONE)
    with os.fdopen(0, "rb", buffering=0, closefd=False) as questions:
        while True:
            try:
                question = receive(questions)
            except EOFError:
                return
            if isinstance(question, (Sample, Case)) or rule_for(question[0].call.op).family not in SAFE:
                send(answers, _forked(question, answers))
            else:
                _answer(question, answers)
                send(answers, DONE)


def _answer(question: Any, answers: IO[bytes]) -> None:
    if isinstance(question, Sample):
        case_of(question)
        return
    if isinstance(question, Case):
        execute(question.call, question.tensors)
        return
    for loop in valid_loops(*question, trying=lambda number: send(answers, number)):
        send(answers, loop)


def _forked(question: Any, answers: IO[bytes]) -> str:
    """Answers in a copy of this process, and says how it ended."""
    process = os.fork()
    if not process:
        code = 1
        try:
            _answer(question, answers)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    return DIED if status else DONE


if __name__ == "__main__":
    main()
