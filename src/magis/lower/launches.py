"""Which operator call an instruction launches, as the cost model sees it: loops' copies and sums included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from magis.ir.args import Kwargs, Slot, Symbol
from magis.ir.graph import Call, TensorSpec, contiguous_strides
from magis.lower.routine import (
    Accumulate,
    Allocate,
    Compute,
    Free,
    Instruction,
    Load,
    Loop,
    Piece,
    Register,
    Routine,
    Slice,
    Store,
    Write,
)

REDUCTIONS = {"sum": "aten.add_.Tensor", "max": "aten.maximum.out", "min": "aten.minimum.out"}

_CONTIGUOUS: Kwargs = (("memory_format", Symbol("memory_format", "contiguous_format")),)


def launched(instruction: Instruction, specs: Mapping[Register, TensorSpec]) -> Call | None:
    """The call to cost and to measure; None for what launches nothing (views, uninitialised memory, loops).

    `specs` are the types of the registers in use."""
    match instruction:
        case Compute(call=call):
            return call
        case Allocate(spec=spec, fill=fill) if fill is not None:
            return Call("aten.fill_.Scalar", (Slot(0), fill), (), (spec,), (_overwritten(spec),))
        case Slice(source=source, spec=spec, piece=piece) if spec.alias_of is None:
            view = piece_spec(specs[source], piece)
            copy = replace(spec, shape=view.shape, strides=contiguous_strides(view.shape))
            return Call("aten.clone.default", (Slot(0),), _CONTIGUOUS, (view,), (copy,))
        case Write(target, source, piece):
            part = replace(piece, start=0) if piece.outer > 1 else None
            copied = piece_spec(specs[source], part) if part else specs[source]
            return _in_place("aten.copy_.default", piece_spec(specs[target], piece), copied)
        case Accumulate(target, source, reduction):
            return _in_place(REDUCTIONS[reduction], specs[target], specs[source])
    return None


def launches(routine: Routine) -> Iterator[tuple[Call, int]]:
    """Every call of the routine with how often it runs, in order."""
    for _, call, times in steps(routine):
        if call is not None:
            yield call, times


def steps(routine: Routine) -> Iterator[tuple[Instruction, Call | None, int]]:
    """Every instruction but Free and Loop, a loop's body once: what it launches, if anything, and how often it runs.
    These are the steps of `magis.sim.timeline`."""
    specs = dict(zip(routine.inputs, routine.input_specs))
    yield from _steps(routine.body, specs, 1)


def _steps(
    body: Iterable[Instruction], specs: dict[Register, TensorSpec], times: int
) -> Iterator[tuple[Instruction, Call | None, int]]:
    for instruction in body:
        if isinstance(instruction, Loop):
            yield from _steps(instruction.body, specs, times * instruction.parts)
        elif not isinstance(instruction, Free):
            yield instruction, launched(instruction, specs), times
            specs.update(made(instruction))


def made(instruction: Instruction) -> Iterator[tuple[Register, TensorSpec]]:
    """The registers that an instruction makes, with their types. (A loop leaves none behind.)"""
    match instruction:
        case Compute(call=call, outputs=outputs):
            for register, spec in zip(outputs, call.outputs):
                if register is not None and spec is not None:
                    yield register, spec
        case Allocate(register, spec) | Slice(register, _, spec):
            yield register, spec
        case Store(register, _, spec) | Load(register, _, spec):
            yield register, spec


def piece_spec(whole: TensorSpec, piece: Piece) -> TensorSpec:
    """The type of a view of part 0's piece; with `outer` > 1 the dimension appears as two, `[outer, length]`."""
    dim, stride = piece.dim, whole.strides[piece.dim]
    inner = whole.shape[dim] // piece.outer
    lengths = (piece.length,) if piece.outer == 1 else (piece.outer, piece.length)
    steps = (stride,) if piece.outer == 1 else (stride * inner, stride)
    return replace(
        whole,
        shape=(*whole.shape[:dim], *lengths, *whole.shape[dim + 1 :]),
        strides=(*whole.strides[:dim], *steps, *whole.strides[dim + 1 :]),
        offset=whole.offset + piece.start * stride,
        storage_bytes=0,
        alias_of=0,
        writes=False,
    )


def is_dense(spec: TensorSpec) -> bool:
    """Whether its elements fill its storage without gaps or overlaps, in some order of the dimensions."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(spec.strides, spec.shape) if n != 1):
        if stride != expected:
            return prod(spec.shape) == 0
        expected *= length
    return True


def _in_place(op: str, target: TensorSpec, source: TensorSpec) -> Call:
    out = (("out", Slot(0)),) if op.endswith(".out") else ()
    return Call(op, (Slot(0), Slot(1)), out, (target, source), (_overwritten(target),))


def _overwritten(spec: TensorSpec) -> TensorSpec:
    return replace(spec, storage_bytes=0, alias_of=0, writes=True)
