"""The order of a piece with the least peak: dynamic programming over sets of nodes that have run (paper 5.1).

A state is a set; its value the least peak with which it can be reached; what is live follows from the set. States are
visited by value, least first, so that the first visit of the whole piece is optimal. Live bytes are a submodular
function of the set, hence two short cuts that lose nothing (ADR 7): no state below the *level*, a lower bound of the
peak, needs a second visit; and what can run below the level without leaving more live than before runs at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from magis.schedule.problem import Problem, members

State = tuple[int, int, int]  # nodes that have run, nodes that can, bytes live


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """When a piece's dynamic programming has visited `states` sets, a beam of `beam` sets takes over. A chain
    that runs at once has at most `chain` links."""

    states: int = 16384
    beam: int = 24
    chain: int = 8


@dataclass(frozen=True, slots=True)
class PieceOrder:
    """An order, its peak in bytes over what was live before, the number of sets visited, and whether the peak is
    proven to be the least."""

    order: tuple[int, ...]
    peak: int
    states: int
    optimal: bool


def least_peak(given: Problem, piece: Sequence[int], done: int, limits: SearchLimits) -> PieceOrder:
    """The best order of `piece` when `done` have run; `piece` itself, a valid order, if none is better."""
    bound = given.peak(piece, done)
    level = lower_bound(given, piece, done)
    if level >= bound:
        return PieceOrder(tuple(piece), bound, 0, True)
    search = _Search(given, piece, done, limits, level, bound)
    order = search.best_first()
    optimal = order is not None or not search.capped
    if search.capped:
        order = search.beam()
    if order is None:
        return PieceOrder(tuple(piece), bound, len(search.reached), optimal)
    return PieceOrder(order, given.peak(order, done), len(search.reached), optimal)


def lower_bound(given: Problem, piece: Sequence[int], done: int) -> int:
    """Bytes over what is live before that no order can do without: the most, over all nodes, of what must be
    live while the node runs."""
    inside = 0
    for node in piece:
        inside |= 1 << node
    base, sets, weights = 0, [], []
    for maker, users, nbytes, ends in given.storages:
        here = users & inside
        if not here:
            continue
        made_here = maker >= 0 and inside >> maker & 1
        needed = (given.below[maker] | 1 << maker) & inside if made_here else inside
        if ends and not users & ~(done | inside):
            last = 0
            for node in members(here):
                last |= given.above[node] | 1 << node
            needed &= last
        elif not made_here:
            continue
        base -= 0 if made_here else nbytes
        sets.append(needed)
        weights.append(nbytes)
    needed_bytes = _sums(sets, weights, len(given.nodes))
    return base + max(int(needed_bytes[node]) + given.extra[node] for node in piece)


def _sums(sets: Sequence[int], weights: Sequence[int], size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """For each of `size` nodes, the summed weights of the sets that hold it (exact below 2^53)."""
    width = size // 8 + 1
    total = np.zeros(width * 8)
    for start in range(0, len(sets), 256):
        rows = b"".join(nodes.to_bytes(width, "little") for nodes in sets[start : start + 256])
        packed = np.frombuffer(rows, np.uint8).reshape(-1, width)
        total += np.asarray(weights[start : start + 256], np.float64) @ np.unpackbits(packed, 1, bitorder="little")
    return total


class _Search:
    """States of one piece. `level`: no order has a smaller peak; `bound`: the peak to beat."""

    def __init__(
        self, given: Problem, piece: Sequence[int], done: int, limits: SearchLimits, level: int, bound: int
    ) -> None:
        self.given, self.piece, self.limits, self.level, self.bound = given, piece, limits, level, bound
        self.start = self.goal = done
        for node in piece:
            self.goal |= 1 << node
        self.after = {node: [s for s in given.after[node] if self.goal >> s & 1] for node in piece}
        self.reached: dict[int, tuple[int, tuple[int, ...]]] = {done: (-1, ())}
        self.later: list[tuple[int, int, State, int]] = []
        self.number = count()
        self.capped = False
        ready = 0
        for node in piece:
            if not given.needs[node] & ~done:
                ready |= 1 << node
        self.first: State = (done, ready, 0)

    def best_first(self) -> tuple[int, ...] | None:
        """An order of least peak; None if none beats the bound, or if there are too many states (`capped`)."""
        stack = [self.first]
        while True:
            if self._exhaust(stack):
                return self._order(self.reached)
            if self.capped or not self.later:
                return None
            self.level = self.later[0][0]
            while self.later and self.later[0][0] <= self.level:
                _, _, state, node = heapq.heappop(self.later)
                self._visit(stack, state[0], self._run(state, node), (node,))

    def _exhaust(self, stack: list[State]) -> bool:
        """Visits all that can be reached without exceeding the level; whether that is the whole piece."""
        while stack:
            state = stack.pop()
            if state[0] == self.goal:
                return True
            if len(self.reached) > self.limits.states:
                self.capped = True
                return False
            for nodes, following in self._successors(state, defer=True):
                self._visit(stack, state[0], following, nodes)
        return False

    def _visit(self, stack: list[State], parent: int, state: State, nodes: tuple[int, ...]) -> None:
        if state[0] not in self.reached:
            self.reached[state[0]] = parent, nodes
            stack.append(state)

    def _run(self, state: State, node: int) -> State:
        done, ready, live = state
        done |= 1 << node
        ready ^= 1 << node
        live += self.given.stays[node]
        for users, nbytes in self.given.ends[node]:
            if users & done == users:
                live -= nbytes
        needs = self.given.needs
        for later in self.after[node]:
            if needs[later] & done == needs[later]:
                ready |= 1 << later
        return done, ready, live

    def _successors(self, state: State, defer: bool) -> list[tuple[tuple[int, ...], State]]:
        """What can follow, the best last; only one if it can run at once. What exceeds the level waits in
        `later` if `defer`, and is left out otherwise."""
        _, ready, live = state
        found: list[tuple[int, int, State]] = []
        waiting = []
        for node in members(ready):
            during = live + self.given.rise[node]
            if during > self.level:
                if during < self.bound:
                    waiting.append((during, node))
                continue
            following = self._run(state, node)
            if following[2] <= live:
                return [((node,), following)]
            found.append((following[2], node, following))
        for _, node, following in found:
            chain = self._chain(state, node, following)
            if chain is not None:
                return [chain]
        if defer:
            for during, node in waiting:
                heapq.heappush(self.later, (during, next(self.number), state, node))
        found.sort(key=lambda item: item[:2], reverse=True)
        return [((node,), following) for _, node, following in found]

    def _chain(self, state: State, node: int, following: State) -> tuple[tuple[int, ...], State] | None:
        """The chain of nodes that `node` sets free, one after the other, up to where no more is live than
        before it; None if it does not get there."""
        nodes = [node]
        fresh = following[1] & ~state[1]
        for _ in range(self.limits.chain):
            best: tuple[int, int, State] | None = None
            for free in members(fresh):
                if following[2] + self.given.rise[free] > self.level:
                    continue
                candidate = self._run(following, free)
                if best is None or candidate[2] < best[0]:
                    best = candidate[2], free, candidate
            if best is None:
                return None
            # a node that leaves less live goes first and keeps its siblings; another is the chain's next link
            shrinks = best[0] <= following[2]
            fresh = (fresh if shrinks else 0) & ~(1 << best[1]) | best[2][1] & ~following[1]
            following = best[2]
            nodes.append(best[1])
            if following[2] <= state[2]:
                return tuple(nodes), following
        return None

    def beam(self) -> tuple[int, ...] | None:
        """A good order: of all sets of the same size, those with the least peak, then the fewest bytes live, go
        on. None if none beats the bound."""
        least = self.level
        layers: list[dict[int, tuple[int, State]]] = [{} for _ in range(len(self.piece) + 1)]
        parents: dict[int, tuple[int, tuple[int, ...]]] = {self.start: (-1, ())}
        layers[0][self.start] = least, self.first
        for size, layer in enumerate(layers):
            ranked = sorted(layer.values(), key=lambda item: (item[0], item[1][2], item[1][0]))
            for peak, state in ranked[: self.limits.beam]:
                self._widen(layers, parents, size, peak, state)
            layer.clear()
        return self._order(parents) if self.goal in parents else None

    def _widen(
        self,
        layers: list[dict[int, tuple[int, State]]],
        parents: dict[int, tuple[int, tuple[int, ...]]],
        size: int,
        peak: int,
        state: State,
    ) -> None:
        """Adds what follows a state of the beam to the layers of larger sets."""
        self.level = peak
        options = [(peak, nodes, following) for nodes, following in self._successors(state, defer=False)]
        if not (len(options) == 1 and options[0][2][2] <= state[2]):
            for node in members(state[1]):
                during = state[2] + self.given.rise[node]
                if peak < during < self.bound:
                    options.append((during, (node,), self._run(state, node)))
        for value, nodes, following in options:
            layer = layers[size + len(nodes)]
            known = layer.get(following[0])
            if known is None or value < known[0]:
                layer[following[0]] = value, following
                parents[following[0]] = state[0], nodes

    def _order(self, reached: dict[int, tuple[int, tuple[int, ...]]]) -> tuple[int, ...]:
        parts = []
        state = self.goal
        while state != self.start:
            state, nodes = reached[state]
            parts.append(nodes)
        return tuple(node for nodes in reversed(parts) for node in nodes)
