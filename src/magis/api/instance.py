"""A plan brought to life on its model, at the planned batch size or, by the same steps, at another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from magis.api.lowering import lowered
from magis.api.models import ModelSource
from magis.api.plan import Plan
from magis.api.plan_file import check_plan
from magis.api.regions import forest_of
from magis.errors import PlanError, UsageError
from magis.fission.parts import CannotSplitError
from magis.fission.tree import Program
from magis.ir.graph import Graph, Schedule
from magis.ir.structure import order_violation
from magis.ir.text import parse_graph
from magis.lower.routine import Routine
from magis.ops.registry import rules
from magis.ops.swap import LOAD, STORE
from magis.search.replay import replay

if TYPE_CHECKING:
    import torch

    from magis.backend.runtime import CompiledStep
    from magis.capture.capture import Captured
    from magis.capture.workload import Workload


@dataclass(frozen=True)
class Instance:
    """A program for one captured step: what is simulated, compiled and run."""

    source: ModelSource
    captured: Captured
    program: Program
    schedule: Schedule

    def routine(self) -> Routine:
        """The program as instructions."""
        return lowered(self.program, self.schedule)

    def compile(self, swap_dir: Path | None = None) -> CompiledStep:
        """The program as a Python function. What it swaps goes to a file in `swap_dir`, else to the device's host
        memory. Raises UsageError for a folder that cannot be written."""
        from magis.backend.runtime import compile_routine
        from magis.backend.swapping import SwapFile

        return compile_routine(self.routine(), None if swap_dir is None else SwapFile(swap_dir))

    def workload(self) -> Workload:
        """Model and batch with real tensors."""
        return self.source.build(fake=False)

    def state(self, workload: Workload) -> Mapping[str, torch.Tensor]:
        """The optimizer's tensors, by name."""
        return {} if self.captured.update is None else self.captured.update.state(workload)


def instantiate(plan: Plan, batch: int | None = None) -> Instance:
    """Captures the plan's model again and puts the plan on it.

    With another `batch` the same rules are applied to the step captured at that size. Raises PlanError when
    the model is not the one that was planned, UsageError when the size cannot be changed."""
    source = plan.source()
    if batch is None or batch == plan.batch:
        captured = source.capture()
        check_plan(plan, captured)
        graph = parse_graph(plan.program)
        _check_operators(graph, captured.graph)
        return Instance(source, captured, Program(graph, forest_of(plan.regions)), _schedule(plan))
    from magis.aten.infer import infer

    source = replace(source, sizes={**source.sizes, "batch": batch})
    captured = source.capture()
    schedule = _schedule(plan)
    try:
        found = Instance(source, captured, replay(Program(captured.graph), plan.history, infer), schedule)
        if order_violation(found.program.graph, schedule) is None:
            if found.program.enabled:
                found.routine()  # regions are checked again: there are other lengths to divide
            return found
    except (PlanError, CannotSplitError):
        if not plan.regions:
            raise
    raise UsageError(f"this plan cannot be replayed at batch {batch}; run it at the planned one")


def _check_operators(graph: Graph, captured: Graph) -> None:
    """A plan file may only use operators that the model uses or that a rule describes, and none may write anywhere
    but where it says. Raises PlanError."""
    from magis.aten.convert import overload

    known = {node.op for node in captured.nodes.values()} | rules().keys()
    for node in graph.nodes.values():
        if node.is_input:
            continue
        if node.op not in known:
            raise PlanError(f"the plan uses {node.op}, which neither the model nor magis does: plan again")
        mutable = node.op not in (STORE, LOAD) and overload(node.op)._schema.is_mutable
        if mutable != node.writes:
            raise PlanError(f"the plan hides or invents an in-place write (%{node.id}, {node.op}): plan again")


def _schedule(plan: Plan) -> Schedule:
    from magis.api.plan_file import parse_schedule

    return parse_schedule(plan.schedule)
