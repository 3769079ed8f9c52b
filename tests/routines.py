"""Routines with loops for tests, written down instruction by instruction; types come from running part 0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from magis.aten.convert import literal, overload, spec_of
from magis.ir.args import Slot
from magis.ir.edit import with_distinct_inputs
from magis.ir.graph import Call, Node, NodeId, TensorSpec, Value
from magis.lower.launches import made
from magis.lower.routine import (
    Accumulate,
    Allocate,
    Compute,
    Free,
    Instruction,
    Loop,
    Piece,
    Register,
    Routine,
    Slice,
    Write,
)


class Reg(int):
    """A register, told apart from a number among an operator's arguments."""


class RoutineBuilder:
    """Collects instructions; `routine` adds the Frees, each right after the last use."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.inputs: list[Reg] = []
        self.bodies: list[list[Instruction]] = [[]]
        self.nodes = 0
        self.draw: tuple[int, bool, bool] = (0, False, False)

    def input(self, tensor: torch.Tensor) -> Reg:
        """A tensor of the caller's."""
        self.inputs.append(self._new(tensor))
        return self.inputs[-1]

    def op(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """An operator call; gives its register, or a tuple of them (None for results that are no tensor)."""
        taken: list[Reg] = []
        call_args = tuple(self._template(a, taken) for a in args)
        call_kwargs = tuple((k, self._template(a, taken)) for k, a in kwargs.items())
        out = overload(name)(*map(self._real, args), **{k: self._real(a) for k, a in kwargs.items()})
        flat = list(out) if isinstance(out, (tuple, list)) else [out]
        storages = [self.tensors[r].untyped_storage()._cdata for r in taken]
        specs: list[TensorSpec | None] = []
        for result in flat:
            own = None if result is None else result.untyped_storage()._cdata
            alias = storages.index(own) if own in storages else None
            specs.append(None if result is None else spec_of(result, alias, alias is not None and "_." in name))
        values = [Value(NodeId(r)) for r in taken]
        node = with_distinct_inputs(Node(NodeId(0), name, tuple(values), tuple(specs), call_args, call_kwargs))
        inputs = tuple(value.node for value in node.inputs)
        call = Call(name, node.args, node.kwargs, tuple(spec_of(self.tensors[r]) for r in inputs), node.outputs)
        outputs = tuple(None if result is None else self._new(result) for result in flat)
        compute = Compute(NodeId(self.nodes), call, inputs, outputs)
        if torch.Tag.nondeterministic_seeded in overload(name).tags:
            number, record, replay = self.draw
            compute = replace(compute, draw=number, record=record, replay=replay)
        self._add(compute)
        self.nodes += 1
        return outputs if isinstance(out, (tuple, list)) else outputs[0]

    def slice(self, source: Reg, piece: Piece) -> Reg:
        """The current part's piece: a view, or a copy for inner atoms."""
        view = _view(self.tensors[source], piece)
        if piece.outer > 1:
            view = view.clone(memory_format=torch.contiguous_format).flatten(piece.dim, piece.dim + 1)
        register = self._new(view)
        spec = spec_of(view, None if piece.outer > 1 else 0)
        self._add(Slice(register, source, spec, piece))
        return register

    def allocate(self, shape: Sequence[int], fill: float | None = None, dtype: Any = torch.float32) -> Reg:
        """A new dense tensor."""
        tensor = torch.zeros(shape, dtype=dtype)
        register = self._new(tensor)
        self._add(Allocate(register, spec_of(tensor), fill))
        return register

    def write(self, target: Reg, source: Reg, piece: Piece) -> None:
        """Copies a part into its piece."""
        self._add(Write(target, source, piece))

    def accumulate(self, target: Reg, source: Reg, reduction: str = "sum", scale: float = 1.0) -> None:
        """Adds a partial result."""
        self._add(Accumulate(target, source, reduction, scale))

    @contextlib.contextmanager
    def loop(self, parts: int, label: str = "") -> Iterator[None]:
        """Instructions within run `parts` times."""
        self.bodies.append([])
        yield
        body = self.bodies.pop()
        self._add(Loop(parts, tuple(body), label))

    def routine(self, *outputs: Reg) -> Routine:
        """The finished routine."""
        specs, roots, seen = [], [], dict[int, Reg]()
        for register in self.inputs:
            root = seen.setdefault(self.tensors[register].untyped_storage()._cdata, register)
            specs.append(spec_of(self.tensors[register], None if root == register else 0))
            roots.append(root)
        return Routine(
            name="loops",
            inputs=tuple(self.inputs),
            input_specs=tuple(specs),
            input_roots=tuple(roots),
            body=with_frees(tuple(self.bodies[0]), set(outputs)),
            outputs=outputs,
            output_names=tuple(f"out{i}" for i in range(len(outputs))),
            values={r: Value(NodeId(r)) for r in range(len(self.tensors))},
            input_names=tuple(f"in{i}" for i in range(len(self.inputs))),
        )

    def _new(self, tensor: torch.Tensor) -> Reg:
        self.tensors.append(tensor)
        return Reg(len(self.tensors) - 1)

    def _add(self, instruction: Instruction) -> None:
        self.bodies[-1].append(instruction)

    def _template(self, value: Any, taken: list[Reg]) -> Any:
        if isinstance(value, Reg):
            taken.append(value)
            return Slot(len(taken) - 1)
        if isinstance(value, (tuple, list)):
            return tuple(self._template(item, taken) for item in value)
        return literal(value)

    def _real(self, value: Any) -> Any:
        if isinstance(value, Reg):
            return self.tensors[value]
        return [self._real(item) for item in value] if isinstance(value, (tuple, list)) else value


def _view(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    if piece.outer == 1:
        return tensor.narrow(piece.dim, piece.start, piece.length)
    return tensor.unflatten(piece.dim, (piece.outer, -1)).narrow(piece.dim + 1, piece.start, piece.length)


def with_frees(body: tuple[Instruction, ...], keep: set[Register]) -> tuple[Instruction, ...]:
    """The body, loops' bodies within too, with what it makes freed right after its last use."""
    mine = {register for instruction in body for register, _ in made(instruction)} - keep
    last = {r: i for i, instruction in enumerate(body) for r in _touched(instruction) if r in mine}
    done: list[Instruction] = []
    for index, instruction in enumerate(body):
        if isinstance(instruction, Loop):
            instruction = replace(instruction, body=with_frees(instruction.body, keep))
        done.append(instruction)
        dead = tuple(register for register, at in last.items() if at == index)
        done += [Free(dead)] if dead else []
    return tuple(done)


def _touched(instruction: Instruction) -> Iterator[Register]:
    yield from (register for register, _ in made(instruction))
    match instruction:
        case Compute(inputs=inputs):
            yield from inputs
        case Slice(source=source):
            yield source
        case Write(target, source) | Accumulate(target, source):
            yield from (target, source)
        case Loop(body=body):
            for inner in body:
                yield from _touched(inner)


def mlp_by_batch(batch: int = 8, parts: int = 4, last: int = 0) -> tuple[Routine, list[torch.Tensor], Any]:
    """Forward and backward of a two-layer perceptron, split along the batch; with `last` > 0 the last rows
    form one more part of that length (a second loop). Weight gradients and the loss are summed."""
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(batch, 6), torch.randn(6, 10), torch.randn(10, 3)
    build = RoutineBuilder()
    rx, r1, r2 = build.input(x), build.input(w1), build.input(w2)
    y = build.allocate((batch, 3))
    loss = build.allocate((), 0)
    g1, g2 = build.allocate((6, 10), 0), build.allocate((10, 3), 0)
    length = (batch - last) // parts
    w2t = build.op("aten.t.default", r2)
    for count, piece in ((parts, Piece(0, length)), (1, Piece(0, last, batch - last)))[: 2 if last else 1]:
        with build.loop(count, f"batch in {count} parts"):
            part = build.slice(rx, piece)
            h = build.op("aten.mm.default", part, r1)
            a = build.op("aten.relu.default", h)
            out = build.op("aten.mm.default", a, r2)
            build.write(y, out, piece)
            squares = build.op("aten.mul.Tensor", out, out)
            build.accumulate(loss, build.op("aten.sum.default", squares))
            dout = build.op("aten.mul.Tensor", out, 2.0)
            build.accumulate(g2, build.op("aten.mm.default", build.op("aten.t.default", a), dout))
            da = build.op("aten.mm.default", dout, w2t)
            dh = build.op("aten.threshold_backward.default", da, a, 0)
            build.accumulate(g1, build.op("aten.mm.default", build.op("aten.t.default", part), dh))

    def whole(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w1, w2 = (w.clone().requires_grad_() for w in (w1, w2))
        with torch.enable_grad():
            out = (x @ w1).relu() @ w2
            value = (out * out).sum()
            grads = torch.autograd.grad(value, (w1, w2))
        return out.detach(), value.detach(), *grads

    return build.routine(y, loss, g1, g2), [x, w1, w2], whole


def mlp_by_hidden(parts: int = 5) -> tuple[Routine, list[torch.Tensor], Any]:
    """A two-layer perceptron split along its hidden dimension: weights in pieces, partial sums in a total, and
    the largest activation."""
    torch.manual_seed(1)
    x, w1, w2 = torch.randn(4, 6), torch.randn(6, 10), torch.randn(10, 3)
    build = RoutineBuilder()
    rx, r1, r2 = build.input(x), build.input(w1), build.input(w2)
    total = build.allocate((4, 3), 0)
    top = build.allocate((4,), -float("inf"))
    with build.loop(parts, "hidden"):
        a = build.op("aten.tanh.default", build.op("aten.mm.default", rx, build.slice(r1, Piece(1, 10 // parts))))
        build.accumulate(top, build.op("aten.amax.default", a, [1]), "max")
        build.accumulate(total, build.op("aten.mm.default", a, build.slice(r2, Piece(0, 10 // parts))), scale=0.5)

    def whole(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.tanh(x @ w1)
        return a @ w2 * 0.5, a.amax(1)

    return build.routine(total, top), [x, w1, w2], whole


def tiles(rows: int = 2, columns: int = 3) -> tuple[Routine, list[torch.Tensor], Any]:
    """Nested loops over the rows and columns of a product, its row sums accumulated within the outer part."""
    torch.manual_seed(2)
    x, w = torch.randn(4, 5), torch.randn(5, 6)
    build = RoutineBuilder()
    rx, rw = build.input(x), build.input(w)
    out, sums = build.allocate((4, 6)), build.allocate((4,))
    across, down = Piece(0, 4 // rows), Piece(1, 6 // columns)
    with build.loop(rows, "rows"):
        part = build.slice(rx, across)
        strip = build.slice(out, across)
        partial = build.allocate((4 // rows,), 0)
        with build.loop(columns, "columns"):
            tile = build.op("aten.mm.default", part, build.slice(rw, down))
            build.write(strip, tile, down)
            build.accumulate(partial, build.op("aten.sum.dim_IntList", tile, [1]))
        build.write(sums, partial, across)

    def whole(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ w, (x @ w).sum(1)

    return build.routine(out, sums), [x, w], whole


def inner_atom(parts: int = 2) -> tuple[Routine, list[torch.Tensor], Any]:
    """Rows `[B*T, C]` split along T: pieces are copied, and written back with a stride."""
    torch.manual_seed(3)
    x, w = torch.randn(3 * 4, 5), torch.randn(5, 2)
    build = RoutineBuilder()
    rx, rw = build.input(x), build.input(w)
    out = build.allocate((12, 2))
    piece = Piece(0, 4 // parts, outer=3)
    with build.loop(parts, "T"):
        build.write(out, build.op("aten.mm.default", build.slice(rx, piece), rw), piece)
    return build.routine(out), [x, w], lambda x, w: (x @ w,)


def straight_into_total() -> tuple[Routine, list[torch.Tensor], Any]:
    """A product added straight into the accumulator, in place, without a partial result."""
    torch.manual_seed(4)
    x, w = torch.randn(3, 8), torch.randn(8, 2)
    build = RoutineBuilder()
    rx, rw = build.input(x), build.input(w)
    total = build.allocate((3, 2), 0)
    with build.loop(4):
        build.op("aten.addmm_.default", total, build.slice(rx, Piece(1, 2)), build.slice(rw, Piece(0, 2)))
    return build.routine(total), [x, w], lambda x, w: (x @ w,)


def half_precision() -> tuple[Routine, list[torch.Tensor], Any]:
    """Partial sums in bfloat16, their total in float32, rounded once at the end."""
    torch.manual_seed(5)
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(8, 2).bfloat16()
    build = RoutineBuilder()
    rx, rw = build.input(x), build.input(w)
    total = build.allocate((3, 2), 0)
    with build.loop(2):
        build.accumulate(total, build.op("aten.mm.default", build.slice(rx, Piece(1, 4)), build.slice(rw, Piece(0, 4))))
    rounded = build.op("aten._to_copy.default", total, dtype=torch.bfloat16)

    def whole(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (((x[:, :4] @ w[:4]).float() + (x[:, 4:] @ w[4:]).float()).bfloat16(),)

    return build.routine(rounded), [x, w], whole


def recomputed_draws() -> tuple[Routine, list[torch.Tensor], Any]:
    """Dropout within each part, drawn again for the second result of the part."""
    build = RoutineBuilder()
    x = torch.ones(6, 4)
    rx = build.input(x)
    once, again, other = build.allocate((6, 4)), build.allocate((6, 4)), build.allocate((6, 4))
    piece = Piece(0, 2)
    with build.loop(3):
        part = build.slice(rx, piece)
        for number, (out, record, replay) in {0: (once, True, False), 1: (other, False, False)}.items():
            build.draw = (number, record, replay)
            build.write(out, build.op("aten.native_dropout.default", part, 0.5, True)[0], piece)
        build.draw = (0, False, True)
        build.write(again, build.op("aten.native_dropout.default", part, 0.5, True)[0], piece)

    def whole(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = [[torch.native_dropout(part, 0.5, True)[0] for _ in range(2)] for part in x.split(2)]
        first, second = (torch.cat(parts) for parts in zip(*pairs))
        return first, first, second

    return build.routine(once, again, other), [x], whole


LOOPS = {
    "batch": mlp_by_batch,
    "uneven": lambda: mlp_by_batch(10, 3, 1),
    "hidden": mlp_by_hidden,
    "tiles": tiles,
    "inner atom": inner_atom,
    "straight": straight_into_total,
    "half precision": half_precision,
    "recomputed draws": recomputed_draws,
}
