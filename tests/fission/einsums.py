"""Graphs of one test-only operator, an einsum, whose loops are its letters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest

from magis.fission.dim_graph import DimGraph, Vertex, dim_graph
from magis.fission.tree import Fission
from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.edit import GraphEdit
from magis.ir.graph import Call, Graph, NodeId, TensorSpec, Value, contiguous_strides
from magis.ops.loop import Axis, Concat, Loop, Reduce
from magis.ops.registry import rules
from magis.ops.rule import OpRule

EINSUM = "test.einsum"
EMPTY = Graph({}, ())


class Einsum(OpRule):
    """Arguments: the equation, and letters that the operator couples (a softmax), along which it has no loop. Loops:
    the letters of the result in their order, then those summed, in the order of the first operand."""

    def loops(self, call: Call) -> Iterator[Loop]:
        coupled = call.args[1]
        assert isinstance(coupled, str)
        operands, result = letters(call)
        lengths = _lengths(call)
        for letter in dict.fromkeys(result + "".join(operands)):
            if letter in coupled or lengths[letter] == 1:
                continue
            length = lengths[letter]
            inputs = (Axis(o.index(letter), length) if letter in o else None for o in operands)
            role = Concat(Axis(result.index(letter), length)) if letter in result else Reduce()
            yield Loop(tuple(inputs), (role,))


def letters(call: Call) -> tuple[list[str], str]:
    """The equation's letters: of each operand, and of the result."""
    equation = call.args[0]
    assert isinstance(equation, str)
    left, _, result = equation.partition("->")
    return (left.split(",") if left else []), result


def _lengths(call: Call) -> dict[str, int]:
    operands, result = letters(call)
    found = {letter: n for o, spec in zip(operands, call.inputs) for letter, n in zip(o, spec.shape)}
    whole = call.outputs[0]
    assert whole is not None
    return found or dict(zip(result, whole.shape))


def infer(call: Call) -> tuple[TensorSpec | None, ...]:
    """The results of an einsum of other lengths."""
    assert call.op == EINSUM
    lengths = _lengths(call)
    whole = call.outputs[0]
    assert whole is not None
    return (tensor([lengths[letter] for letter in letters(call)[1]], whole.dtype),)


def tensor(shape: Iterable[int], dtype: DType = DType.U8) -> TensorSpec:
    """A new row-major tensor."""
    dims = tuple(shape)
    count = 1
    for length in dims:
        count *= length
    return TensorSpec(dims, contiguous_strides(dims), dtype, count * dtype.nbytes)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the operator known for the length of a test."""
    monkeypatch.setitem(rules(), EINSUM, Einsum())  # type: ignore[arg-type]


class Drawing:
    """A graph of einsums over letters of given lengths; one byte an element."""

    def __init__(self, **lengths: int) -> None:
        self.lengths = lengths
        self.edit = GraphEdit(EMPTY)

    def spec(self, shape: str) -> TensorSpec:
        """A tensor with these letters' lengths."""
        return tensor(self.lengths[letter] for letter in shape)

    def input(self, shape: str, kind: str = "batch") -> NodeId:
        """An input of the graph."""
        number = len(self.edit.node_ids())
        return self.edit.add("input", (), [self.spec(shape)], (kind, f"in{number}"))

    def op(self, equation: str, *inputs: NodeId, coupled: str = "", stream: int | None = None) -> NodeId:
        """A node; all operands are whole first results."""
        args = (equation, coupled, *map(Slot, range(len(inputs))))
        result = equation.partition("->")[2]
        return self.edit.add(EINSUM, map(Value, inputs), [self.spec(result)], args, stream=stream)

    def view(self, shape: str, of: NodeId, writes: bool = False) -> NodeId:
        """The same elements as a tensor of other dimensions, or an in-place write of them."""
        spec = self.spec(shape)
        alias = TensorSpec(spec.shape, spec.strides, spec.dtype, 0, 0, writes)
        name = "aten.relu_.default" if writes else "aten.view.default"
        return self.edit.add(name, [Value(of)], [alias], (Slot(0), *([] if writes else [spec.shape])))

    def graph(self, *outputs: NodeId) -> Graph:
        """The graph so far, which hands back these nodes' results."""
        self.edit.set_outputs(map(Value, outputs), [f"out{i}" for i in range(len(outputs))])
        return self.edit.finish()


def axis_of(dims: DimGraph, vertex: Vertex) -> tuple[NodeId, int]:
    """The paper's <v, i>: dimensions of the result count from 1, dimensions summed are -1, -2, ... in order."""
    role = dims.loop(vertex).loop.roles[0]
    if isinstance(role, Concat):
        return vertex.node, role.axis.dim + 1
    summed = [i for i, each in enumerate(dims.loops[vertex.node]) if isinstance(each.loop.roles[0], Reduce)]
    return vertex.node, -1 - summed.index(vertex.number)


def vertex_of(dims: DimGraph, node: int, axis: int) -> Vertex:
    """The vertex that is the paper's <v, i>."""
    return next(v for v in dims.vertices if axis_of(dims, v) == (node, axis))


def fission(graph: Graph, cuts: Sequence[tuple[int, int]], parts: int = 2) -> Fission:
    """The region of some nodes, each along an axis given as in the paper."""
    dims = dim_graph(graph)
    found = {NodeId(node): dims.loop(vertex_of(dims, node, axis)).cut for node, axis in cuts}
    return Fission(frozenset(found), found, max(cut.length for cut in found.values()), parts)
