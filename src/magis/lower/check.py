"""Well-formed routines: what the simulator and the code generator take for granted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from magis.errors import InvalidGraphError
from magis.ir.graph import TensorSpec
from magis.lower.launches import REDUCTIONS, is_dense, made
from magis.lower.routine import (
    Accumulate,
    Allocate,
    Compute,
    Free,
    Instruction,
    Load,
    Loop,
    Register,
    Routine,
    Slice,
    Store,
    Wait,
    Write,
)


def verify_routine(routine: Routine) -> None:
    """Checks that registers are made once, read while they exist, and freed once where they were made; that a
    loop's body leaves nothing behind; that pieces lie inside their tensors; that replays follow records.

    Raises InvalidGraphError("well-formed routine")."""
    for detail in _Checker(routine).problems():
        raise InvalidGraphError("well-formed routine", detail)


@dataclass
class _Checker:
    routine: Routine
    specs: dict[Register, TensorSpec] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    under_way: set[Register] = field(default_factory=set)

    def problems(self) -> Iterator[str]:
        routine = self.routine
        self.specs.update(zip(routine.inputs, routine.input_specs))
        mine: set[Register] = set()
        yield from self._body(routine.body, mine, 1)
        for register in routine.outputs:
            if register not in self.specs:
                yield f"hands back register {register}, which does not exist at the end"
        for register in mine.difference(routine.outputs):
            yield f"register {register} is never freed"
        for register in self.under_way:
            yield f"register {register} is still copied at the end"

    def _body(self, body: Iterable[Instruction], mine: set[Register], parts: int) -> Iterator[str]:
        """Problems of one body; `mine` collects the registers that it made and has not freed."""
        for instruction in body:
            for register in _read(instruction):
                if register not in self.specs:
                    yield f"{type(instruction).__name__} reads register {register}, which does not exist there"
                    return
            yield from self._one(instruction, mine, parts)
            for register, spec in made(instruction):
                if register in self.specs:
                    yield f"register {register} is made twice"
                self.specs[register] = spec
                mine.add(register)

    def _one(self, instruction: Instruction, mine: set[Register], parts: int) -> Iterator[str]:
        match instruction:
            case Free(registers):
                yield from self._free(registers, mine)
            case Compute():
                yield from self._draw(instruction)
            case Allocate(register, spec):
                if not is_dense(spec) or spec.storage_bytes != spec.nbytes:
                    yield f"register {register} is allocated but not dense"
            case Slice() | Write():
                yield from self._piece(instruction, parts)
            case Accumulate():
                yield from self._accumulate(instruction)
            case Store(register) | Load(register):
                self.under_way.add(register)
            case Wait(register):
                self.under_way.discard(register)
            case Loop(inner_parts, body):
                yield from self._loop(inner_parts, body)

    def _free(self, registers: Iterable[Register], mine: set[Register]) -> Iterator[str]:
        for register in self.under_way.intersection(registers):
            yield f"register {register} is freed while it is copied"
        for register in registers:
            if register not in mine or register in self.routine.outputs:
                yield f"frees register {register}, which is not its own"
                return
            mine.remove(register)
            del self.specs[register]

    def _draw(self, compute: Compute) -> Iterator[str]:
        if compute.record and compute.draw is not None:
            self.recorded.add(compute.draw)
        if compute.replay and compute.draw not in self.recorded:
            yield f"%{compute.node} replays draw {compute.draw}, which is not recorded there"

    def _piece(self, instruction: Slice | Write, parts: int) -> Iterator[str]:
        piece = instruction.piece
        if isinstance(instruction, Slice):
            whole, part = self.specs[instruction.source], instruction.spec
            copied = part.is_contiguous and part.storage_bytes == part.nbytes
            if part.alias_of is None and not copied:
                yield f"register {instruction.register} copies a piece but is not contiguous"
            if part.alias_of is not None and piece.outer > 1:
                yield f"register {instruction.register} is a piece of an inner atom, which has no view"
        else:
            whole, part = self.specs[instruction.target], self.specs[instruction.source]
        inner, rest = divmod(whole.shape[piece.dim], piece.outer)
        if rest or piece.start < 0 or piece.start + (parts - 1) * piece.advance + piece.length > inner:
            yield f"{piece} in {parts} parts does not lie inside shape {whole.shape}"
        expected = (*whole.shape[: piece.dim], piece.outer * piece.length, *whole.shape[piece.dim + 1 :])
        if part.shape != expected:
            yield f"a part of shape {part.shape} is not {piece} of shape {whole.shape}"

    def _accumulate(self, instruction: Accumulate) -> Iterator[str]:
        if instruction.reduction not in REDUCTIONS:
            yield f"{instruction.reduction} is not one of the reductions {', '.join(REDUCTIONS)}"
        if instruction.reduction != "sum" and instruction.scale != 1.0:
            yield f"a {instruction.reduction} cannot be scaled"
        if self.specs[instruction.target].shape != self.specs[instruction.source].shape:
            yield f"register {instruction.source} is accumulated into one of another shape"

    def _loop(self, parts: int, body: Iterable[Instruction]) -> Iterator[str]:
        if parts < 1:
            yield f"a loop has {parts} parts"
        mine: set[Register] = set()
        recorded = set(self.recorded)
        yield from self._body(body, mine, parts)
        for register in mine:
            yield f"register {register} is made in a loop and not freed there"
        self.recorded = recorded


def _read(instruction: Instruction) -> Iterator[Register]:
    match instruction:
        case Compute(inputs=inputs):
            yield from inputs
        case Free(registers):
            yield from registers
        case Slice(source=source) | Store(source=source) | Load(source=source):
            yield source
        case Wait(register):
            yield register
        case Write(target, source) | Accumulate(target, source):
            yield from (target, source)
