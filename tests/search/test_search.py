"""The search: the same each time, never worse for more work or than any start, and honest about what it found."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from rule_graphs import FIGURE, known
from schedule_graphs import drawn

from magis.api.costs import cost_model
from magis.capture.capture import capture
from magis.capture.workload import Workload
from magis.errors import PlanError
from magis.fission.tree import Program
from magis.ir.edit import GraphEdit
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
from magis.sim.simulate import simulate

COSTS = cost_model("rtx3090")


def blocks(count: int = 3, loss: bool = True) -> Graph:
    """A step of a small network with skip connections and dropout."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
                for _ in range(count)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + torch.nn.functional.dropout(block(x), 0.1, self.training)
            return x

    torch.manual_seed(0)
    net = Net() if loss else Net().eval()
    return capture(Workload(net, (lambda m, b: m(b).square().mean()) if loss else None, torch.randn(256, 16))).graph


@cache
def base() -> MState:
    return start(blocks())


def start(graph: Graph) -> MState:
    order = topological_order(graph)
    return MState.of(Scheduled.of(graph, order, COSTS.workspace_bytes), COSTS.latency_s)


def within(state: MState, memory: float | None = None, slowdown: float | None = None) -> Objective:
    return Objective(
        None if slowdown is None else slowdown * state.latency_s,
        None if memory is None else int(memory * state.peak_bytes),
    )


def search(state: MState, objective: Objective, iterations: int, **watch) -> Found:
    return Search(state, objective, COSTS.latency_s, iterations=iterations, **watch).run()


@cache
def found_within(memory: float | None = None, slowdown: float | None = None) -> Found:
    return search(base(), within(base(), memory, slowdown), 30)


def outcome(found: Found) -> tuple:
    return found.best.history, found.best.schedule, print_graph(found.best.graph), found.states, found.stop_reason


LIMITS = [{"memory": 0.8}, {"memory": 0.6}, {"memory": 0.1}, {"slowdown": 1.0}, {"slowdown": 1.1}, {"slowdown": 2.0}]


@pytest.mark.parametrize("limit", LIMITS)
def test_the_same_twice(limit):
    assert outcome(search(base(), within(base(), **limit), 30)) == outcome(found_within(**limit))


def test_the_same_in_another_process():
    again = (
        "from test_search import *\n"
        "import hashlib\n"
        "for limit in LIMITS[1::3]:\n"
        "    print(hashlib.sha256(repr(outcome(found_within(**limit))).encode()).hexdigest())\n"
    )
    paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    said = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, "-c", again], env=environment, capture_output=True, text=True, check=True
        )
        said.add(done.stdout)
    assert len(said) == 1 and len(said.pop().split()) == 2


@pytest.mark.parametrize("limit", [{"memory": 0.6}, {"slowdown": 1.2}])
def test_fewer_iterations_are_the_beginning_of_more(limit):
    objective = within(base(), **limit)
    keys = []
    for iterations in (0, 1, 2, 3, 5, 8, 13, 21, 34):
        found = search(base(), objective, iterations)
        assert found.states == iterations
        keys.append(objective.key(found.best.latency_s, found.best.peak_bytes))
    assert keys == sorted(keys, reverse=True)
    assert len(set(keys)) > 2


@pytest.mark.parametrize("limit", LIMITS)
def test_it_is_as_good_as_any_start_and_as_it_says(limit):
    objective = within(base(), **limit)
    found = found_within(**limit)
    best = found.best
    assert [s.name for s in found.starts][:2] == ["eager", "recompute each block"]
    key = objective.key(best.latency_s, best.peak_bytes)
    assert all(key <= objective.key(s.latency_s, s.peak_bytes) for s in found.starts)
    verify(best.graph, best.schedule)
    full = simulate(lower(best.program, best.schedule), COSTS.latency_s, COSTS.workspace_bytes)
    assert (full.peak_bytes, full.latency_s) == (best.peak_bytes, best.latency_s)
    assert found.met == objective.met(best.latency_s, best.peak_bytes)
    assert best.fingerprint == MState.of(best.scheduled, COSTS.latency_s).fingerprint


@pytest.mark.parametrize("limit", LIMITS)
def test_a_history_makes_the_program_again(limit):
    best = found_within(**limit).best
    assert print_graph(replay(base().program, best.history).graph) == print_graph(best.graph)


def test_a_history_that_does_not_apply_is_refused():
    best = found_within(memory=0.6).best
    assert best.history
    with pytest.raises(PlanError, match=r"step 1 of its history \(recompute\) does not apply"):
        replay(Program(known(drawn(FIGURE, "ABCDEF"))), best.history)
    with pytest.raises(PlanError, match=r"step 2 of its history \(magic\) does not apply"):
        replay(base().program, [best.history[0], ("magic", (1, 2, 3))])


def test_limits_are_met():
    assert [found_within(**limit).met for limit in LIMITS] == [True, True, False, True, True, True]


def test_no_program_counts_twice():
    class Noting(Search):
        def _meet(self, state: MState) -> None:
            if self._doing == "exploring":
                explored.append(state.fingerprint.total)
            super()._meet(state)

    explored: list[int] = []
    Noting(base(), within(base(), memory=0.1), COSTS.latency_s, iterations=80).run()
    assert len(explored) > 40
    assert len(set(explored)) == len(explored)
    assert base().fingerprint.total not in explored


@pytest.mark.parametrize("states", [1, 3, 20])
def test_ctrl_c_keeps_the_best(states):
    def watch(found: Found) -> None:
        if found.states == states:
            raise KeyboardInterrupt

    objective = within(base(), memory=0.5)
    found = search(base(), objective, 40, watch=watch)
    assert found.stop_reason == "interrupted"
    assert outcome(found)[:4] == outcome(search(base(), objective, states))[:4]


def test_without_iterations_it_is_the_captured_step():
    found = search(base(), within(base(), memory=0.5), 0)
    assert found.best is base()
    assert (found.states, found.met, found.best.history) == (0, False, ())


def test_plans_made_by_hand_are_tried_even_without_time():
    found = Search(base(), within(base(), memory=0.5), COSTS.latency_s, budget_s=0.0).run()
    assert [s.name for s in found.starts] == ["eager", "recompute each block", "recompute cheap operators"]
    assert found.best.peak_bytes == min(s.peak_bytes for s in found.starts)
    assert found.stop_reason == "budget used up"


def no_cost(call: Call) -> float:
    return 0.0


@pytest.mark.parametrize("objective", [Objective(1.0), Objective(None, 1), Objective(0.0, 0), Objective()])
def test_a_graph_without_operators(objective):
    edit = GraphEdit(Graph({}, ()))
    for graph in (edit.finish(), blocks(0, loss=False)):
        found = Search(MState.of(Scheduled.of(graph, topological_order(graph)), no_cost), objective, no_cost).run()
        assert found.best.history == ()
        assert found.stop_reason == "nothing left to try"


def test_nothing_may_run_again():
    state = MState.of(Scheduled.of(graph := drawn(FIGURE, "ABCDEF"), topological_order(graph)), no_cost)
    found = Search(state, Objective(None, 3), no_cost).run()
    assert (found.best.history, found.best.peak_bytes, found.met) == ((), 4, False)


def test_the_figure():
    state = MState.of(Scheduled.of(graph := known(drawn(FIGURE, "ABCDEF")), topological_order(graph)), lambda call: 1.0)
    found = Search(state, Objective(None, 3), lambda call: 1.0).run()
    assert (found.best.peak_bytes, found.best.latency_s, found.met) == (3, 7.0, True)


def test_an_inference_call_with_a_long_skip_connection():
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = torch.cat([x] * 8)
            return wide.tanh() + wide.tanh().sum() + (x @ x.t() @ x).sum()

    graph = capture(Workload(Net(), None, torch.randn(64, 64))).graph
    state = start(graph)
    found = search(state, within(state, memory=0.1), 40)
    assert found.best.peak_bytes <= min(s.peak_bytes for s in found.starts)


def test_a_limit_out_of_reach_gives_no_more_memory_than_one_within_reach():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.3))]
    graph = capture(
        Workload(torch.nn.Sequential(*layers), lambda m, b: m(b).square().mean(), torch.randn(64, 64))
    ).graph
    state = start(graph)
    reached, missed = (search(state, within(state, memory=share), 60) for share in (0.7, 0.5))
    assert reached.met and not missed.met
    assert missed.best.peak_bytes <= reached.best.peak_bytes
