"""Random programs under limits: the search's program gives the same results bit by bit, in the memory it says."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import programs
from rule_graphs import known
from schedule_graphs import graphs, peak, random_order

from builder import Recorded
from magis.backend.meters import storage_peak
from magis.backend.runtime import compile_routine
from magis.fission.tree import Program
from magis.ir.graph import Call, Graph
from magis.ir.structure import topological_order
from magis.ir.text import print_graph
from magis.ir.verify import verify
from magis.lower.lower import lower
from magis.schedule.incremental import Scheduled
from magis.search.objective import Objective
from magis.search.replay import replay
from magis.search.search import Found, Search
from magis.search.state import MState

SHARES = st.sampled_from([0.0, 0.3, 0.6, 0.9])


def latency(call: Call) -> float:
    return 1.0 + len(call.op) + sum(spec.numel for spec in call.inputs)


def searched(base: MState, memory: float, slowdown: float | None) -> Found:
    seconds = None if slowdown is None else (1 + slowdown) * base.latency_s
    objective = Objective(seconds, int(memory * base.peak_bytes) if slowdown is None else None)
    return Search(base, objective, latency, iterations=30).run()


@given(programs(), SHARES, st.none() | SHARES)
@settings(deadline=None, max_examples=60)
def test_results_and_memory(program: Recorded, memory: float, slowdown: float | None) -> None:
    order = topological_order(program.graph)
    found = searched(MState.of(Scheduled.of(program.graph, order), latency), memory, slowdown)
    routine = lower(found.best.program, found.best.schedule)
    left = []
    with torch.no_grad():
        for step in (compile_routine(lower(Program(program.graph), order)), compile_routine(routine)):
            torch.manual_seed(1)
            inputs = program.fresh_inputs()
            results = step(list(inputs))
            left.append([*results, *inputs, torch.default_generator.get_state()])
        assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
        assert storage_peak(lambda: step(list(inputs)), inputs).peak_bytes == found.best.peak_bytes


@given(graphs(1, 40), st.integers(0, 10**6), SHARES, st.none() | SHARES)
@settings(deadline=None, max_examples=60)
def test_what_it_says_is_true(graph: Graph, seed: int, memory: float, slowdown: float | None) -> None:
    base = MState.of(Scheduled.of(known(graph), random_order(graph, seed)), latency)
    found = searched(base, memory, slowdown)
    best = found.best
    verify(best.graph, best.schedule)
    assert best.peak_bytes == peak(best.graph, best.schedule)
    assert best.latency_s == MState.of(best.scheduled, latency).latency_s
    assert print_graph(replay(base.program, best.history).graph) == print_graph(best.graph)
    writes = [sorted(n.id for n in g.nodes.values() if n.writes or n.is_input) for g in (base.graph, best.graph)]
    assert writes[0] == writes[1]
    assert len(best.graph.outputs) == len(base.graph.outputs)
