"""What instructions launch: the calls that the cost model is asked about are real calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from magis.aten.convert import overload, python_literal, torch_dtype
from magis.ir.args import Slot, substitute
from magis.ir.graph import Call, TensorSpec
from magis.lower.launches import is_dense, launches, piece_spec
from magis.lower.routine import Piece, expand
from magis.ops.rule import dense
from routines import LOOPS, inner_atom, mlp_by_batch, mlp_by_hidden


def run(call: Call) -> None:
    """Runs a call on tensors of its types."""
    tensors = []
    for spec in call.inputs:
        reach = spec.offset + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides)) + 1
        tensors.append(
            torch.ones(reach, dtype=torch_dtype(spec.dtype)).as_strided(spec.shape, spec.strides, spec.offset)
        )

    def real(arg: object) -> object:
        return python_literal(substitute(arg, lambda slot: tensors[slot.index]))  # type: ignore[arg-type]

    out = overload(call.op)(*map(real, call.args), **{key: real(value) for key, value in call.kwargs})
    for result, spec in zip(out if isinstance(out, (tuple, list)) else [out], call.outputs):
        assert spec is not None
        assert (tuple(result.shape), result.stride()) == (spec.shape, spec.strides)


@pytest.mark.parametrize("name", LOOPS)
def test_launches_are_real_calls(name: str) -> None:
    routine, _, _ = LOOPS[name]()
    for call, _ in launches(routine):
        run(call)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_launch_what_the_unrolled_routine_launches(name: str) -> None:
    def moved(call: Call) -> Call:  # pieces differ in where they start
        return replace(call, inputs=tuple(replace(spec, offset=0) for spec in call.inputs), outputs=())

    routine, _, _ = LOOPS[name]()
    counts: Counter[Call] = Counter()
    for call, times in launches(routine):
        counts[moved(call)] += times
    assert counts == Counter(moved(call) for call, _ in launches(expand(routine)))


def test_a_loop_pays_for_its_copies_and_sums() -> None:
    routine, _, _ = mlp_by_batch(8, 4)
    count = Counter[str]()
    for call, times in launches(routine):
        count[call.op] += times
    assert count["aten.copy_.default"] == 4
    assert count["aten.add_.Tensor"] == 12
    assert count["aten.fill_.Scalar"] == 3


def test_other_reductions_and_copied_pieces() -> None:
    assert {call.op for call, _ in launches(mlp_by_hidden()[0])} >= {"aten.maximum.out", "aten.add_.Tensor"}
    (copy,) = [call for call, _ in launches(inner_atom()[0]) if call.op == "aten.clone.default"]
    assert copy.inputs[0].shape == (3, 2, 5)


def test_piece_types_are_those_of_views() -> None:
    whole = torch.zeros(12, 5)
    spec = dense((12, 5))
    for piece in (Piece(0, 3, 6), Piece(1, 2, 1), Piece(0, 1, 2, 4)):
        view = whole.narrow(piece.dim, piece.start, piece.length) if piece.outer == 1 else whole.view(4, 3, 5)[:, 2:3]
        found = piece_spec(spec, piece)
        assert (found.shape, found.strides, found.offset) == (view.shape, view.stride(), view.storage_offset())


def test_density() -> None:
    def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorSpec:
        return replace(dense(shape), strides=strides)

    assert is_dense(dense((2, 3, 4)))
    assert is_dense(strided((2, 3, 4), (12, 1, 3)))
    assert is_dense(strided((2, 1, 4), (4, 99, 1)))
    assert is_dense(strided((0, 4), (4, 1)))
    assert not is_dense(strided((2, 3), (4, 1)))
    assert not is_dense(strided((2, 3), (0, 1)))
    assert is_dense(dense(()))


def test_slots_of_launches_are_numbered() -> None:
    for call, _ in launches(mlp_by_hidden()[0]):
        assert {slot.index for slot in call.args if isinstance(slot, Slot)} <= set(range(len(call.inputs)))
