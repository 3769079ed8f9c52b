"""A plan for people: its program as text with sizes, costs and lifetimes as notes, and its generated code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from magis.api.lowering import costs_of, lowered
from magis.api.plan import Plan
from magis.api.plan_file import program_of
from magis.api.units import human_bytes, human_seconds
from magis.api.why import births_and_deaths
from magis.ir.graph import Graph, NodeId, Value
from magis.ir.text import print_graph
from magis.lower.launches import steps
from magis.lower.routine import Compute, Routine
from magis.rules.unremat import value_numbers
from magis.sim.timeline import Timeline, timeline


class Operator(msgspec.Struct, frozen=True):
    """One scheduled operator: bytes of the storages that it makes (for one part, in a region), seconds of one launch,
    the steps at which the last of them is live, whether any is live at the worst moment, and how often it runs."""

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
    times: int = 1


class ProgramView(msgspec.Struct, frozen=True):
    """A plan's program in its order, and its worst moment, operators' workspace included."""

    plan: Plan
    peak_bytes: int
    peak_step: int
    operators: tuple[Operator, ...]


def view(plan: Plan) -> ProgramView:
    """The plan's program with costs and lifetimes. Raises PlanError as `program_of` does."""
    program, schedule = program_of(plan)
    routine = lowered(program, schedule)
    workspaces = costs_of(routine, plan.workspaces_bytes)
    found = timeline(routine, lambda call: int(workspaces.get(call, 0)))
    worst = found.peak_steps[0] if found.peak_steps else 0
    return ProgramView(plan, found.peak_bytes, worst, tuple(_operators(plan, program.graph, routine, found)))


def _operators(plan: Plan, graph: Graph, routine: Routine, found: Timeline) -> Iterator[Operator]:
    lives = births_and_deaths(found)
    hotspots = found.hotspots
    latencies = costs_of(routine, plan.latencies_s)
    for step, (instruction, call, times) in enumerate(steps(routine)):
        if not isinstance(instruction, Compute) or call is None:
            continue
        node = graph.nodes[instruction.node]
        values = [value for i in range(len(node.outputs)) if (value := Value(node.id, i)) in lives]
        last = max((lives[value].last for value in values), default=step)
        nbytes = sum(lives[value].nbytes for value in values)
        hot = any(value in hotspots for value in values)
        place = node.origin
        where = (place.direction, place.module, place.line)
        yield Operator(node.id, call.op, *where, nbytes, latencies[call], step, last, hot, times)


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
    worst = next((operator for operator in shown.operators if operator.step == shown.peak_step), None)
    at = f" at step {shown.peak_step} (%{worst.id})" if worst else ""
    return f"{print_graph(program.graph, notes)}order: {order}\npeak: {human_bytes(shown.peak_bytes)}{at}\n"


def _note(operator: Operator) -> str:
    if not operator.nbytes:
        return human_seconds(operator.latency_s) if operator.latency_s else "no cost"
    live = f"live {operator.step}..{operator.live_until}"
    words = [human_bytes(operator.nbytes), human_seconds(operator.latency_s), live]
    if operator.times > 1:
        words.insert(0, f"{operator.times} times")
    return ", ".join([*words, "hot"] if operator.hot else words)


def code(plan: Plan) -> str:
    """The Python that `run` executes for this plan."""
    from magis.backend.codegen import generate

    program, schedule = program_of(plan)
    return generate(lowered(program, schedule)).text
