"""Swapping and its inverse: the same results, less memory while a tensor is away, and time on links of their own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import programs

from builder import record
from magis.backend.meters import storage_peak
from magis.backend.runtime import compile_routine
from magis.backend.swapping import SwapError, SwapFile
from magis.errors import UsageError
from magis.fission.tree import Program
from magis.ir.graph import Call, Graph, NodeId, Schedule, Value
from magis.ir.structure import topological_order
from magis.ir.text import parse_graph, print_graph
from magis.ir.verify import verify
from magis.lower.check import verify_routine
from magis.lower.lower import lower
from magis.lower.routine import Load, Store, Wait
from magis.ops.swap import LOAD, STORE
from magis.rules.base import Change
from magis.rules.swap import Swap, Unswap, late_site, swap_site, swappable
from magis.schedule.incremental import Scheduled
from magis.search.state import MState
from magis.sim.links import Host
from magis.sim.simulate import simulate

RULE, UNDO = Swap(), Unswap()
SEEDS = st.integers(0, 10**6)


def chain() -> Graph:
    """x is made early and read late; three operators run in between."""

    def code(a: torch.Tensor) -> torch.Tensor:
        x = a.exp()
        y = x.sin().cos().tanh()
        return x.t().contiguous().t() + y

    return record(code, [torch.randn(64, 64)]).graph


def swapped(graph: Graph, node: int, early: int) -> Change:
    """The first result of a node swapped for all readers with larger numbers than `early`."""
    where = late_site(graph, Value(NodeId(node)), lambda reader: reader > early)
    assert where is not None
    change = RULE.apply(Program(graph), where)
    assert change is not None
    verify(change.program.graph)
    return change


def second(call: Call) -> float:
    """Every operator takes a second, transfers none where operators run."""
    return float(call.op not in (STORE, LOAD) and any(spec and spec.alias_of is None for spec in call.outputs))


def state_of(graph: Graph, order: Schedule, transfer_s: float) -> MState:
    """A state in which every copy takes so long; placed."""
    plain = MState.of(Scheduled.of(graph, order), second, Host(lambda nbytes: transfer_s))
    return plain.followed_by(("swap", ()), Change(Program(graph), frozenset(), frozenset()), plain.scheduled, second)


def test_a_view_is_taken_again_of_what_is_loaded() -> None:
    graph = chain()
    change = swapped(graph, 1, 2)
    ops = [node.op for node in change.program.graph.nodes.values()]
    assert (ops.count(STORE), ops.count(LOAD)) == (1, 1)
    assert parse_graph(print_graph(change.program.graph)) == change.program.graph
    undone = UNDO.apply(change.program, (change.added[1],))
    assert undone is not None
    assert undone.program.graph == graph


@pytest.mark.parametrize(("transfer_s", "seconds", "live"), [(0.5, 6, [2, 2, 2, 2, 2, 2]), (1.0, 6, []), (4.0, 11, [])])
def test_time_on_a_link_is_hidden_as_far_as_operators_run(transfer_s: float, seconds: float, live: list[int]) -> None:
    graph = swapped(chain(), 1, 2).program.graph
    state = state_of(graph, topological_order(graph), transfer_s)
    assert state.latency_s == seconds
    estimate = simulate(lower(Program(graph), state.schedule), second, transfer_s=lambda nbytes: transfer_s)
    assert (estimate.latency_s, estimate.peak_bytes) == (seconds, state.peak_bytes)
    assert estimate.host_peak_bytes == 64 * 64 * 4


def test_instructions_begin_early_and_wait_late() -> None:
    graph = swapped(chain(), 1, 2).program.graph
    routine = lower(Program(graph), state_of(graph, topological_order(graph), 0.5).schedule)
    verify_routine(routine)
    kinds = [type(i) for i in routine.body if isinstance(i, (Store, Load, Wait))]
    assert kinds == [Store, Wait, Load, Wait]
    assert isinstance(routine.body[1], Store)


@pytest.mark.parametrize(
    "site", [(), (0, 1, 0), (0, 99, 0, 2), (0, 1, 5, 2), (0, 0, 0, 1), (0, 1, 0, 1), (1, 1, 0, 2, 3), (0, 1, 0, 99)]
)
def test_where_it_does_not_apply(site: tuple[int, ...]) -> None:
    assert RULE.apply(Program(chain()), site) is None


def test_what_is_swapped_out_is_not_swapped_again() -> None:
    change = swapped(chain(), 1, 2)
    store, _ = change.added
    assert RULE.apply(change.program, swap_site(Value(NodeId(1)), (), [store])) is None
    assert UNDO.apply(change.program, (int(store),)) is None


def test_what_was_loaded_may_go_and_be_loaded_again() -> None:
    def code(a: torch.Tensor) -> torch.Tensor:
        x = a.exp()
        y = x.sin() + x
        return y.cos().tanh() * x

    graph = record(code, [torch.randn(64, 64)]).graph
    once = swapped(graph, 1, 2)
    store, load = once.added
    last = max(once.program.graph.users[load])
    twice = RULE.apply(once.program, swap_site(Value(load), (), [last]))
    assert twice is not None
    verify(twice.program.graph)
    assert twice.program.graph.users[store] == (load, *twice.added)
    assert [node.op for node in twice.program.graph.nodes.values()].count(STORE) == 1


def random_swap(graph: Graph, chosen: random.Random) -> Change | None:
    values = [Value(n.id, i) for n in graph.nodes.values() for i in range(len(n.outputs))]
    values = [value for value in values if swappable(graph, value)]
    if not values:
        return None
    early = chosen.choice(list(graph.nodes))
    where = late_site(graph, chosen.choice(values), lambda reader: reader > early)
    return None if where is None else RULE.apply(Program(graph), where)


@given(programs(), SEEDS, st.sampled_from([1e-9, 0.3, 5.0]))
@settings(deadline=None, max_examples=80)
def test_results_stay_bit_by_bit_and_predictions_hold(tmp_path_factory, program, seed, transfer_s) -> None:
    chosen = random.Random(seed)
    state = MState.of(
        Scheduled.of(program.graph, topological_order(program.graph)), second, Host(lambda nbytes: transfer_s)
    )
    for _ in range(4):
        change = random_swap(state.graph, chosen)
        if change is not None:
            verify(change.program.graph)
            now = state.scheduled.edited(change.program.graph, change.old_nodes, change.new_nodes)
            state = state.followed_by(("swap", ()), change, now, second)
    routine = lower(state.program, state.schedule)
    verify_routine(routine)
    estimate = simulate(routine, second, transfer_s=lambda nbytes: transfer_s)
    assert (estimate.latency_s, estimate.peak_bytes) == (pytest.approx(state.latency_s, rel=1e-12), state.peak_bytes)
    left = []
    plain = lower(Program(program.graph), topological_order(program.graph))
    with torch.no_grad():
        for each in (plain, routine):
            torch.manual_seed(1)
            inputs, results = program.fresh_inputs(), list[torch.Tensor]()
            step = compile_routine(each, SwapFile(tmp_path_factory.getbasetemp()))
            peak = storage_peak(lambda step=step, given=inputs, made=results: made.extend(step(list(given))), inputs)
            left.append([*results, *inputs, torch.default_generator.get_state()])
    assert peak.peak_bytes == estimate.peak_bytes
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def test_a_swap_file_keeps_layouts_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = SwapFile(tmp_path)
    tensors = [
        torch.randn(3, 5),
        torch.randn(4, 6).t(),
        torch.randn(7, 3).bfloat16(),
        torch.arange(10),
        torch.rand(9) < 0.5,
        torch.randn(300, 300),
    ]
    stored = [file.store(tensor) for tensor in tensors]
    for handle in stored:
        file.wait(handle)
    loaded = [file.load(handle, torch.device("cpu")) for handle in stored]
    for tensor, back in zip(tensors, loaded, strict=True):
        file.wait(back)
        assert torch.equal(tensor, back)
        assert tensor.stride() == back.stride()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot swap to"):
        SwapFile(tmp_path / "missing")


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = SwapFile(tmp_path)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(SwapError, match=r"no room for .*No space left"):
        file.store(torch.randn(10))


def test_without_a_folder_a_cpu_swaps_in_memory() -> None:
    graph = swapped(chain(), 1, 2).program.graph
    inputs = [torch.randn(64, 64)]
    ours = compile_routine(lower(Program(graph), topological_order(graph)))(list(inputs))
    theirs = compile_routine(lower(Program(chain()), topological_order(chain())))(list(inputs))
    assert torch.equal(ours[0], theirs[0])


def test_sites_are_what_waits_largest_first() -> None:
    def code(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = a.exp(), b.exp()
        z = a.sin().cos().tanh().mul(2)
        return (x + z)[:8, :8] * y

    graph = record(code, [torch.randn(64, 64), torch.randn(8, 8)]).graph
    state = Scheduled.of(graph, topological_order(graph))
    found = list(RULE.sites(state, lambda node: 1.0))
    assert [where[1] for where in found] == [2, 3]
