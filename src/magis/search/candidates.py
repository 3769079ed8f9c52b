"""What may be kept or computed again across one moment of a schedule, and what each choice holds in memory when."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from magis.fission.contract import REGION, SLICE
from magis.ir.graph import Graph, NodeId, Value
from magis.rules.base import Latency, Site
from magis.rules.remat import recomputable, site
from magis.rules.swap import late_site, swappable
from magis.schedule.flat import RESIDENT
from magis.schedule.incremental import Scheduled
from magis.sim.links import Host

NEVER = -1


SWAPPED_BYTES = 1 << 20
"""From which size on a tensor may be swapped: small ones take as long as their start."""
MILESTONES = 24
"""At how many moments the links are looked at."""


@dataclass(frozen=True)
class Selection:
    """Which storages are kept across the turn, which operators run again after it, and which storages wait on the
    host."""

    kept: frozenset[int]
    again: frozenset[NodeId]
    swapped: frozenset[int] = frozenset()


@dataclass
class Spans:
    """When, in positions of the base order, a storage is held by a selection: kept until `end`, or made again, or
    loaded, from `start` to `end`."""

    start: dict[int, int] = field(default_factory=dict)
    end: dict[int, int] = field(default_factory=dict)


class Candidates:
    """The storages made up to position `turn` of a state (its base) and the operators that make them.

    `early_end` is the last position up to the turn at which a storage is taken, whatever is decided; `first_late` and
    `last_late` the first and last after it, `NEVER` if there is none. `takes` are the storages that an operator reads,
    `users` the operators that read a storage, as far as they may run again; `maker` may itself run again only if it is
    in `takes`.
    """

    def __init__(
        self,
        state: Scheduled,
        latency_s: Latency,
        turn: int,
        host: Host | None = None,
    ) -> None:
        self.state, self.turn = state, turn
        flat, position, nodes = state.flat, state.position, state.flat.graph.nodes
        made = [s for s, maker in enumerate(flat.maker) if 0 <= position[maker] <= turn and s not in flat.kept]
        self.storages = made
        self.nbytes = flat.nbytes
        self.maker = flat.maker
        known = set(made)
        self.early_end: dict[int, int] = {}
        self.first_late: dict[int, int] = {}
        self.last_late: dict[int, int] = {}
        for storage in made:
            taken = sorted(position[n] for n in flat.readers[storage])
            early = [p for p in taken if p <= turn]
            late = [p for p in taken if p > turn]
            self.early_end[storage] = early[-1] if early else position[flat.maker[storage]]
            self.first_late[storage] = late[0] if late else NEVER
            self.last_late[storage] = late[-1] if late else NEVER
        self.makes: dict[NodeId, list[int]] = {}
        for storage in made:
            self.makes.setdefault(flat.maker[storage], []).append(storage)
        self.takes: dict[NodeId, list[int]] = {}
        self.users: dict[int, list[NodeId]] = {storage: [] for storage in made}
        for node in sorted(self.makes, key=lambda n: position[n]):
            reads = [s for s in flat.taken[node] if flat.maker[s] != node]
            if not recomputable(nodes[node]) or not self._made_again(reads, known):
                continue
            self.takes[node] = [s for s in reads if s in known]
            for storage in self.takes[node]:
                self.users[storage].append(node)
        self.latency_s = {node: latency_s(node) for node in self.takes}
        self.transfers_s: dict[int, float] = {}
        self.host_bytes = 0 if host is None else host.memory_bytes
        if host is not None:
            self.transfers_s = {s: host.transfer_s(self.nbytes[s]) for s in made if self._may_wait_on_the_host(s)}
        self.starts_s = [0.0, *accumulate(latency_s(node) for node in state.order)] if self.transfers_s else []

    def _may_wait_on_the_host(self, storage: int) -> bool:
        if self.last_late[storage] == NEVER or self.nbytes[storage] < SWAPPED_BYTES:
            return False
        graph = self.state.flat.graph
        return graph.nodes[self.maker[storage]].op not in (SLICE, REGION) and swappable(graph, self.value_of[storage])

    @cached_property
    def value_of(self) -> Mapping[int, Value]:
        """The value that owns each storage."""
        return {storage: value for value, storage in self.state.flat.storage_of.items()}

    def _made_again(self, reads: Iterable[int], known: Collection[int]) -> bool:
        """Whether all that an operator reads is a candidate or handed back, and so there after the turn."""
        return all(storage in known or storage in self.state.flat.kept for storage in reads)

    def everything_kept(self) -> Selection:
        """What the base itself does."""
        return Selection(frozenset(s for s in self.storages if self.last_late[s] != NEVER), frozenset())

    def spans(self, chosen: Selection) -> Spans:
        """When storages are held under a selection; for a storage or operator that it does not choose, when they would
        be if it chose that one too."""
        need: dict[NodeId, int] = {}
        spans = Spans()
        for node in reversed(self.takes):
            starts = []
            for storage in self.makes[node]:
                self._span(storage, chosen, need, spans)
                wanted = storage not in chosen.kept | chosen.swapped or node not in chosen.again
                if wanted and spans.start[storage] != NEVER:
                    starts.append(spans.start[storage])
            need[node] = min(starts, default=NEVER)
        for storage in self.storages:
            if storage not in spans.end:
                self._span(storage, chosen, need, spans)
        return spans

    def _span(self, storage: int, chosen: Selection, need: dict[NodeId, int], spans: Spans) -> None:
        """From the first to the last position after the turn at which anybody needs a storage."""
        when = [need[n] for n in self.users[storage] if n in chosen.again and need[n] != NEVER]
        if not when and self.first_late[storage] == NEVER:
            when = [need[n] for n in self.users[storage] if need[n] != NEVER]
        if self.first_late[storage] != NEVER:
            when += [self.first_late[storage], self.last_late[storage]]
        spans.start[storage] = min(when, default=NEVER)
        spans.end[storage] = max(when, default=NEVER)

    def undecided_bytes(self, place: int) -> int:
        """Bytes live in the base at a position that no selection changes."""
        held = sum(
            self.nbytes[s]
            for s in self.storages
            if self.early_end[s] < place <= max(self.last_late[s], self.early_end[s])
        )
        return self.state.live[place] - held

    def held(self, place: int, spans: Spans) -> tuple[list[int], list[int]]:
        """Storages that occupy memory at a position if they are kept, and if they are made again."""
        kept = [s for s in self.storages if self.early_end[s] < place <= spans.end[s]]
        again = [s for s in self.storages if NEVER != spans.start[s] <= place <= spans.end[s]]
        return kept, again

    def links(self, spans: Spans) -> Iterator[tuple[list[int], float]]:
        """Storages that must pass a link within some seconds, if they are swapped: to the host between an operator that
        makes them and the turn; back between the turn and an operator that reads them."""
        position = self.state.position
        turn_s, end_s = self.starts_s[self.turn], self.starts_s[self.turn + 1]
        made = sorted(self.transfers_s, key=lambda s: position[self.maker[s]])
        for first in _milestones(len(made)):
            since_s = self.starts_s[position[self.maker[made[first]]] + 1]
            yield made[first:], max(turn_s - since_s, 0.0)
        needed = {s: spans.start[s] if spans.start[s] != NEVER else self.first_late[s] for s in made}
        read = sorted(made, key=needed.__getitem__)
        for last in _milestones(len(read)):
            yield read[: last + 1], max(self.starts_s[needed[read[last]]] - end_s, 0.0)

    def swap_site(self, storage: int, graph: Graph) -> Site | None:
        """Where `Swap` applies for a storage, to what became of the base's graph when what runs again was carried out;
        None when nobody reads it late."""
        position = self.state.position

        def is_late(node: NodeId) -> bool:
            return node >= len(position) or position[node] > self.turn or position[node] < 0

        return late_site(graph, self.value_of[storage], is_late)

    def site(self, chosen: Selection) -> Site:
        """Where `Rematerialise` applies to make the base hold what is chosen; empty when nothing is dropped."""
        flat, graph, position = self.state.flat, self.state.flat.graph, self.state.position
        dropped = {s for node in chosen.again for s in self.makes[node] if s not in chosen.kept | chosen.swapped}
        segment: set[NodeId] = set()
        readers = {n for s in dropped for n in flat.readers[s] if position[n] > self.turn}
        todo: list[NodeId] = sorted(readers)
        while todo:
            for producer in self._producers(todo.pop(), dropped):
                if producer not in segment and position[producer] <= self.turn:
                    segment.add(producer)
                    todo.append(producer)
        if not segment or not all(recomputable(graph.nodes[node]) for node in segment):
            return ()
        reading = {n for n in readers if any(value.node in segment for value in graph.nodes[n].inputs)}
        return site(segment, reading)

    def _producers(self, node: NodeId, storages: set[int]) -> Iterator[NodeId]:
        """Nodes from which an operator takes any of these storages, directly or through views."""
        flat = self.state.flat
        for value in flat.graph.nodes[node].inputs:
            root = flat.roots[value.node][value.output]
            if root is not None and flat.storage_of.get(root[0], RESIDENT) in storages:
                yield value.node


def _milestones(count: int) -> list[int]:
    """Some places of a sequence of that length, all of a short one."""
    return sorted({place * count // MILESTONES for place in range(MILESTONES)}) if count else []
