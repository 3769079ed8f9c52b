"""The routine: explicit instructions over registers. The simulator and the code generator read the same one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from magis.ir.graph import Call, NodeId, Origin, TensorSpec, Value

Register: TypeAlias = int


@dataclass(frozen=True, slots=True)
class Compute:
    """Runs an operator. `outputs` has None for a result that is no tensor. `draw` numbers its place in the
    random stream; `replay` means: restore the generator state recorded at that draw, then put it back."""

    node: NodeId
    call: Call
    inputs: tuple[Register, ...]
    outputs: tuple[Register | None, ...]
    origin: Origin = Origin()
    draw: int | None = None
    record: bool = False
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """Forgets registers; a storage goes when the last register that lies in it is forgotten."""

    registers: tuple[Register, ...]


@dataclass(frozen=True, slots=True)
class Allocate:
    """Makes a tensor that later instructions fill: zeros for an accumulator, else uninitialised."""

    register: Register
    spec: TensorSpec
    zeros: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """The current part's piece of a whole tensor along `dim`, as a view: elements
    `start + part * length` to `+ length`, where `part` counts from 0 in the innermost loop around it."""

    register: Register
    source: Register
    spec: TensorSpec
    dim: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Write:
    """Copies a part's result into its piece (a `Slice` register) of the whole output."""

    target: Register
    source: Register


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Adds a part's partial result to the accumulator in place."""

    target: Register
    source: Register


@dataclass(frozen=True, slots=True)
class Loop:
    """Runs `body` for part 0 .. parts-1, one after the other. What a part makes, it frees."""

    parts: int
    body: tuple[Instruction, ...]


Instruction: TypeAlias = "Compute | Free | Allocate | Slice | Write | Accumulate | Loop"


@dataclass(frozen=True)
class Routine:
    """A step as instructions.

    `inputs` are the registers of the caller's tensors, in the order of the graph's input nodes, with their
    types in `input_specs` (an input that shares another's storage owns no bytes). They stay for the whole
    step. `outputs` go back to the caller, in the graph's order. `values` says which value a register holds.
    """

    name: str
    inputs: tuple[Register, ...]
    input_specs: tuple[TensorSpec, ...]
    input_roots: tuple[Register, ...]
    body: tuple[Instruction, ...]
    outputs: tuple[Register, ...]
    output_names: tuple[str, ...]
    values: dict[Register, Value]
    input_names: tuple[str, ...] = ()


def expand(routine: Routine) -> Routine:
    """The same routine with every loop unrolled; slices get absolute starts."""
    from dataclasses import replace

    return replace(routine, body=tuple(_unrolled(routine.body, 0)))


def _unrolled(body: tuple[Instruction, ...], part: int) -> Iterator[Instruction]:
    from dataclasses import replace

    for instruction in body:
        if isinstance(instruction, Loop):
            for inner in range(instruction.parts):
                yield from _unrolled(instruction.body, inner)
        elif isinstance(instruction, Slice):
            yield replace(instruction, start=instruction.start + part * instruction.length)
        else:
            yield instruction
