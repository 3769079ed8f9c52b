"""All that may be kept, made again or swapped across one moment of a schedule, as numbers: a variant is two rows of
flags (ADR 12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from magis.fission.contract import REGION, SLICE
from magis.ir.graph import Call, NodeId
from magis.lower.transfers import is_view
from magis.rules.base import Change
from magis.rules.remat import Rematerialise, recomputable, site
from magis.rules.swap import Swap, late_site, swappable
from magis.schedule.flat import Flat
from magis.schedule.incremental import Scheduled
from magis.schedule.transfers import with_placed_transfers
from magis.search.kernel import FEMTOSECONDS, Base, Flags, Numbers, Outcome, evaluate, scratch
from magis.search.state import MState, Step

SWAPPED_BYTES = 1 << 20
"""From which size on a tensor may be swapped: small ones take as long as their start."""

LITTLE = 1e-4
"""Which share of the peak a write may keep waiting."""


@dataclass(frozen=True, eq=False)
class Variant:
    """For each operator up to the turn, by position, whether it runs again; for each storage whether it is swapped."""

    again: Flags
    swapped: Flags

    def copy(self) -> Variant:
        """Another that can be changed."""
        return Variant(self.again.copy(), self.swapped.copy())


class Variants:
    """The variants of a state (its base): what is made up to the position `turn` of its order and taken later.

    `may_repeat` are the positions of operators that may run again, `may_swap` the storages that may be swapped."""

    def __init__(self, state: MState, turn: int) -> None:
        self.state = state
        self.scheduled, self.turn = _with_late_writes(state.scheduled, turn)
        self.arrays = _arrays(self.scheduled, self.turn, state)
        self.space = scratch(self.arrays)

    @cached_property
    def may_repeat(self) -> list[int]:
        """Positions of the operators that make decided storages and may run again."""
        flat, order, position = self.scheduled.flat, self.scheduled.order, self.scheduled.position
        frozen = _frozen(self.scheduled, self.turn)
        makers = sorted({position[flat.maker[s]] for s in range(len(flat.maker)) if self.arrays.decided[s]})
        return [p for p in makers if p not in frozen and recomputable(flat.graph.nodes[order[p]])]

    @cached_property
    def may_swap(self) -> list[int]:
        """Storages that may wait on the host."""
        return [int(s) for s in self.arrays.swappable]

    @cached_property
    def makes(self) -> dict[int, list[int]]:
        """The decided storages that each operator makes, by position."""
        found: dict[int, list[int]] = {}
        for storage, maker in enumerate(self.arrays.makers):
            if self.arrays.decided[storage]:
                found.setdefault(int(maker), []).append(storage)
        return found

    def first(self) -> Variant:
        """What the base does: whatever is taken after the turn is kept. What is not may run again for others."""
        again = np.zeros(len(self.arrays.seconds), np.uint8)
        taken_late = set(self._taken_late())
        for place in self.may_repeat:
            again[place] = not taken_late.intersection(self.makes[place])
        return Variant(again, np.zeros(len(self.arrays.nbytes), np.uint8))

    def _taken_late(self) -> Iterable[int]:
        arrays = self.arrays
        return map(int, arrays.taken_at[arrays.taken_of[self.turn + 1] :])

    def hold(self, most_bytes: int) -> None:
        """From now on copies back begin after moments at which more would be live with them (residents left out), even
        if operators have to wait for them then."""
        self.arrays = self.arrays._replace(most_bytes=most_bytes)

    def evaluate(self, variant: Variant) -> Outcome:
        """What it comes to; the order and the times are in `space` until the next one is evaluated."""
        outcome: Outcome = evaluate(self.arrays, variant.again, variant.swapped, self.space)
        return outcome

    def made(self, variant: Variant, latency_s: Callable[[Call], float]) -> MState | None:
        """The program itself, made by the rules, in the order in which it was evaluated. None when there is nothing to
        do, or a rule does not apply."""
        outcome = self.evaluate(variant)
        codes = [int(code) for code in self.space.order[: outcome.late]]
        carried = _Carried(self, variant, codes)
        if not carried.apply():
            return None
        base = self.state
        graph = carried.program.graph
        latencies = {n: base.latencies_s[n] for n in graph.nodes if n in base.latencies_s}
        for node in graph.nodes_in_order():
            if node.id not in latencies and not node.is_input:
                latencies[node.id] = latency_s(graph.call(node))
        inputs = [node.id for node in graph.inputs]
        scheduled = Scheduled.of(graph, (*inputs, *carried.order()), self.scheduled.flat.workspace_bytes)
        if base.host is not None and carried.stores:
            scheduled = with_placed_transfers(scheduled, latencies, base.host.transfer_s, self.arrays.most_bytes)
        made = MState(scheduled, latencies, (*base.history, *carried.steps), base.host)
        return made if not carried.stores or made.fits_host else None


class _Carried:
    """A variant carried out by the rules."""

    def __init__(self, variants: Variants, variant: Variant, codes: Sequence[int]) -> None:
        self.scheduled, self.turn, self.codes = variants.scheduled, variants.turn, codes
        self.arrays, self.variant = variants.arrays, variant
        self.program = variants.state.program
        self.needed = {p for p in range(self.turn + 1) if variants.space.needed[p]}
        self.idle = {p for p in range(self.turn + 1) if variants.space.idle[p]}
        self.first_take = variants.space.first_take.copy()
        self.steps: list[Step] = []
        self.copies: dict[NodeId, NodeId] = {}
        self.stores: list[tuple[NodeId, NodeId]] = []  # maker, and copy to the host
        self.loads: list[tuple[NodeId, NodeId]] = []  # copy to the host, and back

    def apply(self) -> bool:
        """Makes the program; whether all rules applied, and any did."""
        segment = {p for p in self.needed if self._repeats(p)}
        if segment:
            order = self.scheduled.order
            late = {p for p in range(self.turn + 1, len(order)) if segment.intersection(self._sources(p))}
            where = site([order[p] for p in segment], [order[p] for p in late])
            if not self._take(Rematerialise.name, where, Rematerialise().apply(self.program, where)):
                return False
        return all(self._swap(s) for s in sorted(self._swapped())) and bool(self.steps)

    def _sources(self, place: int) -> list[int]:
        arrays = self.arrays
        return [int(p) for p in arrays.sources_at[arrays.sources_of[place] : arrays.sources_of[place + 1]]]

    def _repeats(self, place: int) -> bool:
        """Whether an operator makes, or is a view of, what is made again; the others are views of what is loaded."""
        arrays = self.arrays
        if place in self._makers:
            return True
        through = arrays.through_at[arrays.sources_of[place] : arrays.sources_of[place + 1]]
        return any(self.variant.again[arrays.makers[s]] for s in through)

    @cached_property
    def _makers(self) -> set[int]:
        return {int(m) for m in self.arrays.makers if self.variant.again[m]}

    def _swapped(self) -> list[int]:
        arrays, variant = self.arrays, self.variant
        return [
            int(s)
            for s in arrays.swappable
            if variant.swapped[s] and not variant.again[arrays.makers[s]] and self.first_take[s] >= 0
        ]

    def _swap(self, storage: int) -> bool:
        flat, position = self.scheduled.flat, self.scheduled.position
        value = next(v for v, s in flat.storage_of.items() if s == storage)

        def is_late(node: NodeId) -> bool:
            return node >= len(position) or position[node] > self.turn or position[node] < 0

        where = late_site(self.program.graph, value, is_late)
        change = None if where is None else Swap().apply(self.program, where)
        if where is None or not self._take(Swap.name, where, change):
            return False
        assert change is not None
        store, load = change.added
        self.stores.append((value.node, store))
        self.loads.append((store, load))
        return True

    def _take(self, name: str, where: tuple[int, ...], change: Change | None) -> bool:
        if change is None:
            return False
        self.program = change.program
        self.steps.append((name, where))
        self.copies |= {self.copies.get(original, original): copy for copy, original in change.copies.items()}
        return True

    def order(self) -> list[NodeId]:
        """The operators as they were evaluated; copies to the host right after makers, those back right before whoever
        takes them first."""
        base, graph = self.scheduled.order, self.program.graph
        found = [base[p] for p in range(self.turn + 1) if p not in self.idle]
        found += [base[c] if c >= 0 else self.copies[base[-1 - c]] for c in self.codes]
        stores: dict[NodeId, list[NodeId]] = {}
        for maker, store in self.stores:
            stores.setdefault(maker, []).append(store)
        waiting = {load for _, load in self.loads}
        order: list[NodeId] = []
        for node in found:
            for value in graph.nodes[node].inputs if waiting else ():
                if value.node in waiting:
                    waiting.remove(value.node)
                    order.append(value.node)
            order.append(node)
            order += stores.get(node, ())
        return order


def _with_late_writes(scheduled: Scheduled, turn: int) -> tuple[Scheduled, int]:
    """The base with writes up to the turn that nobody waits for (of running statistics) right after it, where copies of
    those that read what they overwrite can still run before them; and where the turn is then."""
    flat, nodes = scheduled.flat, scheduled.flat.graph.nodes
    early = scheduled.order[: turn + 1]
    most = LITTLE * max(scheduled.live, default=0)
    writes = [n for n in early if nodes[n].writes and not flat.after[n]]
    late = [n for n in writes if sum(flat.nbytes[s] for s in flat.taken[n]) <= most]
    if not late:
        return scheduled, turn
    moved = set(late)
    order = (*(n for n in early if n not in moved), *late, *scheduled.order[turn + 1 :])
    return Scheduled(flat, order), turn - len(late)


def _frozen(scheduled: Scheduled, turn: int) -> set[int]:
    """Positions of operators up to the turn that may not run again: they, or views of what they make, would do
    something twice or make what is handed back or stays for a region; what they read is overwritten up to the turn; or
    they make something without bytes, which the arrays do not have."""
    flat, position, graph = scheduled.flat, scheduled.position, scheduled.flat.graph
    lasting = flat.kept | _taken_by_regions(flat, scheduled.order[turn + 1 :])
    found: set[int] = set()
    for place, node in enumerate(scheduled.order[: turn + 1]):
        if not recomputable(graph.nodes[node]):
            found.update({place}.union(position[flat.maker[s]] for s in _viewed(flat, node)))
        if any(flat.maker[s] == node and s in lasting for s in flat.taken[node]):
            found.add(place)
        if any(spec is not None and not spec.storage_bytes for spec in graph.nodes[node].outputs):
            found.add(place)
        if graph.nodes[node].writes:
            found.update(position[n] for n in flat.before[node])
    return found


def _viewed(flat: Flat, node: NodeId) -> Iterable[int]:
    """Storages of which a node gives views (it may have written to them)."""
    for output, spec in enumerate(flat.graph.nodes[node].outputs):
        root = flat.roots[node][output]
        if spec is not None and spec.alias_of is not None and root is not None and root[0] in flat.storage_of:
            yield flat.storage_of[root[0]]


def _arrays(scheduled: Scheduled, turn: int, state: MState) -> Base:
    """A base as arrays."""
    flat, order, position = scheduled.flat, scheduled.order, scheduled.position
    nodes = [flat.graph.nodes[n] for n in order]
    seconds = [state.latencies_s[n] for n in order]
    fixed = _taken_by_regions(flat, order[turn + 1 :])
    decided = [
        0 <= position[maker] <= turn and s not in flat.kept and s not in fixed for s, maker in enumerate(flat.maker)
    ]
    sources: list[list[tuple[int, int]]] = []
    earlier: list[list[int]] = []
    for place, node in enumerate(nodes):
        found: dict[tuple[int, int], None] = {}
        for value in node.inputs:
            root = flat.roots[value.node][value.output]
            storage = None if root is None else flat.storage_of.get(root[0])
            if storage is not None and decided[storage] and position[value.node] <= turn:
                found[position[value.node], storage] = None
        sources.append(list(found))
        waits = place > turn and node.writes
        earlier.append(sorted(position[n] for n in flat.before[node.id] if position[n] <= turn) if waits else [])
    patient = [place > turn and node.writes and not flat.after[node.id] for place, node in enumerate(nodes)]
    writers: list[list[int]] = [[] for _ in nodes]
    for place, readers in enumerate(earlier):
        for reader in readers if patient[place] else ():
            writers[reader].append(place)
    swapped = _swappable(scheduled, turn, decided) if state.host is not None else []
    transfers = np.zeros(len(flat.maker))
    for storage in swapped:
        assert state.host is not None
        transfers[storage] = state.host.transfer_s(flat.nbytes[storage])
    return Base(
        turn,
        np.array(seconds),
        _whole(seconds),
        np.array([flat.extra[n] for n in order], np.int64),
        _flags(is_view(node) for node in nodes),
        *laid(flat.taken[n] for n in order),
        np.array([position[maker] for maker in flat.maker], np.int64),
        np.array(flat.nbytes, np.int64),
        _flags(s in flat.kept for s in range(len(flat.maker))),
        _flags(decided),
        *laid([source for source, _ in each] for each in sources),
        np.array([storage for each in sources for _, storage in each], np.int64),
        *laid(earlier),
        *laid(writers),
        _flags(patient),
        _flags(node.stream is not None or node.writes for node in nodes),
        transfers,
        _whole(transfers),
        np.array(swapped, np.int64),
        0,
    )


def _taken_by_regions(flat: Flat, late: Iterable[NodeId]) -> set[int]:
    """Storages that regions take, which stay: the nodes inside read them in their own order."""
    nodes = flat.graph.nodes
    return {s for n in late if nodes[n].op == REGION for s in flat.taken[n]}


def _swappable(scheduled: Scheduled, turn: int, decided: Sequence[bool]) -> list[int]:
    """Storages read late that may wait on the host, ordered by maker."""
    flat, position, graph = scheduled.flat, scheduled.position, scheduled.flat.graph
    found = []
    for value, storage in flat.storage_of.items():
        large = decided[storage] and flat.nbytes[storage] >= SWAPPED_BYTES
        if not large or graph.nodes[value.node].op in (SLICE, REGION) or not swappable(graph, value):
            continue
        if any(position[n] > turn for n in flat.readers[storage]):
            found.append((position[value.node], storage))
    return [storage for _, storage in sorted(found)]


def laid(lists: Iterable[Sequence[int]]) -> tuple[Numbers, Numbers]:
    """Where each list begins (and, last, where they end), and all of them end to end."""
    found = list(lists)
    ends = np.cumsum([0, *(len(each) for each in found)])
    return ends.astype(np.int64), np.array(list(chain.from_iterable(found)), np.int64)


def _flags(values: Iterable[bool]) -> Flags:
    return np.array(list(values), np.uint8)


def _whole(seconds: Iterable[float]) -> Numbers:
    return np.array([round(each * FEMTOSECONDS) for each in seconds], np.int64)
