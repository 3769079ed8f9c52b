"""Lowering: what is computed, freed, recorded, replayed and handed back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builder import record
from magis.errors import InvalidGraphError
from magis.fission.parts import CannotSplitError
from magis.fission.tree import Cut, Fission, Program
from magis.ir.edit import GraphEdit
from magis.ir.graph import NodeId, Value
from magis.ir.structure import topological_order
from magis.lower.check import verify_routine
from magis.lower.lower import lower
from magis.lower.routine import Compute, Free, Routine

X = torch.arange(12.0).reshape(3, 4)


def freed_after(routine: Routine) -> dict[int, set[Value]]:
    """For each node, the values forgotten right after it."""
    found: dict[int, set[Value]] = {}
    for before, instruction in zip(routine.body, routine.body[1:]):
        if isinstance(instruction, Free):
            assert isinstance(before, Compute)
            found[before.node] = {routine.values[r] for r in instruction.registers}
    return found


def test_frees_right_after_last_use() -> None:
    recorded = record(lambda x: ((x.relu() + x.tanh()) * x.relu()).sum(), [X])
    routine = recorded.routine()
    verify_routine(routine)
    names = {node.op.split(".")[-2]: node.id for node in recorded.graph.nodes.values() if not node.is_input}
    freed = freed_after(routine)
    first_relu = NodeId(1)
    assert freed[names["add"]] == {Value(first_relu), Value(names["tanh"])}
    assert freed[names["mul"]] == {Value(names["add"]), Value(names["relu"])}
    assert freed[names["sum"]] == {Value(names["mul"])}
    assert len(freed) == 3  # inputs and the result stay


def test_result_that_nobody_reads_dies_at_once() -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        return x.neg()

    routine = record(code, [X]).routine()
    assert freed_after(routine) == {1: {Value(NodeId(1))}}
    assert [type(i) for i in routine.body] == [Compute, Free, Compute]


def test_unread_members_of_a_result_die_at_once() -> None:
    routine = record(lambda x: x.max(1)[0], [X]).routine()
    assert freed_after(routine) == {1: {Value(NodeId(1), 1)}}


def test_a_result_handed_back_and_read_stays() -> None:
    def code(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        return y, y.sum(), y, x

    routine = record(code, [X]).routine()
    assert freed_after(routine) == {}
    first, total, again, given = routine.outputs
    assert first == again != total
    assert given == routine.inputs[0]


def test_results_that_are_no_tensor_have_no_register() -> None:
    def code(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
        mask = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(x, x, [4], mean, rstd, None, None, mask)[0]

    routine = record(code, [X, torch.zeros(3, 1), torch.ones(3, 1)]).routine()
    (compute,) = routine.body
    assert isinstance(compute, Compute)
    assert compute.outputs == (3, None, None)


def test_inputs_that_share_a_storage_have_one_root() -> None:
    base = torch.arange(6.0)
    recorded = record(lambda a, b, c: a + b.sum() + c, [base, base[2:4], torch.ones(6)])
    routine = recorded.routine()
    assert routine.input_roots == (0, 0, 2)
    assert routine.resident_bytes == 48
    assert routine.input_names == ("in0", "in1", "in2")
    assert [spec.alias_of for spec in routine.input_specs] == [None, 0, None]


def test_draws_are_recorded_only_when_replayed() -> None:
    def code(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, _ = torch.native_dropout(x, 0.5, True)
        second, _ = torch.native_dropout(x, 0.5, True)
        return first.sum(), second.sum(), first.exp()

    recorded = record(code, [X])
    edit = GraphEdit(recorded.graph)
    copy = edit.copy(NodeId(1), "again")
    edit.redirect(NodeId(5), Value(NodeId(1)), Value(copy))
    graph = edit.finish()
    routine = lower(Program(graph), topological_order(graph))
    verify_routine(routine)
    draws = [
        (i.node, i.draw, i.record, i.replay) for i in routine.body if isinstance(i, Compute) and i.draw is not None
    ]
    assert draws == [(1, 0, True, False), (2, 1, False, False), (copy, 0, False, True)]


def test_candidates_change_nothing_and_regions_need_types_of_their_parts() -> None:
    recorded = record(lambda x: x.exp().sum(), [X])
    order = topological_order(recorded.graph)
    cuts = {NodeId(1): Cut(0, 1, 3)}
    candidate = Fission(frozenset(cuts), cuts, 3)
    plain = lower(Program(recorded.graph), order)
    assert lower(Program(recorded.graph, (candidate,)), order) == plain
    with pytest.raises(CannotSplitError, match="without PyTorch"):
        lower(Program(recorded.graph, (replace(candidate, parts=2),)), order)


def test_order_that_reads_before_computing_is_refused() -> None:
    recorded = record(lambda x: x.exp().sum(), [X])
    with pytest.raises(InvalidGraphError, match="%2 runs before %1") as caught:
        lower(Program(recorded.graph), (NodeId(0), NodeId(2), NodeId(1)))
    assert caught.value.invariant == "ordered"


def test_order_may_leave_out_inputs() -> None:
    recorded = record(lambda x: x.exp().sum(), [X])
    program = Program(recorded.graph)
    assert lower(program, (NodeId(1), NodeId(2))) == lower(program, (NodeId(0), NodeId(1), NodeId(2)))
