"""Why a step needs the memory it needs: what is live at its worst moment, by module and source line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from magis.api.costs import Progress, silent
from magis.api.lowering import costs_of, lowered
from magis.api.models import ModelSource
from magis.api.plan import Plan, batch_size, bytes_by_kind
from magis.api.plan_file import program_of
from magis.fission.tree import Program
from magis.ir.graph import Call, Graph, Node, NodeId, Schedule, Value
from magis.ops.registry import rule_for
from magis.sim.timeline import Lifetime, Timeline, timeline


class Place(msgspec.Struct, frozen=True):
    """A step: its number, from 0, and what runs there. `module` is empty outside any module."""

    step: int
    direction: str
    module: str
    line: str
    op: str


RESULT, SAVED, TEMPORARY = PURPOSES = ("result", "saved", "temporary")
"""Handed back to the caller (gradients, loss, outputs); made in the forward pass and kept for the backward pass; or
made and used up in passing."""


class HotTensor(msgspec.Struct, frozen=True):
    """One tensor that is live at the worst moment: bytes of its storage, where it was made, which step frees
    it. `name` is its place in the program, such as `%12` or `%12.1`; `purpose` is one of `PURPOSES`."""

    name: str
    purpose: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    born: Place
    dies: Place


class ModuleBytes(msgspec.Struct, frozen=True):
    """What one module's tensors hold at the worst moment."""

    module: str
    nbytes: int
    tensors: int


class PeakReport(msgspec.Struct, frozen=True):
    """The worst moment of a step (the first, if there are several).

    `peak_bytes` is the sum of `residents` (by kind of input), `tensors` (largest first) and
    `workspace_bytes`; `purposes` and `modules` sum up the tensors. `live_bytes` is everything live at each step.
    `workspace_known`: operators' workspace is the plan's; without a plan, only what follows from their definition.
    """

    model: str
    batch: int
    peak_bytes: int
    step_peak_bytes: int
    peak: Place
    residents: dict[str, int]
    workspace_bytes: int
    workspace_known: bool
    purposes: dict[str, int]
    tensors: tuple[HotTensor, ...]
    modules: tuple[ModuleBytes, ...]
    live_bytes: tuple[int, ...]


def why(source: ModelSource, progress: Progress = silent) -> PeakReport:
    """The report on a model's step as eager runs it. Raises UsageError and CaptureError as `make_plan` does."""
    progress(f"capturing {source.reference}")
    captured = source.capture()
    return peak_report(source.reference, Program(captured.graph), captured.schedule)


def why_plan(plan: Plan) -> PeakReport:
    """The report on a plan's program in its order. Raises PlanError as `program_of` does."""
    program, schedule = program_of(plan)
    workspaces = costs_of(lowered(program, schedule), plan.workspaces_bytes)
    return peak_report(plan.model, program, schedule, workspaces)


def peak_report(
    model: str, program: Program, schedule: Schedule, workspaces: Mapping[Call, float] | None = None
) -> PeakReport:
    """The report on a program in a given order; `workspaces` is that of every operator, if it is known."""
    graph = program.graph
    workspace = workspace_bytes if workspaces is None else lambda call: int(workspaces.get(call, 0))
    found = timeline(lowered(program, schedule), workspace)
    worst = found.peak_steps[0] if found.peak_steps else 0
    hot = [life for life in found.lifetimes if life.first <= worst <= life.last and life.nbytes]
    results = frozenset(graph.root(value) for value in graph.outputs)
    tensors = [_tensor(graph, found, life, results) for life in hot if life.value is not None]
    tensors.sort(key=lambda tensor: (-tensor.nbytes, tensor.born.step))
    return PeakReport(
        model=model,
        batch=batch_size(graph),
        peak_bytes=found.peak_bytes,
        step_peak_bytes=found.peak_bytes - found.resident_bytes,
        peak=_place(graph, found, worst),
        residents={kind: nbytes for kind, nbytes in bytes_by_kind(graph).items() if nbytes},
        workspace_bytes=found.peak_bytes - found.resident_bytes - sum(life.nbytes for life in hot),
        workspace_known=workspaces is not None,
        purposes={p: sum(t.nbytes for t in tensors if t.purpose == p) for p in PURPOSES},
        tensors=tuple(tensors),
        modules=_modules(tensors),
        live_bytes=found.live_bytes,
    )


def workspace_bytes(call: Call) -> int:
    """What an operator allocates and frees while it runs, as far as it follows from its definition."""
    return rule_for(call.op).workspace_bytes(call)


def births_and_deaths(found: Timeline) -> dict[Value, Lifetime]:
    """The lifetime of each storage, by the value that owns it."""
    return {life.value: life for life in found.lifetimes if life.value is not None}


def _tensor(graph: Graph, found: Timeline, life: Lifetime, results: frozenset[Value]) -> HotTensor:
    value = life.value
    assert value is not None
    spec = graph.spec(value)
    name = f"%{value.node}" + (f".{value.output}" if len(graph.nodes[value.node].outputs) > 1 else "")
    born, dies = _place(graph, found, life.first), _place(graph, found, life.last)
    purpose = SAVED if born.direction == "forward" and dies.direction != "forward" else TEMPORARY
    if value in results:
        purpose = RESULT
    return HotTensor(name, purpose, life.nbytes, spec.shape, spec.dtype.value, born, dies)


def _place(graph: Graph, found: Timeline, step: int) -> Place:
    node = _node(graph, found.nodes, step)
    if node is None:
        return Place(step, "", "", "", "")
    origin = node.origin
    return Place(step, origin.direction, origin.module, origin.line, node.op)


def _node(graph: Graph, nodes: Sequence[NodeId | None], step: int) -> Node | None:
    node_id = nodes[step] if step < len(nodes) else None
    return None if node_id is None else graph.nodes[node_id]


def _modules(tensors: Iterable[HotTensor]) -> tuple[ModuleBytes, ...]:
    """Sums by the module that made the tensors, largest first."""
    found: dict[str, list[int]] = {}
    for tensor in tensors:
        found.setdefault(tensor.born.module, []).append(tensor.nbytes)
    sums = [ModuleBytes(module, sum(sizes), len(sizes)) for module, sizes in found.items()]
    return tuple(sorted(sums, key=lambda entry: -entry.nbytes))
