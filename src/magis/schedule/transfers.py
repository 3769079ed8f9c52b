"""Where Store and Load stand in an order (paper section 5.1, end): a copy to the host is complete as soon as its link
can be done with it; a copy back begins as late as it can without being waited for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from magis.ir.graph import NodeId, Value
from magis.lower.transfers import is_view
from magis.ops.swap import LOAD, STORE
from magis.schedule.incremental import Scheduled


def with_placed_transfers(
    state: Scheduled, latencies_s: Mapping[NodeId, float], transfer_s: Callable[[int], float], most_bytes: int = 0
) -> Scheduled:
    """The state with its other operators in their order and its transfers where they are hidden, as far as possible.
    With `most_bytes` copies back begin after moments at which more would be live with them (residents left out)."""
    return _Placing(state, latencies_s, transfer_s, most_bytes).placed()


class _Placing:
    def __init__(
        self, state: Scheduled, latencies_s: Mapping[NodeId, float], transfer_s: Callable[[int], float], most_bytes: int
    ) -> None:
        self.state, self.transfer_s, self.most_bytes = state, transfer_s, most_bytes
        self.graph = state.flat.graph
        self.others = [n for n in state.order if self.graph.nodes[n].op not in (STORE, LOAD)]
        self.place = {node: i for i, node in enumerate(self.others)}
        self.starts = [0.0, *accumulate(latencies_s[node] for node in self.others)]  # the last is the end

    def placed(self) -> Scheduled:
        """See `with_placed_transfers`."""
        stores = [n for n in self.state.order if self.graph.nodes[n].op == STORE]
        loads = [n for n in self.state.order if self.graph.nodes[n].op == LOAD]
        done = self._stores(stores)
        needs = {load: self._read(load) for load in loads}
        live = self._live(done, needs) if self.most_bytes else []
        return self._with_slots([*done.items(), *self._loads(needs, done, live)])

    def _with_slots(self, slots: Iterable[tuple[NodeId, int]]) -> Scheduled:
        """Transfers before the other operators at these places."""
        found: dict[int, list[NodeId]] = {}
        for node, slot in slots:
            found.setdefault(slot, []).append(node)
        order: list[NodeId] = []
        for i, node in enumerate(self.others):
            order += (*found.get(i, ()), node)
        return Scheduled(self.state.flat, (*order, *found.get(len(self.others), ())))

    def _live(self, done: Mapping[NodeId, int], needs: Mapping[NodeId, tuple[int, int]]) -> list[int]:
        """Bytes live while each other operator runs if copies back begin right before whoever takes them first."""
        late = self._with_slots([*done.items(), *((load, first) for load, (first, _) in needs.items())])
        return [late.live[late.position[node]] for node in self.others]

    def _stores(self, stores: list[NodeId]) -> dict[NodeId, int]:
        """Before which of the other operators each copy is complete."""
        maker = {store: self.place[self.graph.nodes[store].inputs[0].node] for store in stores}
        clock, found = 0.0, {}
        for store in sorted(stores, key=lambda s: (maker[s], s)):
            clock = max(clock, self.starts[maker[store] + 1]) + self._seconds(store)
            slot = bisect_left(self.starts, clock, lo=maker[store] + 1)
            found[store] = min(slot, self._needed(store))
        return found

    def _needed(self, store: NodeId) -> int:
        """The last place at which a copy has to be complete: before the first reader of what is loaded."""
        loads = self.graph.users[store]
        readers = [self.place[n] for load in loads for n in self.graph.users[load]]
        return min(readers, default=len(self.others))

    def _loads(
        self, needs: Mapping[NodeId, tuple[int, int]], done: Mapping[NodeId, int], live: list[int]
    ) -> list[tuple[NodeId, int]]:
        """Before which of the other operators each copy back begins, first ones first. Adds to `live` what is on its
        way."""
        link = self.starts[-1]
        found = []
        for load in sorted(needs, key=lambda n: (needs[n], n), reverse=True):
            first, read = needs[load]
            link = min(link, self.starts[read]) - self._seconds(load)
            slot = min(bisect_right(self.starts, link) - 1, first)
            slot = max(slot, done[self.graph.nodes[load].inputs[0].node])
            if live:
                slot = self._after_full(slot, first, self.graph.spec(Value(load)).nbytes, live)
            link = min(link, self.starts[slot])
            found.append((load, slot))
        return found[::-1]

    def _after_full(self, early: int, slot: int, nbytes: int, live: list[int]) -> int:
        """The first place from `early` on after which there is room up to `slot`; takes that room."""
        while slot > early and live[slot - 1] + nbytes <= self.most_bytes:
            slot -= 1
            live[slot] += nbytes
        return slot

    def _read(self, load: NodeId) -> tuple[int, int]:
        """The first place at which anybody takes what is loaded, and the first at which anybody reads its elements."""
        users = [self.place[n] for n in self.graph.users[load]]
        reads = []
        todo = [load]
        while todo:
            for user in self.graph.users[todo.pop()]:
                node = self.graph.nodes[user]
                if not is_view(node):
                    reads.append(self.place[user])
                elif any(self.graph.root(v) == Value(load) for v in node.inputs):
                    todo.append(user)
        return min(users), min(reads, default=min(users))

    def _seconds(self, node: NodeId) -> float:
        return self.transfer_s(self.graph.spec(Value(node)).nbytes)
