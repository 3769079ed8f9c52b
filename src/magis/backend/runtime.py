"""Compiles a routine and runs it; errors in generated code name the operator's module and source line."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from magis.backend import naming
from magis.backend.codegen import Source, generate
from magis.backend.swapping import Transfers, default_transfers, swaps
from magis.errors import UsageError
from magis.lower.check import verify_routine
from magis.lower.routine import Routine

_numbers = itertools.count(1)


class CompiledStep:
    """A step as a Python function. Call it under `torch.no_grad()`."""

    def __init__(self, routine: Routine, source: Source) -> None:
        self.source = source.text
        self.filename = f"<magis {naming.identifier(routine.name)} {next(_numbers)}>"
        self._inputs = len(routine.inputs)
        self._located = _Located(self.filename, source)
        names: dict[str, Any] = dict(source.names)
        exec(compile(source.text, self.filename, "exec"), names)
        self._step: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = names["step"]
        linecache.cache[self.filename] = (len(source.text), None, source.text.splitlines(True), self.filename)
        weakref.finalize(self, linecache.cache.pop, self.filename, None)

    def __call__(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Runs the step on the tensors of the routine's inputs, in order. Empties the list, so that it keeps no
        tensor alive."""
        if len(inputs) != self._inputs:
            raise UsageError(f"the step takes {self._inputs} tensors, not {len(inputs)}")
        with self._located:
            return self._step(inputs)


class _Located:
    """Adds to an error in generated code the line, the module and the model's source line it comes from."""

    def __init__(self, filename: str, source: Source) -> None:
        self._filename = filename
        self._nodes = source.nodes

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while trace is not None and error is not None:
            found = self._nodes.get(trace.tb_lineno)
            if trace.tb_frame.f_code.co_filename == self._filename and found is not None:
                node, origin = found
                where = naming.comment([origin.module, origin.line]) or "an unnamed module"
                error.add_note(f"in node %{node} of {where}, {self._filename} line {trace.tb_lineno}")
            trace = trace.tb_next


def compile_routine(routine: Routine, transfers: Transfers | None = None) -> CompiledStep:
    """The routine as a function; `transfers` carry out its swapping, by default those of its device. Raises PlanError
    for operators or arguments that this PyTorch does not have, InvalidGraphError for a routine that is not
    well-formed."""
    verify_routine(routine)
    source = generate(routine)
    if swaps(routine):
        used = transfers or default_transfers(routine)
        source = replace(source, names={**source.names, "store": used.store, "load": used.load, "wait": used.wait})
    return CompiledStep(routine, source)
