"""The scheduling problem of consecutive operators: small integers for nodes, bits for sets of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from magis.ir.graph import NodeId, Schedule
from magis.schedule.flat import Flat
from magis.schedule.waist import ancestors, descendants


@dataclass
class Problem:
    """Operators that run one after the other; node i is the i-th of a given valid order. Bytes are relative to
    what is live before the first.

    `before` and `after` are neighbours, `needs` and `allows` the same as sets. Running a node first adds `rise[i]`
    bytes (its outputs and workspace), of which `stays[i]` are there when it has run, before storages end. `ends[i]`
    are the storages it may be the last to take: (nodes that take or make it, bytes); each goes once all its nodes
    have run. `storages` are all that matter here: (maker or -1, nodes that take or make it, bytes, whether it ends
    here).
    """

    nodes: Schedule
    before: list[tuple[int, ...]]
    after: list[tuple[int, ...]]
    needs: list[int]
    allows: list[int]
    rise: list[int]
    stays: list[int]
    extra: list[int]
    ends: list[tuple[tuple[int, int], ...]]
    storages: list[tuple[int, int, int, bool]]

    @cached_property
    def above(self) -> list[int]:
        """Ancestors of each node."""
        return ancestors(self.before)

    @cached_property
    def below(self) -> list[int]:
        """Descendants of each node."""
        return descendants(self.before)

    @property
    def everything(self) -> int:
        """The set of all nodes."""
        return (1 << len(self.nodes)) - 1

    def steps(self, order: Sequence[int], done: int = 0) -> Iterator[tuple[int, int]]:
        """For each node of an order that starts when `done` have run: bytes while it runs, bytes afterwards."""
        live = 0
        for node in order:
            done |= 1 << node
            during = live + self.rise[node]
            live += self.stays[node]
            for users, nbytes in self.ends[node]:
                if not users & ~done:
                    live -= nbytes
            yield during, live

    def peak(self, order: Sequence[int], done: int = 0) -> int:
        """Most bytes while any node of the order runs."""
        return max((during for during, _ in self.steps(order, done)), default=0)


def problem(flat: Flat, nodes: Schedule, runs_later: Callable[[NodeId], bool]) -> Problem:
    """The problem of re-ordering `nodes`, given in a valid order. All other operators run before or after all
    of these: `runs_later` says which."""
    local = {node: i for i, node in enumerate(nodes)}
    before, after, needs, allows = _neighbours(flat, nodes, local)
    extra = [flat.extra[node] for node in nodes]
    found = Problem(nodes, before, after, needs, allows, extra[:], [0] * len(nodes), extra, [], [])
    ends: list[list[tuple[int, int]]] = [[] for _ in nodes]
    for storage in dict.fromkeys(storage for node in nodes for storage in flat.taken[node]):
        maker = local.get(flat.maker[storage], -1)
        nbytes, users, lasts = flat.nbytes[storage], 0, storage in flat.kept
        if maker >= 0:
            found.rise[maker] += nbytes
            found.stays[maker] += nbytes
            users = 1 << maker
        for reader in flat.readers[storage]:
            if reader in local:
                users |= 1 << local[reader]
            elif not lasts:
                lasts = runs_later(reader)
        found.storages.append((maker, users, nbytes, not lasts))
        if lasts:
            continue
        if not users & (users - 1):
            found.stays[users.bit_length() - 1] -= nbytes
            continue
        for node in members(users):
            ends[node].append((users, nbytes))
    found.ends = [tuple(pairs) for pairs in ends]
    return found


def _neighbours(
    flat: Flat, nodes: Schedule, local: Mapping[NodeId, int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int], list[int]]:
    """Which of the nodes must run before, and which after each of them; both once more as sets."""
    before: list[tuple[int, ...]] = []
    after: list[list[int]] = [[] for _ in nodes]
    needs, allows = [], [0] * len(nodes)
    for i, node in enumerate(nodes):
        earlier = [local[p] for p in flat.before[node] if p in local]
        before.append(tuple(earlier))
        bit, needed = 1 << i, 0
        for place in earlier:
            after[place].append(i)
            allows[place] |= bit
            needed |= 1 << place
        needs.append(needed)
    return before, [tuple(later) for later in after], needs, allows


def members(nodes: int) -> Iterator[int]:
    """The nodes of a set, ascending."""
    while nodes:
        low = nodes & -nodes
        yield low.bit_length() - 1
        nodes ^= low


def bits(nodes: Iterable[int]) -> int:
    """The set of some nodes."""
    found = 0
    for node in nodes:
        found |= 1 << node
    return found
