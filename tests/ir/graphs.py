"""Graphs for tests of the representation: small ones by hand, random ones as data."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from magis.ir.args import Arg, Slot, Symbol
from magis.ir.dtype import DType
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, NodeId, Origin, TensorSpec, Value, contiguous_strides

EMPTY = Graph({}, ())


def dense(*shape: int, dtype: DType = DType.F32) -> TensorSpec:
    """A new row-major tensor."""
    spec = TensorSpec(shape, contiguous_strides(shape), dtype, 0)
    return TensorSpec(shape, spec.strides, dtype, spec.nbytes)


def view(*shape: int, of: int = 0, writes: bool = False) -> TensorSpec:
    """A view of an input's storage."""
    return TensorSpec(shape, contiguous_strides(shape), DType.F32, 0, of, writes)


class Builder:
    """Adds nodes by operator name; every tensor is f32[4] unless told otherwise."""

    def __init__(self) -> None:
        self.edit = GraphEdit(EMPTY)

    def input(self, name: str = "x", kind: str = "batch", spec: TensorSpec | None = None) -> Value:
        return Value(self.edit.add("input", (), [spec or dense(4)], (kind, name)))

    def op(self, name: str, *inputs: Value, spec: TensorSpec | None = None, **more: Any) -> Value:
        slots = tuple(Slot(i) for i in range(len(inputs)))
        return Value(self.edit.add(f"aten.{name}.default", inputs, [spec or dense(4)], slots, **more))

    def write(self, target: Value, source: Value) -> Value:
        return self.op("copy_", target, source, spec=view(4, writes=True))

    def graph(self, *outputs: Value) -> Graph:
        self.edit.set_outputs(outputs, (f"out{i}" for i in range(len(outputs))))
        return self.edit.finish()


def trained() -> Graph:
    """%0 w, %1 x -> %2 view of w, %3 product, %4 gradient, %5 update of w (after the readers of w)."""
    build = Builder()
    w, x = build.input("w", "parameter"), build.input("x")
    seen = build.op("view", w, spec=view(4))
    product = build.op("mul", seen, x)
    gradient = build.op("neg", product)
    build.write(w, gradient)
    return build.graph(product)


dtypes = st.sampled_from(DType)
sizes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
words = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)


@st.composite
def specs(draw: st.DrawFn, inputs: int = 0) -> TensorSpec | None:
    """Any tensor type, or, among an operator's results, None."""
    if inputs and draw(st.integers(0, 9)) == 0:
        return None
    shape = draw(sizes)
    strides = contiguous_strides(shape) if draw(st.booleans()) else tuple(draw(st.integers(0, 20)) for _ in shape)
    alias = draw(st.none() | st.integers(0, inputs - 1)) if inputs else None
    own = TensorSpec(shape, strides, draw(dtypes), 0)
    return TensorSpec(
        shape,
        strides,
        own.dtype,
        0 if alias is not None else draw(st.sampled_from([own.nbytes, own.nbytes + 64, 0])),
        alias,
        alias is not None and draw(st.booleans()),
        draw(st.sampled_from([0, 0, 5])),
        draw(st.sampled_from(["cpu", "cuda:0", "meta"])),
    )


floats = st.floats(allow_nan=False) | st.sampled_from([float("inf"), -float("inf"), 1e16, -1e-300])
symbols = st.sampled_from(
    [Symbol("device", "cuda:1"), Symbol("memory_format", "channels_last"), Symbol("layout", "strided")]
)
literals: st.SearchStrategy[Arg] = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.complex_numbers(allow_nan=False) | words | dtypes | symbols,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A graph that prints and parses; its types need not fit its operators."""
    edit = GraphEdit(Graph({}, (), (), draw(words)))
    values: list[Value] = []

    def keep(node: NodeId, outputs: list[TensorSpec | None]) -> None:
        values.extend(Value(node, i) for i, spec in enumerate(outputs) if spec is not None)

    for number in range(draw(st.integers(1, 3))):
        spec = draw(specs())
        keep(edit.add("input", (), [spec], ("batch", draw(words) + str(number))), [spec])
    for _ in range(draw(st.integers(0, 6))):
        read = draw(st.lists(st.sampled_from(values), max_size=3, unique=True))
        args: list[Arg] = [Slot(i) for i in range(len(read))]
        args += draw(st.lists(literals, max_size=2))
        if read and draw(st.booleans()):
            args = [(args[0], None, *args[:1]), *args[1:]]
        kwargs = draw(st.dictionaries(names, literals, max_size=2))
        outputs = draw(st.lists(specs(len(read)), max_size=3))
        op = f"{draw(names)}.{draw(names)}.{draw(names)}"
        stream = draw(st.none() | st.integers(0, 3))
        origin = draw(st.builds(Origin, words, words, words))
        keep(edit.add(op, read, outputs, tuple(args), tuple(kwargs.items()), stream=stream, origin=origin), outputs)
    results = draw(st.lists(st.sampled_from(values), max_size=3))
    edit.set_outputs(results, [draw(words) + str(i) for i in range(len(results))])
    return edit.finish()


def random_edit(graph: Graph, seed: int) -> GraphEdit:
    """An edit with a few random changes: copies, redirected readers, removals, changed calls and outputs."""
    chosen = random.Random(seed)
    edit = GraphEdit(graph)
    for _ in range(chosen.randint(1, 5)):
        nodes = [edit.node(n) for n in sorted(edit.finish().nodes)]
        made = [node for node in nodes if not node.is_input]
        change = chosen.choice(["copy", "redirect", "redirect all", "remove", "call", "outputs"])
        if change == "outputs":
            values = [Value(n.id, i) for n in nodes for i, spec in enumerate(n.outputs) if spec is not None]
            edit.set_outputs([chosen.choice(values) for _ in graph.outputs])
        elif made:
            _change(edit, chosen, change, chosen.choice(made).id)
    return edit


def _change(edit: GraphEdit, chosen: random.Random, change: str, target: NodeId) -> None:
    node = edit.node(target)
    graph = edit.finish()
    readers = [n for n in graph.nodes.values() if any(v.node == target for v in n.inputs)]
    if change == "copy":
        edit.copy(target, "copy of")
    elif change in ("redirect", "redirect all") and readers:
        copy = edit.copy(target, "copy of")
        reader = chosen.choice(readers)
        value = next(v for v in reader.inputs if v.node == target)
        if change == "redirect":
            edit.redirect(reader.id, value, Value(copy, value.output))
        else:
            edit.redirect_all(value, Value(copy, value.output), lambda n: n == reader.id)
    elif change == "remove" and not readers and all(v.node != target for v in graph.outputs):
        edit.remove(target)
    elif change == "call":
        changed = type(node)(
            node.id, node.op, node.inputs, node.outputs, (*node.args, chosen.randint(0, 2)), node.kwargs, node.stream
        )
        edit.replace_node(changed)
