"""Figure 2: a chain of 32 operators forward and 32 backward, whole and in 16 parts."""

from __future__ import annotations

import pytest
from einsums import fission, infer
from examples import EXAMPLES, drawn, in_order, names

from magis.fission.parts import Scope
from magis.fission.tree import Program
from magis.ir.graph import Graph, NodeId
from magis.lower.lower import lower
from magis.lower.routine import expand
from magis.rules.split import split
from magis.sim.region import region_cost
from magis.sim.timeline import no_latency, no_workspace, timeline

FIGURE = EXAMPLES["fig2_chain"]
CASES = {case["id"]: case for case in FIGURE["cases"]}
PARTS = 16
SIZE = 32


def chain() -> tuple[Graph, dict[str, NodeId]]:
    order = ["X", *(f"F{i}" for i in range(1, 33)), *(f"B{i}" for i in range(1, 33))]
    graph, ids = drawn(FIGURE["edge_list"], order, PARTS, SIZE // PARTS)
    return graph, ids


def test_all_forward_results_are_kept() -> None:
    graph, ids = chain()
    found = timeline(lower(Program(graph), tuple(in_order(graph))))
    assert found.peak_bytes == CASES["a"]["printed_peak"] == CASES["a"]["exact_peak"]
    assert [found.nodes[step] for step in found.peak_steps] == [ids[n] for n in CASES["a"]["exact_peak_steps_make"]]
    at_first = {life.value for life in found.lifetimes if life.first <= found.peak_steps[0] <= life.last}
    assert names(ids, (value for value in at_first if value)) == {f"F{i}" for i in range(1, 33)} | {"B1"}


def test_in_parts_only_a_sixteenth_of_them_is_kept() -> None:
    graph, ids = chain()
    region = fission(graph, [(node, 1) for name, node in ids.items() if name != "X"], PARTS)
    program = split(Program(graph), region).program
    order = tuple(in_order(program.graph))
    routine = lower(program, order, infer)
    found = timeline(routine)
    case = CASES["c"]
    assert found.peak_bytes == timeline(expand(routine)).peak_bytes == case["exact_peak"]
    assert found.peak_bytes - SIZE == case["printed_peak"] <= FIGURE["memory_limit"]  # without the result's buffer
    assert found.live_bytes[found.nodes.index(ids["B1"])] == case["live_at_B1"] + SIZE
    (whole,) = program.enabled
    cost = region_cost(whole, Scope.whole(graph), order[1:], no_latency, no_workspace, infer)
    assert cost.transient_bytes + SIZE == case["live_at_B1"]  # next to X


@pytest.mark.parametrize(
    ("nested", "peak"),
    [
        (False, 32 + 32 + 33 * 8),  # X, the result, F1..F32 and B1
        (True, 32 + 32 + 8 + 8 + 32 * 4),  # X, the result, F1, the buffer of B31, F2..F32 and B1
    ],
)
def test_regions_inside_regions(nested: bool, peak: int) -> None:
    """The figure's regions of 4 parts and, inside each, of 2; it also swaps, which brings these peaks down."""
    graph, ids = chain()
    program = split(Program(graph), fission(graph, [(n, 1) for name, n in ids.items() if name != "X"], 4)).program
    if nested:
        inside = [(n, 1) for name, n in ids.items() if name not in ("X", "F1", "B32")]
        program = split(program, fission(program.graph, inside, 2)).program
    assert [len(fission.region) for root in program.ftree for fission in root.walk()] == [64, 62][: 1 + nested]
    routine = lower(program, tuple(in_order(program.graph)), infer)
    assert timeline(routine).peak_bytes == timeline(expand(routine)).peak_bytes == peak
