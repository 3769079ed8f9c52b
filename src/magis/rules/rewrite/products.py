"""Matrix products as the rewrites see them: `beta * bias + alpha * (a @ b)`, read from a node and written into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Protocol

from magis.fission.parts import CannotInferError, Infer
from magis.fission.tree import Program
from magis.ir.args import Arg, Args, Kwargs, Slot, Symbol
from magis.ir.dtype import DType
from magis.ir.graph import Call, Graph, Node, NodeId, Value
from magis.ops.arguments import overloads
from magis.ops.rule import argument
from magis.rules.base import Change, Site
from magis.rules.rewrite.editing import CannotRewriteError, Rewriting

_PLAIN = {"aten.mm.default": "aten.addmm.default", "aten.bmm.default": "aten.baddbmm.default"}
_ADDING = {adding: plain for plain, adding in _PLAIN.items()}
_LAYOUT = frozenset(
    overloads("""
        _unsafe_view.default alias.default clone.default detach.default expand.default permute.default reshape.default
        select.int slice.Tensor squeeze.dim squeeze.dims t.default transpose.int unsqueeze.default view.default
    """)
)
_RESHAPES = overloads("_unsafe_view.default reshape.default squeeze.dim unsqueeze.default view.default")


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of real numbers; without a bias its `beta` is 0."""

    a: Value
    b: Value
    batched: bool
    bias: Value | None = None
    beta: float = 0.0
    alpha: float = 1.0

    def scaled(self, factor: float) -> Product:
        """The product, bias included, times a number."""
        return replace(self, beta=self.beta * factor, alpha=self.alpha * factor)

    def call(self, zero: Value | None) -> tuple[str, tuple[Value, ...], Kwargs]:
        """Operator, inputs and keywords of it; `zero` stands where a bias has to but does not count."""
        plain = "aten.bmm.default" if self.batched else "aten.mm.default"
        if self.bias is None and self.alpha == 1:
            return plain, (self.a, self.b), ()
        bias = self.bias or zero
        assert bias is not None
        named = (("beta", self.beta, 1), ("alpha", self.alpha, 1))
        return _PLAIN[plain], (bias, self.a, self.b), tuple((name, x) for name, x, usual in named if x != usual)


def product_of(graph: Graph, node: Node) -> Product | None:
    """The product that a node computes; None for other operators, and where the numbers are whole or complex."""
    if node.op not in _PLAIN and node.op not in _ADDING:
        return None
    if not all(graph.spec(value).dtype.is_floating for value in node.inputs):
        return None
    operands = [node.inputs[arg.index] for arg in node.args if isinstance(arg, Slot)]
    if node.op in _PLAIN:
        return Product(operands[0], operands[1], node.op == "aten.bmm.default")
    call = graph.call(node)
    beta, alpha = number(argument(call, 3, "beta"), 1), number(argument(call, 4, "alpha"), 1)
    if len(operands) != 3 or beta is None or alpha is None:
        return None
    bias = operands[0] if beta else None
    return Product(operands[1], operands[2], _ADDING[node.op] == "aten.bmm.default", bias, beta, alpha)


def number(arg: Arg, default: float | None = None) -> float | None:
    """The argument as a number, `default` if it is absent; None for everything else."""
    if arg is None:
        return default
    return arg if isinstance(arg, (int, float)) and not isinstance(arg, bool) else None


def is_layout(node: Node) -> bool:
    """Whether it moves, repeats or leaves out elements of its only input, and changes none."""
    return node.op in _LAYOUT and len(node.inputs) == 1


def same_elements(graph: Graph, node: Node) -> bool:
    """Whether it gives a dense tensor the same elements in another shape."""
    return (
        node.op in _RESHAPES and graph.spec(node.inputs[0]).is_contiguous and graph.spec(Value(node.id)).is_contiguous
    )


def sole_reader(graph: Graph, value: Value) -> bool:
    """Whether one node reads the results of the value's node, and the caller none of them."""
    return len(graph.users[value.node]) == 1 and all(other.node != value.node for other in graph.outputs)


def overwritten(graph: Graph, value: Value) -> bool:
    """Whether the value lies in memory that the step writes into: that of an input, then."""
    root = graph.root(value)
    there = [root] if graph.nodes[root.node].is_input else []
    for seen in there:
        for node in (graph.nodes[user] for user in graph.users[seen.node]):
            for output, spec in enumerate(node.outputs):
                if spec is not None and spec.alias_of is not None and node.inputs[spec.alias_of] == seen:
                    if spec.writes:
                        return True
                    there.append(Value(node.id, output))
    return False


def in_parts(program: Program, nodes: Iterable[NodeId]) -> bool:
    """Whether one of the nodes lies in a region: the regions know the operators in them."""
    wanted = set(nodes)
    return any(wanted & fission.region for fission in program.ftree)


class Calculation(Rewriting):
    """A rewrite that also makes other calls of nodes that stay where they are."""

    def __init__(self, program: Program, infer: Infer) -> None:
        super().__init__(program, infer)
        self._zeros: dict[tuple[DType, str], Value] = {}

    def put(self, node: Node, op: str, inputs: tuple[Value, ...], args: Args, kwargs: Kwargs = ()) -> None:
        """Makes a node another call with the same type of result; it keeps its number and its readers."""
        specs = tuple(self.spec(value) for value in inputs)
        if self.infer(Call(op, args, kwargs, specs, node.outputs)) != node.outputs:
            raise CannotRewriteError(f"{op} gives another type of result than {node.op}")
        self.edit.replace_node(replace(node, op=op, inputs=inputs, args=args, kwargs=kwargs))

    def unread(self, node: NodeId) -> None:
        """A node may go if nobody reads it any more."""
        self._replaced.add(node)

    def put_product(self, node: Node, product: Product) -> None:
        """Makes a node that product."""
        bare = product.bias is None and product.alpha != 1
        op, inputs, kwargs = product.call(self._zero(product.a) if bare else None)
        self.put(node, op, inputs, tuple(Slot(i) for i in range(len(inputs))), kwargs)

    def _zero(self, like: Value) -> Value:
        """A number for the place of a bias that does not count, one for all products of a rewrite."""
        spec = self.spec(like)
        key = spec.dtype, spec.device
        if key not in self._zeros:
            options: Kwargs = (("dtype", spec.dtype), ("device", Symbol("device", spec.device)))
            self._zeros[key] = self.add("aten.full.default", (), (), 0.0, kwargs=options)
        return self._zeros[key]


class Local(Protocol):
    """One place of a rewrite: the nodes that change or that lie between, and the change."""

    @property
    def touched(self) -> Set[NodeId]:
        """Those nodes."""

    def do(self, rewriting: Calculation) -> None:
        """Makes the change."""


def all_then_each(
    graph: Graph, latency_s: Callable[[NodeId], float], find: Callable[[Graph, Node], Local | None]
) -> Iterator[Site]:
    """Sites of all nodes at which a rewrite is found at once, then of each alone, the slowest first."""
    found = [node.id for node in graph.nodes.values() if find(graph, node) is not None]
    found.sort(key=lambda n: (-latency_s(n), n))
    if len(found) > 1:
        yield tuple(found)
    yield from ((n,) for n in found)


def in_turns(program: Program, site: Site, infer: Infer, find: Callable[[Graph, Node], Local | None]) -> Change | None:
    """The rewrite at all nodes of a site; where two places touch each other, one after the other, if it still applies.
    None when it does not apply at one of them from the start."""
    left = [NodeId(number) for number in site]
    done: Change | None = None
    while left:
        now = program
        if done is not None:
            now = done.program
            left = [n for n in left if n in now.graph.nodes and find(now.graph, now.graph.nodes[n]) is not None]
            if not left:
                break
        found = _one_turn(now, left, infer, find)
        if found is None:
            return None
        change, left = found
        done = change if done is None else _after(program, done, change)
    return done


def _one_turn(
    program: Program, nodes: list[NodeId], infer: Infer, find: Callable[[Graph, Node], Local | None]
) -> tuple[Change, list[NodeId]] | None:
    """The rewrite at those places that touch no earlier one, and the nodes of the others."""
    graph = program.graph
    taken: set[NodeId] = set()
    left = []
    rewriting = Calculation(program, infer)
    try:
        for node_id in nodes:
            node = graph.nodes.get(node_id)
            local = None if node is None else find(graph, node)
            if local is None or in_parts(program, local.touched):
                return None
            if taken.isdisjoint(local.touched):
                local.do(rewriting)
                taken |= local.touched
            else:
                left.append(node_id)
        return rewriting.finish(), left
    except CannotInferError:
        return None


def _after(program: Program, first: Change, second: Change) -> Change:
    """Two changes as one."""
    old = (first.old_nodes | second.old_nodes) & program.graph.nodes.keys()
    new = (first.new_nodes | second.new_nodes) & second.program.graph.nodes.keys()
    return Change(second.program, old, new)
