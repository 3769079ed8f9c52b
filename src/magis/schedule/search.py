"""Walks over the sets of nodes of a piece that have run, forwards or backwards (ADR 7).

Live bytes are a submodular function of the set: what a node adds is never more when more has run. Hence a short cut
that loses nothing: a node, or a chain of nodes each of which waited for the one before, that can run within the level
and leaves no more live than it found, runs at once and no alternative to it is looked at. The same holds for what can
run last, seen backwards: a piece that piles up results has few sets that way, one that uses them up has few forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from magis.schedule.problem import Problem, bits, members

State = tuple[int, int, int]  # nodes that have run (backwards: that are undone), nodes that can, bytes live
Step = tuple[tuple[int, ...], State]
CHAIN = 8
"""Most links of a chain that runs at once."""


class Moves:
    """One step forwards or backwards. Sets hold nodes of the piece only; `done` ran before it."""

    def __init__(self, given: Problem, piece: Sequence[int], done: int, backward: bool) -> None:
        self.rise, self.stays, self.ends = given.rise, given.stays, given.ends
        self.backward = backward
        self.done = done
        self.goal = bits(piece)
        waits_for = given.allows if backward else given.needs
        self.next = given.before if backward else given.after
        self.needs = [-1] * len(given.nodes)  # -1, all bits, for what is no part of the piece: never ready
        ready = 0
        for node in piece:
            self.needs[node] = waits_for[node] & self.goal
            if not self.needs[node]:
                ready |= 1 << node
        live = 0
        if backward:
            *_, (_, live) = given.steps(piece, done)
        self.first: State = (0, ready, live)

    def run(self, state: State, node: int) -> tuple[int, State]:
        """Bytes while the node runs, and the state that follows (backwards: that it was run in)."""
        moved, ready, live = state
        bit = 1 << node
        if self.backward:
            ran = self.done | (self.goal & ~moved)
            live -= self.stays[node]
            for users, nbytes in self.ends[node]:
                if users & ran == users:
                    live += nbytes
            during = live + self.rise[node]
            moved |= bit
        else:
            during = live + self.rise[node]
            moved |= bit
            ran = self.done | moved
            live += self.stays[node]
            for users, nbytes in self.ends[node]:
                if users & ran == users:
                    live -= nbytes
        ready ^= bit
        needs = self.needs
        for following in self.next[node]:
            if needs[following] & moved == needs[following]:
                ready |= 1 << following
        return during, (moved, ready, live)

    def order(self, reached: dict[int, tuple[int, tuple[int, ...]]]) -> tuple[int, ...]:
        """The order that led to the goal."""
        parts = []
        moved = self.goal
        while moved:
            moved, nodes = reached[moved]
            parts.append(nodes)
        order = tuple(node for nodes in reversed(parts) for node in nodes)
        return order[::-1] if self.backward else order

    def successors(self, state: State, level: int) -> tuple[list[Step], int | None]:
        """What can follow within the level, the best last, and the least peak of what exceeds it; if something can
        run at once, only that."""
        _, ready, live = state
        found: list[tuple[int, int, State]] = []
        exceeding: int | None = None
        while ready:
            node = (ready & -ready).bit_length() - 1
            ready ^= 1 << node
            during, following = self.run(state, node)
            if during > level:
                exceeding = during if exceeding is None else min(exceeding, during)
                continue
            if following[2] <= live:
                return [((node,), following)], None
            found.append((following[2], node, following))
        for _, node, following in found:
            chain = self._chain(state, node, following, level)
            if chain is not None:
                return [chain], None
        found.sort(key=lambda item: item[:2], reverse=True)
        return [((node,), following) for _, node, following in found], exceeding

    def _chain(self, state: State, node: int, following: State, level: int) -> Step | None:
        """The chain of nodes that `node` sets free, one after the other, up to where no more is live than before
        it; None if it does not get there."""
        nodes = [node]
        fresh = following[1] & ~state[1]
        for _ in range(CHAIN):
            best: tuple[int, int, State] | None = None
            for free in members(fresh):
                during, candidate = self.run(following, free)
                if during <= level and (best is None or candidate[2] < best[0]):
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


class Walk:
    """All sets that can be reached without exceeding a level, depth first, fewest live bytes first.

    When `exhausted`, no order stays within the level, and `exceeding` is the least that one must reach.
    """

    def __init__(self, moves: Moves, level: int) -> None:
        self.moves = moves
        self.level = level
        self.reached: dict[int, tuple[int, tuple[int, ...]]] = {0: (-1, ())}
        self.exceeding = 1 << 62
        self.exhausted = False
        self._stack = [moves.first]

    def proceed(self, states: int) -> tuple[int, ...] | None:
        """Goes on until so many sets have been reached; an order within the level once there is one."""
        stack, reached = self._stack, self.reached
        while stack and len(reached) < states:
            state = stack.pop()
            if state[0] == self.moves.goal:
                return self.moves.order(reached)
            steps, exceeding = self.moves.successors(state, self.level)
            if exceeding is not None and exceeding < self.exceeding:
                self.exceeding = exceeding
            for nodes, following in steps:
                if following[0] not in reached:
                    reached[following[0]] = state[0], nodes
                    stack.append(following)
        self.exhausted = not stack
        return None


def beam(moves: Moves, between: tuple[int, int], width: int) -> tuple[int, ...] | None:
    """A good order, its peak under the second of `between`, if one is found. Of all sets of the same size those with
    the least peak, then the fewest live bytes, go on. The first of `between` is a lower bound of the peak."""
    layers: list[dict[int, tuple[int, State]]] = [{} for _ in range(moves.goal.bit_count() + 1)]
    parents: dict[int, tuple[int, tuple[int, ...]]] = {}
    layers[0][0] = between[0], moves.first
    for size, layer in enumerate(layers):
        ranked = sorted(layer.values(), key=lambda item: (item[0], item[1][2], item[1][0]))
        for level, state in ranked[:width]:
            for peak, nodes, following in _widened(moves, level, state):
                wider = layers[size + len(nodes)]
                known = wider.get(following[0])
                if peak < between[1] and (known is None or peak < known[0]):
                    wider[following[0]] = peak, following
                    parents[following[0]] = state[0], nodes
        layer.clear()
    return moves.order(parents) if moves.goal in parents else None


def _widened(moves: Moves, level: int, state: State) -> list[tuple[int, tuple[int, ...], State]]:
    """All that can follow a state, with the peak reached."""
    steps, exceeding = moves.successors(state, level)
    found = [(level, nodes, following) for nodes, following in steps]
    if exceeding is None:
        return found
    for node in members(state[1]):
        during, following = moves.run(state, node)
        if during > level:
            found.append((during, (node,), following))
    return found
