"""The routine: explicit instructions over registers. The simulator and the code generator read the same one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from magis.ir.graph import Call, NodeId, Origin, TensorSpec, Value

Register: TypeAlias = int


@dataclass(frozen=True, slots=True)
class Compute:
    """Runs an operator. `outputs` has None for a result that is no tensor; an output whose type says
    `alias_of` lies in the storage of that input. `draw` numbers its place in the random stream; `record`
    means: keep the generator state before drawing; `replay`: restore the state kept at that draw, draw, and
    put the current state back."""

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
    """Makes a dense tensor that later instructions fill: `fill` everywhere (0 for a sum), or uninitialised."""

    register: Register
    spec: TensorSpec
    fill: float | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Which elements of a whole tensor belong to the current part of the innermost loop around it: along
    dimension `dim`, elements `start + part * step` to `+ length`, where `part` counts from 0.

    `step` is how far apart the parts' starts are: `length` unless given (0: every part has the same piece).
    With `outer` > 1, dimension `dim` is seen as `[outer, inner]` and the elements are those of `inner`: the
    piece of T in `[B*T, C]` has `outer` = B. The piece's dimension then has `outer * length` elements.
    """

    dim: int
    length: int
    start: int = 0
    outer: int = 1
    step: int | None = None

    @property
    def advance(self) -> int:
        """Elements from one part's piece to the next."""
        return self.length if self.step is None else self.step


@dataclass(frozen=True, slots=True)
class Slice:
    """The current part's piece of `source`: a view when `spec.alias_of` is 0, a copy of its own when None
    (the pieces of an inner atom are not always expressible as a view)."""

    register: Register
    source: Register
    spec: TensorSpec
    piece: Piece


@dataclass(frozen=True, slots=True)
class Write:
    """Copies a part's result into the current part's piece of `target`."""

    target: Register
    source: Register
    piece: Piece


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Combines a part's partial result with the accumulator in place: `target += scale * source`, or, with
    `reduction` "max" or "min", the larger or smaller of both."""

    target: Register
    source: Register
    reduction: str = "sum"
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Store:
    """Begins to copy `source` to host memory, on a link of its own; `register` is the copy, of type `spec`. The source
    stays as it is until the `Wait` for the copy."""

    register: Register
    source: Register
    spec: TensorSpec
    node: NodeId


@dataclass(frozen=True, slots=True)
class Load:
    """Allocates `register`, of type `spec`, and begins to copy `source` back into it, on a link of its own. Nobody
    reads it before the `Wait` for it."""

    register: Register
    source: Register
    spec: TensorSpec
    node: NodeId


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits until the transfer that makes `register` is complete."""

    register: Register


@dataclass(frozen=True, slots=True)
class Loop:
    """Runs `body` for part 0 .. parts-1, one after the other. What a part makes, it frees; what it reads
    from outside, it leaves. A nested body that needs a piece along an outer loop takes a `Slice` of it in
    the outer body. `label` is for people."""

    parts: int
    body: tuple[Instruction, ...]
    label: str = ""


Instruction: TypeAlias = "Compute | Free | Allocate | Slice | Write | Accumulate | Store | Load | Wait | Loop"


@dataclass(frozen=True)
class Routine:
    """A step as instructions.

    `inputs` are the registers of the caller's tensors, in the order of the graph's input nodes, with their
    types in `input_specs`. They stay for the whole step. `input_roots` names, for each, the input register
    whose storage it lies in: itself, or another (then it owns no bytes). `outputs` go back to the caller, in
    the graph's order. `values` says which value of the graph a register holds, or holds a part of.
    """

    name: str
    inputs: tuple[Register, ...]
    input_specs: tuple[TensorSpec, ...]
    input_roots: tuple[Register, ...]
    body: tuple[Instruction, ...]
    outputs: tuple[Register, ...]
    output_names: tuple[str, ...]
    values: Mapping[Register, Value]
    input_names: tuple[str, ...] = ()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the caller's tensors, each storage once."""
        return sum(spec.storage_bytes for spec in self.input_specs if spec.alias_of is None)


def expand(routine: Routine) -> Routine:
    """The same routine with every loop unrolled; pieces get absolute starts."""
    return replace(routine, body=tuple(_unrolled(routine.body, 0)))


def _unrolled(body: tuple[Instruction, ...], part: int) -> Iterator[Instruction]:
    for instruction in body:
        if isinstance(instruction, Loop):
            for inner in range(instruction.parts):
                yield from _unrolled(instruction.body, inner)
        elif isinstance(instruction, (Slice, Write)):
            piece = instruction.piece
            moved = replace(piece, start=piece.start + part * piece.advance)
            yield replace(instruction, piece=moved)
        else:
            yield instruction
