"""Every way in which a routine may be malformed is found; the hand-made ones are well-formed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magis.errors import InvalidGraphError
from magis.ir.graph import Call, NodeId, TensorSpec
from magis.lower.check import verify_routine
from magis.lower.routine import (
    Accumulate,
    Allocate,
    Compute,
    Free,
    Instruction,
    Loop,
    Piece,
    Routine,
    Slice,
    Write,
    expand,
)
from magis.ops.rule import dense
from routines import LOOPS, RoutineBuilder, mlp_by_batch


def routine(*body: Instruction, outputs: tuple[int, ...] = ()) -> Routine:
    return Routine("bad", (0,), (dense((8, 4)),), (0,), body, outputs, (), {})


NEW = Allocate(1, dense((8, 4)))
PART = dense((2, 4))
VIEW = replace(PART, storage_bytes=0, alias_of=0)


def make(register: int, spec: TensorSpec = PART) -> Compute:
    return Compute(NodeId(register), Call("aten.zeros.default", (), (), (), (spec,)), (), (register,))


BAD = {
    "reads register 7, which does not exist": routine(Accumulate(0, 7)),
    "hands back register 7": routine(outputs=(7,)),
    "register 1 is never freed": routine(NEW),
    "register 1 is made twice": routine(NEW, NEW),
    "Free reads register 1": routine(NEW, Free((1,)), Free((1,))),
    "frees register 0, which is not its own": routine(Free((0,))),
    "frees register 1, which is not its own": routine(NEW, Loop(2, (Free((1,)),))),
    "frees register 1": routine(NEW, Free((1,)), outputs=(1,)),
    "register 1 is made in a loop and not freed": routine(Loop(2, (NEW,))),
    "a loop has 0 parts": routine(Loop(0, ())),
    "not dense": routine(Allocate(1, replace(dense((8, 4)), strides=(8, 1))), Free((1,))),
    "allocated but": routine(Allocate(1, replace(dense((8, 4)), storage_bytes=4)), Free((1,))),
    "in 5 parts does not lie inside": routine(Loop(5, (Slice(1, 0, VIEW, Piece(0, 2)), Free((1,))))),
    "in 1 parts does not lie inside": routine(Slice(1, 0, VIEW, Piece(0, 2, 7)), Free((1,))),
    "outer=3.* does not lie inside": routine(Slice(1, 0, dense((6, 4)), Piece(0, 2, 0, 3)), Free((1,))),
    "inner atom, which has no view": routine(Slice(1, 0, VIEW, Piece(0, 1, 0, 2)), Free((1,))),
    "copies a piece but is not contiguous": routine(
        Slice(1, 0, replace(PART, strides=(1, 2)), Piece(0, 2)), Free((1,))
    ),
    r"shape \(2, 4\) is not": routine(Slice(1, 0, VIEW, Piece(0, 3)), Free((1,))),
    r"a part of shape \(2, 4\)": routine(make(1), Write(0, 1, Piece(1, 2)), Free((1,))),
    "accumulated into one of another shape": routine(make(1), Accumulate(0, 1), Free((1,))),
    "product is not one of the reductions": routine(Accumulate(0, 0, "product")),
    "a max cannot be scaled": routine(Accumulate(0, 0, "max", 0.5)),
    "%1 replays draw 3": routine(replace(make(1), draw=3, replay=True), Free((1,))),
    "%2 replays draw 3": routine(
        Loop(2, (replace(make(1), draw=3, record=True), Free((1,)))),
        replace(make(2), draw=3, replay=True),
        Free((2,)),
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_malformed_routine_is_named(message: str) -> None:
    with pytest.raises(InvalidGraphError, match=message) as caught:
        verify_routine(BAD[message])
    assert caught.value.invariant == "well-formed routine"


@pytest.mark.parametrize("name", LOOPS)
def test_hand_made_loops_are_well_formed_and_stay_so_unrolled(name: str) -> None:
    made, _, _ = LOOPS[name]()
    verify_routine(made)
    verify_routine(expand(made))


def test_unrolling_gives_absolute_pieces() -> None:
    made, _, _ = mlp_by_batch(8, 4)
    flat = expand(made)
    assert not any(isinstance(i, Loop) for i in flat.body)
    assert [i.piece.start for i in flat.body if isinstance(i, Slice)] == [0, 2, 4, 6]
    assert [i.piece.start for i in flat.body if isinstance(i, Write)] == [0, 2, 4, 6]


def test_nested_pieces_count_in_the_innermost_loop() -> None:
    build = RoutineBuilder()
    x, out = build.input(torch.zeros(4, 6)), build.allocate((4, 6))
    with build.loop(2):
        rows, strip = build.slice(x, Piece(0, 2)), build.slice(out, Piece(0, 2))
        with build.loop(3):
            build.write(strip, build.op("aten.exp.default", build.slice(rows, Piece(1, 2))), Piece(1, 2))
    flat = expand(build.routine(out))
    assert [i.piece.start for i in flat.body if isinstance(i, Slice)] == [0, 0, 0, 2, 4, 2, 2, 0, 2, 4]
