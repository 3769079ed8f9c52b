"""Clocks of the two links on which tensors are copied to the host and back while operators run (paper section 5.2).

Each link carries one copy at a time, in the order in which they begin. Time is counted in whole femtoseconds, so that
what a part of a loop waits for is the same in every part, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from magis.ir.graph import Graph, NodeId, Value
from magis.lower.transfers import is_view
from magis.ops.swap import LOAD, STORE

_FEMTOSECONDS = 1e15


HOST_MEMORY_BYTES = 256 << 30
"""What may be swapped out at a time unless the caller says otherwise."""


@dataclass(frozen=True)
class Host:
    """Memory to swap to: the seconds of a copy of so many bytes to it or back, and how much of it there is."""

    transfer_s: Callable[[int], float]
    memory_bytes: int = HOST_MEMORY_BYTES


def no_transfer(nbytes: int) -> float:
    """For programs without transfers."""
    raise ValueError("this program swaps tensors: the seconds of a transfer are needed")


class Links:
    """When operators run and transfers are complete. `transfer_s` gives the seconds of a copy of so many bytes."""

    def __init__(self, transfer_s: Callable[[int], float]) -> None:
        self._transfer_s = transfer_s
        self.now = 0
        self._stores_done = 0
        self._loads_done = 0
        self._done: dict[Hashable, int] = {}

    @property
    def idle(self) -> bool:
        """Whether no copy is under way."""
        return self.now >= self._stores_done and self.now >= self._loads_done

    def run(self, seconds: float) -> None:
        """Operators run for so long."""
        self.now += _whole(seconds)

    def store(self, key: Hashable, nbytes: int) -> None:
        """A copy to the host begins when all before it are done."""
        self._stores_done = max(self._stores_done, self.now) + _whole(self._transfer_s(nbytes))
        self._done[key] = self._stores_done

    def load(self, key: Hashable, nbytes: int) -> None:
        """A copy from the host begins when all before it are done."""
        self._loads_done = max(self._loads_done, self.now) + _whole(self._transfer_s(nbytes))
        self._done[key] = self._loads_done

    def wait(self, key: Hashable) -> float:
        """Nothing runs until a copy is complete: for so many seconds."""
        stall = max(self._done.get(key, 0) - self.now, 0)
        self.now += stall
        return stall / _FEMTOSECONDS


def _whole(seconds: float) -> int:
    return round(seconds * _FEMTOSECONDS)


def swaps(graph: Graph) -> bool:
    """Whether any tensor is copied to the host."""
    return any(node.op == STORE for node in graph.nodes.values())


def stalls_s(
    graph: Graph, order: Sequence[NodeId], latencies_s: Mapping[NodeId, float], transfer_s: Callable[[int], float]
) -> list[float]:
    """Seconds of each wait for a transfer when the operators of a graph run in that order: those of its routine."""
    links, found = Links(transfer_s), list[float]()
    stores: dict[NodeId, list[NodeId]] = {}
    for node_id in order:
        node = graph.nodes[node_id]
        if node.op == STORE:
            stores.setdefault(node.inputs[0].node, []).append(node_id)
    loading: set[Value] = set()
    for node_id in order:
        node = graph.nodes[node_id]
        if node.op == STORE:
            found.append(links.wait(node_id))
            continue
        if node.op == LOAD:
            links.load(node_id, graph.spec(Value(node_id)).nbytes)
            loading.add(Value(node_id))
        elif loading and not is_view(node):
            for root in dict.fromkeys(graph.root(value) for value in node.inputs):
                if root in loading:
                    loading.remove(root)
                    found.append(links.wait(root.node))
        links.run(latencies_s[node_id])
        for store in stores.get(node_id, ()):
            links.store(store, graph.spec(Value(store)).nbytes)
    return found
