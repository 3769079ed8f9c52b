"""Routine to readable Python: one function that runs the step, deleting each tensor right after its last use."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from magis.aten.convert import torch_dtype
from magis.backend import naming
from magis.backend.printing import Printer
from magis.ir.graph import NodeId, Origin
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
    Wait,
    Write,
)


@dataclass(frozen=True)
class Source:
    """Generated code: its text, the globals it needs, and for each line number (from 1) the node it runs."""

    text: str
    names: Mapping[str, object]
    nodes: Mapping[int, tuple[NodeId, Origin]]


def generate(routine: Routine) -> Source:
    """The source of `step(inputs)`: takes the list of the caller's tensors, empties it, returns a tuple.

    Expects a well-formed routine (`magis.lower.check`). Raises PlanError for operators, arguments or constants
    that this PyTorch does not have."""
    generator = _Generator(routine)
    generator.step()
    return Source("\n".join(generator.lines) + "\n", generator.printer.names, generator.nodes)


class _Generator:
    def __init__(self, routine: Routine) -> None:
        self.routine = routine
        self.printer = Printer()
        self.lines: list[str] = []
        self.nodes: dict[int, tuple[NodeId, Origin]] = {}
        self.variable: dict[Register, str] = {}
        self.depth = 0  # of loops
        self.place = Origin()
        self.label = ""  # of this place, for variable names

    def step(self) -> None:
        """Prints the function."""
        routine = self.routine
        names = routine.input_names or ("",) * len(routine.inputs)
        inputs = [
            self._name(register, naming.stem(name, leaves=2) if name else "input")
            for register, name in zip(routine.inputs, names)
        ]
        self.lines += [f"# {naming.comment([routine.name, f'{len(inputs)} inputs'])}", "def step(inputs):"]
        if inputs:
            self._put(f"{_tuple(inputs)} = inputs")
        self._put("inputs.clear()")
        self._body(routine.body)
        self._put(f"return {_tuple([self.variable[register] for register in routine.outputs])}")

    def _put(self, code: str) -> None:
        self.lines += ("    " * (self.depth + 1) + code).split("\n")

    def _name(self, register: Register, word: str) -> str:
        variable = self.variable[register] = f"{word}_{register}"
        return variable

    def _body(self, body: Sequence[Instruction]) -> None:
        forget = _last_replays(body)
        for index, instruction in enumerate(body):
            match instruction:
                case Compute():
                    following = body[index + 1] if index + 1 < len(body) else None
                    self._compute(instruction, following.registers if isinstance(following, Free) else ())
                case Free(registers):
                    self._free(registers)
                case Loop():
                    self._loop(instruction)
                case Allocate():
                    self._allocate(instruction)
                case Store(register, source):
                    self._put(f"{self._name(register, 'host')} = store({self.variable[source]})")
                case Load(register, source, spec):
                    made = f"load({self.variable[source]}, {self.printer.device(spec.device)})"
                    self._put(f"{self._name(register, self.variable[source].partition('_')[0])} = {made}")
                case Wait(register):
                    self._put(f"wait({self.variable[register]})")
                case _:
                    self._piecewise(instruction)
            if index in forget:
                self._put(f"del {', '.join(f'draw{draw}' for draw in forget[index])}")

    def _compute(self, compute: Compute, dead: Iterable[Register]) -> None:
        self._comment(compute.origin)
        call = self.printer.call(compute.call, [self.variable[r] for r in compute.inputs])
        returns = self.printer.returns(compute.call.op)
        word = self.label or naming.identifier(compute.call.op.split(".")[1])
        unused = set(dead)
        targets = [
            "_" if register is None or register in unused else self._name(register, word)
            for register in compute.outputs
        ]
        self.variable.update((r, "_") for r in compute.outputs if r in unused and r is not None)
        dropped = returns == "nothing" or all(target == "_" for target in targets)
        if dropped:
            code = call
            self.variable.update((r, "") for r in compute.outputs if r is not None)  # dropped by the call itself
        else:
            code = f"{', '.join(targets)}{',' if returns == 'many' and len(targets) == 1 else ''} = {call}"
        self._draw(compute, code)
        if "_" in targets and not dropped and unused.isdisjoint(compute.outputs):
            self._put("del _")  # a kernel may return a tensor where none was asked for

    def _draw(self, compute: Compute, code: str) -> None:
        if compute.record or compute.replay:
            device = self.printer.device(next(spec.device for spec in compute.call.outputs if spec is not None))
        if compute.record:
            self._put(f"draw{compute.draw} = random_state({device})")
        if compute.replay:
            self._put(f"current = random_state({device})")
            self._put(f"set_random_state({device}, draw{compute.draw})")
        self._put(code)
        self.nodes[len(self.lines)] = compute.node, compute.origin
        if compute.replay:
            self._put(f"set_random_state({device}, current)")
            self._put("del current")

    def _comment(self, origin: Origin) -> None:
        if origin == self.place:
            return
        self.place = origin
        self.label = naming.stem(origin.module) if origin.module else ""
        text = naming.comment([origin.module, origin.line, "" if origin.direction == "forward" else origin.direction])
        if text:
            self._put(f"# {text}")

    def _free(self, registers: Iterable[Register]) -> None:
        variables = dict.fromkeys(self.variable.pop(register) for register in registers)
        variables.pop("", None)
        if variables:
            self._put(f"del {', '.join(variables)}")

    def _loop(self, loop: Loop) -> None:
        if loop.label:
            self._put(f"# {naming.comment([loop.label])}")
        self._put(f"for {_part(self.depth + 1)} in range({loop.parts}):")
        self.depth += 1
        self.place = Origin()
        self._body(loop.body)
        if not loop.body:
            self._put("pass")
        self.depth -= 1
        self.place = Origin()

    def _allocate(self, allocate: Allocate) -> None:
        spec = allocate.spec
        name = self._name(allocate.register, "whole" if allocate.fill is None else "total")
        options = f"dtype={torch_dtype(spec.dtype)}, device={self.printer.device(spec.device)}"
        fill = None if allocate.fill is None else self.printer.literal(allocate.fill, [])
        if not spec.is_contiguous:
            code = f"torch.empty_strided({list(spec.shape)}, {list(spec.strides)}, {options})"
            code += "" if fill is None else f".fill_({fill})"
        elif fill is None:
            code = f"torch.empty({list(spec.shape)}, {options})"
        else:
            code = f"torch.full({list(spec.shape)}, {fill}, {options})"
        self._put(f"{name} = {code}")

    def _piecewise(self, instruction: Slice | Write | Accumulate) -> None:
        match instruction:
            case Slice(register, source, spec, piece):
                code = self._piece(source, piece)
                code += "" if spec.alias_of is not None else ".clone(memory_format=torch.contiguous_format)"
                code += f".flatten({piece.dim}, {piece.dim + 1})" if piece.outer > 1 else ""
                word = self.variable[source].rpartition("_")[0]
                self._put(f"{self._name(register, word)} = {code}")
            case Write(target, source, piece):
                split = f".unflatten({piece.dim}, ({piece.outer}, {piece.length}))" if piece.outer > 1 else ""
                self._put(f"{self._piece(target, piece)}.copy_({self.variable[source]}{split})")
            case Accumulate(target, source, "sum", scale):
                alpha = "" if scale == 1 else f", alpha={self.printer.literal(scale, [])}"
                self._put(f"{self.variable[target]}.add_({self.variable[source]}{alpha})")
            case Accumulate(target, source, reduction):
                into, what = self.variable[target], "maximum" if reduction == "max" else "minimum"
                self._put(f"torch.{what}({into}, {self.variable[source]}, out={into})")

    def _piece(self, whole: Register, piece: Piece) -> str:
        """A view of the current part's piece; with `outer` its dimension is two."""
        moves = self.depth > 0 and piece.advance != 0
        start = str(piece.start) if piece.start or not moves else ""
        start += " + " if start and moves else ""
        start += f"{_part(self.depth)} * {piece.advance}" if moves else ""
        whole_name, dim = self.variable[whole], piece.dim
        if piece.outer == 1:
            return f"{whole_name}.narrow({dim}, {start}, {piece.length})"
        return f"{whole_name}.unflatten({dim}, ({piece.outer}, -1)).narrow({dim + 1}, {start}, {piece.length})"


def _tuple(names: Sequence[str]) -> str:
    """A tuple, its names on lines of their own when they are many."""
    inner = ", ".join(names)
    if len(names) == 1:
        return f"({inner},)"
    if len(inner) <= 90:
        return f"({inner})"
    lines = textwrap.wrap(inner + ",", 100, break_long_words=False, break_on_hyphens=False)
    return "\n        ".join(["(", *lines]) + "\n    )"


def _part(depth: int) -> str:
    return "part" if depth == 1 else f"part{depth}"


def _last_replays(body: Sequence[Instruction]) -> dict[int, list[int]]:
    """After which instruction of this body each generator state that the body records is needed no more."""
    recorded = {i.draw for i in body if isinstance(i, Compute) and i.record}
    last = {draw: index for index, i in enumerate(body) for draw in _replays(i) if draw in recorded}
    found: dict[int, list[int]] = {}
    for draw, index in last.items():
        found.setdefault(index, []).append(draw)
    return found


def _replays(instruction: Instruction) -> Iterable[int]:
    if isinstance(instruction, Loop):
        for inner in instruction.body:
            yield from _replays(inner)
    elif isinstance(instruction, Compute) and instruction.replay and instruction.draw is not None:
        yield instruction.draw
