"""A plan for people: its program as text with sizes, costs and lifetimes as notes, and its generated code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from magis.api.plan import Plan
from magis.api.plan_file import program_of
from magis.api.units import human_bytes, human_seconds
from magis.api.why import births_and_deaths
from magis.fission.tree import Program
from magis.ir.graph import Node, NodeId, Value
from magis.ir.text import print_graph
from magis.lower.lower import lower
from magis.rules.unremat import value_numbers
from magis.sim.timeline import Timeline, timeline


class Operator(msgspec.Struct, frozen=True):
    """One scheduled operator: bytes of the storages that it makes, seconds of one launch, the steps at which
    the last of them is live, and whether any is live at the worst moment."""

    id: int
    op: str
    direction: str
    module: str
    line: str
    nbytes: int
    latency_s: float
    step: int
    live_until: int
    hot: bool


class ProgramView(msgspec.Struct, frozen=True):
    """A plan's program in its order, and its worst moment, operators' workspace included."""

    plan: Plan
    peak_bytes: int
    peak_step: int
    operators: tuple[Operator, ...]


def view(plan: Plan) -> ProgramView:
    """The plan's program with costs and lifetimes. Raises PlanError as `program_of` does."""
    program, schedule = program_of(plan)
    graph = program.graph
    scheduled = [graph.nodes[node_id] for node_id in schedule if not graph.nodes[node_id].is_input]
    workspaces = {graph.call(node): nbytes for node, nbytes in zip(scheduled, plan.workspaces_bytes)}
    found = timeline(lower(program, schedule), lambda call: workspaces.get(call, 0))
    worst = found.peak_steps[0] if found.peak_steps else 0
    return ProgramView(plan, found.peak_bytes, worst, tuple(_operators(plan, scheduled, found)))


def _operators(plan: Plan, scheduled: Sequence[Node], found: Timeline) -> list[Operator]:
    lives = births_and_deaths(found)
    hotspots = found.hotspots
    operators = []
    for step, (node, latency_s) in enumerate(zip(scheduled, plan.latencies_s)):
        values = [value for i in range(len(node.outputs)) if (value := Value(node.id, i)) in lives]
        last = max((lives[value].last for value in values), default=step)
        nbytes = sum(lives[value].nbytes for value in values)
        hot = any(value in hotspots for value in values)
        place = node.origin
        operators.append(
            Operator(node.id, node.op, place.direction, place.module, place.line, nbytes, latency_s, step, last, hot)
        )
    return operators


def recomputed(plan: Plan) -> dict[str, int]:
    """How many operators of each kind run again, views left out; most first."""
    program, _ = program_of(plan)
    seen: set[int] = set()
    found: Counter[str] = Counter()
    numbers = value_numbers(program.graph)
    for node_id, node in program.graph.nodes.items():
        views = all(spec is None or spec.alias_of is not None for spec in node.outputs)
        if numbers[node_id] in seen and not views:
            found[node.op] += 1
        seen.add(numbers[node_id])
    return dict(found.most_common())


def program_text(shown: ProgramView) -> str:
    """The program with a note on each operator, then its order and its peak."""
    program, schedule = program_of(shown.plan)
    notes = {NodeId(operator.id): _note(operator) for operator in shown.operators}
    order = "as written" if schedule == tuple(n.id for n in program.graph.nodes_in_order()) else shown.plan.schedule
    worst = shown.operators[shown.peak_step] if shown.operators else None
    at = f" at step {shown.peak_step} (%{worst.id})" if worst else ""
    return f"{print_graph(program.graph, notes)}order: {order}\npeak: {human_bytes(shown.peak_bytes)}{at}\n"


def _note(operator: Operator) -> str:
    if not operator.nbytes:
        return human_seconds(operator.latency_s) if operator.latency_s else "no cost"
    live = f"live {operator.step}..{operator.live_until}"
    words = [human_bytes(operator.nbytes), human_seconds(operator.latency_s), live]
    return ", ".join([*words, "hot"] if operator.hot else words)


def code(plan: Plan) -> str:
    """The Python that `run` executes for this plan."""
    from magis.backend.codegen import generate

    program, schedule = program_of(plan)
    return generate(lower(Program(program.graph, program.ftree), schedule)).text
