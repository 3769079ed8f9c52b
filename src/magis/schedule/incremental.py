"""Scheduling a graph, and scheduling it again after a local change (paper section 5.1, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from magis.errors import InvalidGraphError
from magis.ir.graph import Call, Graph, NodeId, Schedule
from magis.ir.structure import order_violation
from magis.schedule.baseline import eager_order
from magis.schedule.dp import PieceOrder, SearchLimits, least_peak
from magis.schedule.flat import Flat, flatten, topological
from magis.schedule.interval import IntervalLimits, interval
from magis.schedule.merge import humps, merged
from magis.schedule.partition import CUT, components, pieces
from magis.schedule.problem import Problem, problem
from magis.schedule.update import updated
from magis.sim.timeline import no_workspace


@dataclass(frozen=True, slots=True)
class SchedulingLimits:
    """Up to `whole` operators are ordered as one piece. Neighbouring pieces of a component that a cut of some loss
    separates stay one while they have at most `joined` operators. `cut`: see `magis.schedule.partition`."""

    whole: int = 14
    joined: int = 14
    cut: int = CUT
    interval: IntervalLimits = field(default=IntervalLimits())
    search: SearchLimits = field(default=SearchLimits())


@dataclass(frozen=True, slots=True)
class SchedulingReport:
    """What was done: positions [begin, end) of the old order that were re-scheduled, how many operators that made in
    the new one, the pieces with the largest one's size, sets of nodes visited, pieces whose order is not proven
    optimal because there were too many sets, and the peaks of the old and the new order of these operators, in bytes
    over what is live before the first of them."""

    begin: int
    end: int
    operators: int
    pieces: int
    largest_piece: int
    states: int
    capped_pieces: int
    given_peak: int
    peak: int


def schedule(graph: Graph, limits: SchedulingLimits = SchedulingLimits()) -> tuple[Schedule, SchedulingReport]:
    """An order of the graph's nodes with a small peak, inputs first."""
    return full_schedule(graph, eager_order(graph), limits)


def full_schedule(
    graph: Graph, given_order: Sequence[NodeId], limits: SchedulingLimits = SchedulingLimits()
) -> tuple[Schedule, SchedulingReport]:
    """The best order found, `given_order` (a valid order of all nodes) if none has a smaller peak."""
    start = Scheduled.of(graph, given_order)
    better, report = start.improved(limits)
    return better.schedule, report


def reschedule(
    old_graph: Graph,
    old_order: Sequence[NodeId],
    new_graph: Graph,
    old_nodes: Collection[NodeId],
    new_nodes: Collection[NodeId],
    limits: SchedulingLimits = SchedulingLimits(),
) -> tuple[Schedule, SchedulingReport]:
    """An order of the new graph's nodes, inputs first; only what lies around the change moves.

    `old_nodes` and `new_nodes` are those of the `GraphEdit` that made the new graph of the old one. A search keeps
    a `Scheduled` for each state instead, which spares reading the whole graphs."""
    better, report = Scheduled.of(old_graph, old_order).after_edit(new_graph, old_nodes, new_nodes, limits)
    return better.schedule, report


@dataclass(frozen=True)
class Scheduled:
    """A graph in an order of its operators."""

    flat: Flat
    order: Schedule

    @classmethod
    def of(
        cls, graph: Graph, order: Sequence[NodeId], workspace_bytes: Callable[[Call], int] = no_workspace
    ) -> Scheduled:
        """From an order of all nodes, inputs anywhere before what reads them. Raises InvalidGraphError("ordered")."""
        violation = order_violation(graph, order)
        if violation is not None:
            raise InvalidGraphError("ordered", violation)
        flat = flatten(graph, workspace_bytes)
        return cls(flat, tuple(node for node in order if flat.is_operator[node]))

    @property
    def schedule(self) -> Schedule:
        """All nodes, the graph's inputs first."""
        return (*(node.id for node in self.flat.graph.inputs), *self.order)

    @cached_property
    def position(self) -> list[int]:
        """Where each operator stands in the order, by id; -1 for other ids."""
        found = [-1] * len(self.flat.before)
        for i, node in enumerate(self.order):
            found[node] = i
        return found

    @cached_property
    def waists(self) -> list[int]:
        """Narrow-waist values in the sequence of the order."""
        return [self.flat.waists[node] for node in self.order]

    def improved(self, limits: SchedulingLimits = SchedulingLimits()) -> tuple[Scheduled, SchedulingReport]:
        """The same graph, ordered as well as possible; never worse."""
        return self._replaced(self.flat, 0, len(self.order), self.order, limits)

    def after_edit(
        self,
        graph: Graph,
        old_nodes: Collection[NodeId],
        new_nodes: Collection[NodeId],
        limits: SchedulingLimits = SchedulingLimits(),
        within: tuple[int, int] | None = None,
    ) -> tuple[Scheduled, SchedulingReport]:
        """The edited graph, its order the old one but for the interval around the change: Algorithm 2's, or the
        positions [begin, end) of `within`. Either grows if the order would not be valid otherwise."""
        flat = updated(self.flat, graph, old_nodes, new_nodes)
        touched = [self.position[node] for node in old_nodes if self.position[node] >= 0]
        if not touched:
            touched = self._beside(flat, new_nodes)
        if not touched:
            return Scheduled(flat, self.order), SchedulingReport(0, 0, 0, 0, 0, 0, 0, 0, 0)
        begin, end = within or interval(self.waists, touched, limits.interval)
        begin, end, middle = self._closed(flat, new_nodes, begin, end)
        return self._replaced(flat, begin, end, middle, limits)

    def _beside(self, flat: Flat, new_nodes: Iterable[NodeId]) -> list[int]:
        """Positions of what new nodes follow: all there is to go by when an edit changes no old node."""
        neighbours = (other for node in new_nodes for other in flat.before[node])
        return [self.position[n] for n in neighbours if n < len(self.position) and self.position[n] >= 0]

    def _closed(self, flat: Flat, new_nodes: Iterable[NodeId], begin: int, end: int) -> tuple[int, int, Schedule]:
        """The interval, grown until all before it may run before all in it, and all after it after; and a valid
        order of what lies in it."""
        size = len(self.position)
        while True:
            old = [node for node in self.order[begin:end] if node in flat.graph.nodes]
            inside = dict.fromkeys(old)
            inside.update(dict.fromkeys(n for n in sorted(new_nodes) if n >= size or self.position[n] < 0))
            early, late = begin, end
            for node in inside:
                for other in flat.before[node]:
                    if other not in inside:
                        late = max(late, self.position[other] + 1)
                for other in flat.after[node]:
                    if other not in inside:
                        early = min(early, self.position[other])
            if (early, late) == (begin, end):
                return begin, end, topological(flat, inside)
            begin, end = early, late

    def _replaced(
        self, flat: Flat, begin: int, end: int, middle: Schedule, limits: SchedulingLimits
    ) -> tuple[Scheduled, SchedulingReport]:
        """With the operators of [begin, end) replaced by those of `middle`, ordered anew."""
        if begin == 0 and end == len(self.order):
            given = problem(flat, middle, lambda node: False)
        else:
            position = self.position
            given = problem(flat, middle, lambda node: position[node] >= end)
        order, found = arrange(given, limits)
        ordered = tuple(given.nodes[i] for i in order)
        sizes = [len(piece.order) for piece in found]
        report = SchedulingReport(
            begin,
            end,
            len(middle),
            len(found),
            max(sizes, default=0),
            sum(piece.states for piece in found),
            sum(not piece.optimal for piece in found),
            given.peak(range(len(middle))),
            given.peak(order),
        )
        return Scheduled(flat, self.order[:begin] + ordered + self.order[end:]), report


def arrange(given: Problem, limits: SchedulingLimits) -> tuple[Sequence[int], list[PieceOrder]]:
    """The best order found of a problem, the given one if none has a smaller peak; and its pieces, ordered."""
    everything = list(range(len(given.nodes)))
    if len(everything) <= limits.whole:
        found = [least_peak(given, everything, 0, limits.search)] if everything else []
        return (found[0].order if found else ()), found
    found, sequences, done = [], [], 0
    for component in components(given):
        sequence: list[int] = []
        start = done
        for piece in pieces(given, component, limits.joined, limits.cut):
            ordered = least_peak(given, piece, done, limits.search)
            found.append(ordered)
            sequence += ordered.order
            for node in piece:
                done |= 1 << node
        sequences.append((sequence, start))
    candidates = [everything, [node for sequence, _ in sequences for node in sequence]]
    if len(sequences) > 1:
        candidates.append(merged([humps(order, given.steps(order, start)) for order, start in sequences]))
    return min(candidates, key=given.peak), found
