"""Where transfers begin and are waited for, given where Store and Load stand in an order (see `magis.ops.swap`).

order    x = f();  ...;  h = swap.store(x);  ...;  y = swap.load(h);  ...;  g(y)
routine  x = f();  Store h <- x;  ...;  Wait h;  free x;  ...;  Load y <- h;  ...;  Wait y;  g(y)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from magis.ir.graph import Call, Node, NodeId, Value
from magis.lower.routine import Free, Instruction, Load, Register, Store, Wait
from magis.ops.swap import LOAD, STORE


def is_view(call: Call | Node) -> bool:
    """Whether it only gives other views of what it reads, so that it need not wait for the elements."""
    made = [spec for spec in call.outputs if spec is not None]
    return bool(made) and all(spec.alias_of is not None and not spec.writes for spec in made)


class Transfers:
    """The transfers of one body, whose `nodes` run one after the other."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.stores: dict[Value, list[Node]] = {}
        for node in nodes:
            if node.op == STORE:
                self.stores.setdefault(node.inputs[0], []).append(node)
        self.under_way: dict[Register, Register] = {}  # what lies in a tensor that is being loaded
        self.unneeded: set[Register] = set()  # loaded tensors of which only views are left

    def before(self, reads: Iterable[Register]) -> list[Instruction]:
        """Waits for what is read now."""
        found = list(dict.fromkeys(self.under_way[r] for r in reads if r in self.under_way))
        if found:
            self.under_way = {r: load for r, load in self.under_way.items() if load not in found}
        freed = tuple(load for load in found if load in self.unneeded)
        self.unneeded.difference_update(freed)
        return [*map(Wait, found), Free(freed)] if freed else [Wait(load) for load in found]

    def free(self, dead: Iterable[Register]) -> tuple[Register, ...]:
        """Those of the registers to free that nobody will wait for; the others go then."""
        waited_for = set(self.under_way.values())
        self.unneeded.update(waited_for.intersection(dead))
        return tuple(register for register in dead if register not in waited_for)

    def looked_at(self, reads: Sequence[Register], made: Iterable[Register | None]) -> None:
        """Notes views of what is being loaded."""
        load = next((self.under_way[r] for r in reads if r in self.under_way), None)
        if load is not None:
            self.under_way.update((r, load) for r in made if r is not None)

    def load(self, node: NodeId, call: Call, source: Register, register: Register) -> Load:
        """Begins to load."""
        spec = call.outputs[0]
        assert call.op == LOAD and spec is not None
        self.under_way[register] = register
        return Load(register, source, spec, node)

    def after(
        self, made: Mapping[Value, Register], register_of: Callable[[Value], Register], calls: Callable[[Node], Call]
    ) -> Iterator[Store]:
        """Begins to store what was made."""
        for value, source in made.items():
            for node in self.stores.get(value, ()):
                spec = calls(node).outputs[0]
                assert spec is not None
                yield Store(register_of(Value(node.id)), source, spec, node.id)
