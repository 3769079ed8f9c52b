"""A GELU written out in many operators is PyTorch's own, and so is its gradient.

    before   h = 0.5 * x;  t = tanh(0.798 * (x + 0.0447 * pow(x, 3)));  y = h * (t + 1)
             ...;  dx = (the derivative of all that) * g, in ten operators that read h, t, t + 1 and x
    after    y = gelu(x, "tanh");  ...;  dx = gelu_backward(g, x, "tanh")

What a group of operators computes is found out by computing it, for some numbers x and g: it does not matter how the
formula is written. Saves some fifteen passes over a tensor and three tensors that wait for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isclose, isfinite, pi, sqrt, tanh
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.args import Arg, Slot
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.ops.rule import argument
from magis.rules.base import Change, Latency, Site
from magis.rules.rewrite.products import Calculation, all_then_each, in_turns, number, overwritten
from magis.rules.rewrite.scale import scale_of
from magis.schedule.incremental import Scheduled

Numbers = tuple[float, ...]
_X: Numbers = (-2.7, -1.3, -0.6, -0.01, 0.2, 0.9, 1.7, 2.9)
_G: Numbers = (0.7, -1.9, 0.3, 1.1, -0.4, 2.3, -0.8, 0.5)
_TANH = "aten.tanh.default"
_ABOVE, _AROUND = 8, 64
"""Operators before a tanh among which x is looked for, and those after x that may belong to the group."""
_ACCURACY = 1e-11


class WholeGelu:
    """Site: the tanh in the middle of each GELU."""

    name: ClassVar[str] = "whole gelu"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """All of them at once, then each alone, the slowest first."""
        yield from all_then_each(state.flat.graph, latency_s, _Group.of)

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Puts them together. None where there is no such group, or where its tanh would still be needed."""
        change = in_turns(program, site, infer, _Group.of)
        if change is None or any(n in change.program.graph.nodes for n in site):
            return None
        return change


def _gelu(x: float) -> float:
    return 0.5 * x * (1 + tanh(_inner(x)))


def _slope(x: float) -> float:
    t = tanh(_inner(x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x)


def _inner(x: float) -> float:
    return sqrt(2 / pi) * (x + 0.044715 * x**3)


_INNER = tuple(tanh(_inner(x)) for x in _X)
_FORWARD = tuple(map(_gelu, _X))
_GRADIENT = tuple(g * _slope(x) for g, x in zip(_G, _X))


class _Group:
    """Operators around a tanh, and the numbers that they compute from `_X` and `_G`."""

    def __init__(self, graph: Graph, x: Value) -> None:
        self.graph, self.x = graph, x
        self.spec = graph.spec(x)
        self.numbers: dict[Value, Numbers] = {x: _X}
        self._follow()
        self.gradient = self._find_gradient()
        if self.gradient is not None:
            self.numbers[self.gradient] = _G
            self._follow()

    @classmethod
    def of(cls, graph: Graph, middle: Node) -> _Group | None:
        """The group of a GELU; None when the tanh is no part of one."""
        for x in _ancestors(graph, middle) if middle.op == _TANH else ():
            if len(graph.users[x.node]) < 2 or not graph.spec(x).dtype.is_floating:
                continue
            group = cls(graph, x)
            if _same(group.numbers.get(Value(middle.id)), _INNER) and group.results(_FORWARD):
                return None if overwritten(graph, x) else group
        return None

    def results(self, wanted: Numbers) -> list[Value]:
        """The operators that compute those numbers."""
        return [value for value, numbers in self.numbers.items() if _same(numbers, wanted)]

    @property
    def touched(self) -> set[NodeId]:
        """The operators of the group, what they read and what reads them."""
        nodes = {value.node for value in self.numbers}
        return nodes.union(*(self.graph.users[n] for n in nodes))

    def do(self, rewriting: Calculation) -> None:
        """Operators of PyTorch for the result and the gradient."""
        for wanted, op in ((_FORWARD, "aten.gelu.default"), (_GRADIENT, "aten.gelu_backward.default")):
            for old in self.results(wanted):
                inputs = [self.gradient, self.x] if wanted is _GRADIENT else [self.x]
                taken = [value for value in inputs if value is not None]
                origin, slots = self.graph.nodes[old.node].origin, map(Slot, range(len(taken)))
                rewriting.replace(
                    old, rewriting.add(op, taken, *slots, kwargs=(("approximate", "tanh"),), origin=origin)
                )

    def _follow(self) -> None:
        """Computes the readers of what is known, and their readers, as far as their numbers follow from that."""
        graph, todo = self.graph, list(self.numbers)
        for value in todo:
            for reader in graph.users[value.node]:
                made = self._compute(graph.nodes[reader]) if len(self.numbers) < _AROUND else None
                if made is not None:
                    self.numbers[Value(reader)] = made
                    todo.append(Value(reader))

    def _compute(self, node: Node) -> Numbers | None:
        """The numbers of a node that is not known but of which all operands are."""
        compute = _COMPUTE.get(node.op)
        if compute is None or Value(node.id) in self.numbers or not self._is_alike(Value(node.id)):
            return None
        if not all(value in self.numbers for value in node.inputs):
            return None
        try:
            read = zip(*(self.numbers[value] for value in node.inputs), strict=True)
            found = tuple(compute(self.graph, node, at) for at in read)
        except (ArithmeticError, ValueError, TypeError):
            return None
        return found if all(map(isfinite, found)) else None

    def _find_gradient(self) -> Value | None:
        """The first tensor that a known one is multiplied with, before any scale."""
        users = sorted({n for value in self.numbers for n in self.graph.users[value.node]})
        for node in (self.graph.nodes[n] for n in users):
            unknown = [value for value in node.inputs if value not in self.numbers]
            if (
                node.op == "aten.mul.Tensor"
                and len(unknown) == 1
                and len(node.inputs) == 2
                and self._is_alike(unknown[0])
            ):
                gradient = unknown[0]
                while (scaled := scale_of(self.graph, self.graph.nodes[gradient.node])) is not None:
                    gradient = scaled[0]
                return gradient
        return None

    def _is_alike(self, value: Value) -> bool:
        spec = self.graph.nodes[value.node].outputs[value.output]
        return spec is not None and (spec.shape, spec.dtype) == (self.spec.shape, self.spec.dtype)


def _ancestors(graph: Graph, node: Node) -> list[Value]:
    """What an operator is computed from, through a few operators at most, the nearest first."""
    found = list(node.inputs)
    for value in found:
        maker = graph.nodes[value.node]
        if maker.op in _COMPUTE and len(found) < _ABOVE:
            found += (other for other in maker.inputs if other not in found)
    return found


def _same(numbers: Numbers | None, wanted: Numbers) -> bool:
    return numbers is not None and all(isclose(a, b, rel_tol=_ACCURACY) for a, b in zip(numbers, wanted))


def _operand(node: Node, place: int, read: Sequence[float]) -> float:
    """An operand: one of the numbers read, or a number in the call."""
    given: Arg = node.args[place]
    if isinstance(given, Slot):
        return read[given.index]
    literal = number(given)
    if literal is None:
        raise ValueError(given)
    return literal


def _sum(sign: float) -> Callable[[Graph, Node, Sequence[float]], float]:
    def compute(graph: Graph, node: Node, read: Sequence[float]) -> float:
        alpha = number(argument(graph.call(node), 2, "alpha"), 1)
        if alpha is None:
            raise ValueError(node.op)
        return _operand(node, 0, read) + sign * alpha * _operand(node, 1, read)

    return compute


def _binary(function: Callable[[float, float], float]) -> Callable[[Graph, Node, Sequence[float]], float]:
    def compute(graph: Graph, node: Node, read: Sequence[float]) -> float:
        if len(node.args) != 2 or node.kwargs:
            raise ValueError(node.op)
        return function(_operand(node, 0, read), _operand(node, 1, read))

    return compute


def _sum_with_product(graph: Graph, node: Node, read: Sequence[float]) -> float:
    factor = number(dict(node.kwargs).get("value"), 1)
    if factor is None:
        raise ValueError(node.op)
    return _operand(node, 0, read) + factor * _operand(node, 1, read) * _operand(node, 2, read)


_COMPUTE: dict[str, Callable[[Graph, Node, Sequence[float]], float]] = {
    _TANH: lambda graph, node, read: tanh(read[0]),
    "aten.alias.default": lambda graph, node, read: read[0],
    "aten.detach.default": lambda graph, node, read: read[0],
    "aten.neg.default": lambda graph, node, read: -read[0],
    "aten.add.Tensor": _sum(1),
    "aten.add.Scalar": _sum(1),
    "aten.sub.Tensor": _sum(-1),
    "aten.addcmul.default": _sum_with_product,
    "aten.mul.Tensor": _binary(lambda a, b: a * b),
    "aten.mul.Scalar": _binary(lambda a, b: a * b),
    "aten.div.Tensor": _binary(lambda a, b: a / b),
    "aten.div.Scalar": _binary(lambda a, b: a / b),
    "aten.pow.Tensor_Scalar": _binary(lambda a, b: float(a**b)),
    "aten.tanh_backward.default": _binary(lambda g, t: g * (1 - t * t)),
}
"""What operators compute of single numbers."""
