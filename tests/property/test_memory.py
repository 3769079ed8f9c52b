"""Random programs: predicted peak = measured peak, results are eager's, loops equal themselves unrolled."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import programs

from builder import Recorded
from magis.backend.meters import storage_peak
from magis.backend.runtime import compile_routine
from magis.fission.tree import Program
from magis.ir.edit import GraphEdit
from magis.ir.graph import Call, NodeId
from magis.ir.structure import topological_order
from magis.ir.verify import verify
from magis.lower.check import verify_routine
from magis.lower.lower import lower
from magis.lower.routine import Piece, Routine, expand
from magis.sim.simulate import simulate
from magis.sim.timeline import no_latency, timeline
from routines import RoutineBuilder

FEW = settings(deadline=None, max_examples=60)


def shuffled(program: Recorded, seed: int) -> Routine:
    """Lowered in a random valid order."""
    chosen = random.Random(seed)
    order = topological_order(program.graph, {node: chosen.randrange(100) for node in program.graph.nodes})
    verify(program.graph, order)
    return lower(Program(program.graph), order)


def recomputed(program: Recorded, seed: int) -> Recorded:
    """The program with some readers of non-resident results given a copy of their producer."""
    chosen = random.Random(seed)
    graph = program.graph
    edit = GraphEdit(graph)
    for node in list(graph.nodes.values()):
        if node.is_input or any(spec is not None and spec.writes for spec in node.outputs):
            continue
        readers = [r for r in graph.users[node.id] if chosen.random() < 0.3]
        if not readers:
            continue
        copy = edit.copy(node.id, "copy of")
        for reader in readers:
            for value in graph.nodes[reader].inputs:
                if value.node == node.id:
                    edit.redirect(reader, value, type(value)(copy, value.output))
    return Recorded(edit.finish(), program.inputs)


@FEW
@given(programs(), st.integers(0, 1000))
def test_predicted_peak_and_results_are_the_real_ones(program: Recorded, seed: int) -> None:
    order = tuple(node.id for node in program.graph.nodes.values())
    eager = compile_routine(lower(Program(program.graph), order))
    variants = [shuffled(program, seed), shuffled(recomputed(program, seed), seed)]
    with torch.no_grad():
        torch.manual_seed(1)
        first_inputs = program.fresh_inputs()
        expected = eager(list(first_inputs))
        state = torch.default_generator.get_state()
        for routine in variants:
            verify_routine(routine)
            torch.manual_seed(1)
            inputs = program.fresh_inputs()
            results = compile_routine(routine)(list(inputs))
            assert torch.equal(torch.default_generator.get_state(), state)
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(inputs, first_inputs, strict=True))
            step = compile_routine(routine)
            found = storage_peak(lambda step=step, inputs=inputs: step(list(inputs)), inputs)
            estimate = simulate(routine, no_latency)
            assert found.step_peak_bytes == estimate.step_peak_bytes
            assert found.resident_bytes == estimate.resident_bytes


@FEW
@given(programs(), st.integers(0, 1000))
def test_timelines_add_up(program: Recorded, seed: int) -> None:
    found = timeline(shuffled(program, seed))
    live = [found.resident_bytes] * len(found.live_bytes)
    for life in found.lifetimes:
        for step in range(life.first, life.last + 1):
            live[step] += life.nbytes
    assert tuple(live) == found.live_bytes
    hot = {
        life.value
        for life in found.lifetimes
        for step in found.peak_steps
        if life.nbytes and life.first <= step <= life.last
    }
    assert hot == found.hotspots


@st.composite
def looped(draw: st.DrawFn) -> tuple[Routine, list[torch.Tensor]]:
    """A random routine over rows: loops in sequence and nested, uneven parts, partial sums, pieces written."""
    torch.manual_seed(0)
    rows, columns = draw(st.sampled_from([(4, 6), (6, 4), (8, 2)]))
    inputs = [torch.randn(rows, columns), torch.randn(columns, columns)]
    build = RoutineBuilder()
    x, w = (build.input(t) for t in inputs)
    outputs = [build.allocate((rows, columns)), build.allocate((columns,), 0.0)]
    for _ in range(draw(st.integers(1, 2))):
        parts = draw(st.sampled_from([n for n in (1, 2, 4) if rows % n == 0]))
        last = draw(st.sampled_from([0, rows // parts])) if parts > 1 else 0
        length = rows // parts
        ranges = [(parts - bool(last), Piece(0, length)), (1, Piece(0, last, rows - last))]
        for count, piece in ranges[: 2 if last else 1]:
            with build.loop(count):
                _part(draw, build, (x, w), outputs, piece)
        if draw(st.booleans()):
            x = build.op("aten.tanh.default", outputs[0])
    return build.routine(*outputs), inputs


def _part(draw: st.DrawFn, build: RoutineBuilder, inputs: tuple[int, int], outputs: list[int], piece: Piece) -> None:
    x, w = inputs
    part = build.slice(x, piece)  # type: ignore[arg-type]
    for name in draw(st.lists(st.sampled_from(["tanh", "exp", "relu", "neg"]), max_size=3)):
        part = build.op(f"aten.{name}.default", part)
    columns = build.tensors[w].shape[1]
    if draw(st.booleans()):
        result = build.op("aten.mm.default", part, w)
    else:
        result = build.allocate((piece.length, columns))
        inner = Piece(1, columns // 2)
        with build.loop(2):
            build.write(result, build.op("aten.mm.default", part, build.slice(w, inner)), inner)  # type: ignore[arg-type]
    if draw(st.booleans()):
        build.accumulate(outputs[1], build.op("aten.sum.dim_IntList", result, [0]), scale=0.5)  # type: ignore[arg-type]
    build.write(outputs[0], result, piece)  # type: ignore[arg-type]


def latency(call: Call) -> float:
    return (len(call.op) * 7919 + sum(spec.numel for spec in call.inputs) * 104729) % 9973 / 3e7


@FEW
@given(looped())
def test_loops_equal_their_unrolled_selves(made: tuple[Routine, list[torch.Tensor]]) -> None:
    routine, inputs = made
    verify_routine(routine)
    flat = expand(routine)
    verify_routine(flat)
    estimate = simulate(routine, latency, lambda call: len(call.op))
    assert estimate == simulate(flat, latency, lambda call: len(call.op))
    with torch.no_grad():
        folded, unrolled = compile_routine(routine), compile_routine(flat)
        results = folded(list(inputs))
        assert all(torch.equal(a, b) for a, b in zip(results, unrolled(list(inputs)), strict=True))
        peak = simulate(routine, no_latency).step_peak_bytes
        for step in (folded, unrolled):
            assert storage_peak(lambda step=step: step(list(inputs)), inputs).step_peak_bytes == peak


def test_a_copy_of_a_draw_replays_it() -> None:
    from programs import build

    program = build([(3, 4)], [("dropout", 0, 0), ("tanh", 1, 0), ("relu", 1, 0)], [1, 2, 3], [], False)
    again = recomputed(program, 1)
    assert len(again.graph.nodes) > len(program.graph.nodes) and NodeId(0) in again.graph.nodes
