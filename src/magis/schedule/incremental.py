"""Scheduling a graph, and scheduling it again after a local change (paper section 5.1, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from magis.errors import InvalidGraphError
from magis.ir.graph import Call, Graph, NodeId, Schedule
from magis.ir.structure import order_violation
from magis.schedule.arrange import SchedulingLimits, Work, arrange
from magis.schedule.baseline import eager_order
from magis.schedule.dp import SearchLimits
from magis.schedule.flat import Flat, flatten, live_bytes, topological
from magis.schedule.interval import interval
from magis.schedule.placement import placed, waits
from magis.schedule.problem import problem
from magis.schedule.update import updated, with_readers_through_views
from magis.schedule.waist import ancestors, descendants, narrow_waist
from magis.sim.timeline import no_workspace

LIMITS = SchedulingLimits()


@dataclass(frozen=True, slots=True)
class SchedulingReport:
    """What was done: the positions [begin, end) of the old order that were re-scheduled and how many operators lie
    there in the new one; peaks of the whole order in bytes, residents included, before anything moved and in the end;
    and the work it took."""

    begin: int
    end: int
    operators: int
    given_peak_bytes: int
    peak_bytes: int
    work: Work


def schedule(graph: Graph, limits: SchedulingLimits = LIMITS) -> tuple[Schedule, SchedulingReport]:
    """An order of the graph's nodes with a small peak, inputs first."""
    return full_schedule(graph, eager_order(graph), limits)


def full_schedule(
    graph: Graph, given_order: Sequence[NodeId], limits: SchedulingLimits = LIMITS
) -> tuple[Schedule, SchedulingReport]:
    """The best order found, `given_order` (a valid order of all nodes) if none has a smaller peak. Up to
    `limits.whole` operators: the least peak, unless the report says that a piece was too large."""
    better, report = Scheduled.of(graph, given_order).improved(limits)
    return better.schedule, report


def reschedule(
    old_graph: Graph,
    old_order: Sequence[NodeId],
    new_graph: Graph,
    old_nodes: Collection[NodeId],
    new_nodes: Collection[NodeId],
    limits: SchedulingLimits = LIMITS,
) -> tuple[Schedule, SchedulingReport]:
    """An order of the new graph's nodes, inputs first; only what lies around the change, or around the peak, moves.

    `old_nodes` and `new_nodes` are those of the `GraphEdit` that made the new graph of the old one. A search keeps
    a `Scheduled` for each state instead, which spares reading the whole graphs."""
    better, report = Scheduled.of(old_graph, old_order).after_edit(new_graph, old_nodes, new_nodes, limits)
    return better.schedule, report


@dataclass(frozen=True, eq=False)
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
    def live(self) -> list[int]:
        """Bytes live while each operator runs, residents left out."""
        return live_bytes(self.flat, self.order)

    @property
    def peak_bytes(self) -> int:
        """Everything live at the worst moment, residents included."""
        return self.flat.resident_bytes + max(self.live, default=0)

    @cached_property
    def position(self) -> list[int]:
        """Where each operator stands in the order, by id; -1 for other ids."""
        found = [-1] * len(self.flat.before)
        for i, node in enumerate(self.order):
            found[node] = i
        return found

    @cached_property
    def waists(self) -> list[int]:
        """Narrow-waist value of each operator, in the order's sequence."""
        earlier = [[self.position[other] for other in self.flat.before[node]] for node in self.order]
        return narrow_waist(ancestors(earlier), descendants(earlier))

    def improved(self, limits: SchedulingLimits = LIMITS) -> tuple[Scheduled, SchedulingReport]:
        """The same graph, ordered as well as possible; never worse."""
        better, work = self.reordered(0, len(self.order), limits)
        better, more = better.lowered(limits)
        size = len(self.order)
        return better, SchedulingReport(0, size, size, self.peak_bytes, better.peak_bytes, work + more)

    def after_edit(
        self,
        graph: Graph,
        old_nodes: Collection[NodeId],
        new_nodes: Collection[NodeId],
        limits: SchedulingLimits = LIMITS,
        within: tuple[int, int] | None = None,
        thorough: bool = True,
    ) -> tuple[Scheduled, SchedulingReport]:
        """The edited graph, its order the old one but for the interval around the change: Algorithm 2's, or the
        positions [begin, end) of `within` (either grows if the order would not be valid otherwise); then but for
        what lies around the peak, farther away if that has grown and `thorough` is asked for."""
        flat = updated(self.flat, graph, old_nodes, new_nodes)
        old = self.with_late_writes(flat, new_nodes)
        moved = with_readers_through_views(self.flat, graph, old_nodes)  # they may read what is overwritten
        begin, end = within or old._interval(flat, moved, new_nodes, limits)
        begin, end, middle = old._closed(flat, new_nodes, begin, end)
        start = Scheduled(flat, old.order[:begin] + middle + old.order[end:])
        better, work = start, Work()
        if max(start.live[begin : begin + len(middle)], default=-1) == max(start.live, default=0):
            better, work = start.reordered(begin, begin + len(middle), limits)  # elsewhere it lowers no peak
        better, more = better.lowered(limits, thorough=thorough and better.peak_bytes > self.peak_bytes)
        return better, SchedulingReport(begin, end, len(middle), start.peak_bytes, better.peak_bytes, work + more)

    def edited(self, graph: Graph, old_nodes: Collection[NodeId], new_nodes: Collection[NodeId]) -> Scheduled:
        """The edited graph in the old order, what was added right before its first reader (see `placed`)."""
        flat = updated(self.flat, graph, old_nodes, new_nodes)
        kept = [node for node in self.order if node in graph.nodes]
        return Scheduled(flat, placed(flat, kept, self._added(new_nodes)))

    def _added(self, new_nodes: Iterable[NodeId]) -> list[NodeId]:
        """The new nodes that are not in this order, by id."""
        position = self.position
        return [node for node in sorted(new_nodes) if node >= len(position) or position[node] < 0]

    def with_late_writes(self, flat: Flat, new_nodes: Iterable[NodeId]) -> Scheduled:
        """This order, but for writes that have to wait for an added node of the edited graph `flat`: they move to
        where that will run. Left where they are, they would pull it ahead of them."""
        added = self._added(new_nodes)
        new = set(added)
        candidates = {later for node in added for later in flat.after[node]} - new
        late = {node for node in candidates if waits(flat, node, new) and not self.flat.after[node]}
        if not late:
            return self
        kept = [node for node in self.order if node in flat.graph.nodes]
        followers: dict[NodeId, list[NodeId]] = {}
        anchor = None
        for node in placed(flat, kept, added):
            if node in late and anchor is not None:
                followers.setdefault(anchor, []).append(node)
            elif node in self.flat.graph.nodes:
                anchor = node
        moved = {node for nodes in followers.values() for node in nodes}
        return Scheduled(
            self.flat,
            tuple(after for node in self.order if node not in moved for after in (node, *followers.get(node, ()))),
        )

    def reordered(
        self, begin: int, end: int, limits: SchedulingLimits = LIMITS, search: SearchLimits | None = None
    ) -> tuple[Scheduled, Work]:
        """With the operators at positions [begin, end) in the best order found; itself if that is no better there.
        `search` is `limits.search` unless given."""
        position = self.position
        given = problem(self.flat, self.order[begin:end], lambda node: position[node] >= end)
        before = [during for during, _ in given.steps(range(end - begin))]
        order, work = arrange(given, limits, search or limits.search)
        now = [during for during, _ in given.steps(order)]
        if max(now, default=0) >= max(before, default=0):
            return self, work
        nodes = tuple(given.nodes[i] for i in order)
        better = Scheduled(self.flat, self.order[:begin] + nodes + self.order[end:])
        base = self.live[begin] - before[0]
        better.__dict__["live"] = self.live[:begin] + [base + during for during in now] + self.live[end:]
        return better, work

    def lowered(self, limits: SchedulingLimits = LIMITS, thorough: bool = True) -> tuple[Scheduled, Work]:
        """With a lower peak, as often as re-ordering around the first worst moment gives one: from the first to the
        last operator that is independent of the one that runs then, and a margin; if `thorough`, then as far as
        `limits.reach` allows."""
        state, work = self, Work()
        for margin in limits.margins if thorough else limits.margins[:1]:
            better: Scheduled | None = state
            while better is not None:
                state = better
                better, more = state._lower(margin, limits)
                work += more
        return state, work

    def _lower(self, margin: int, limits: SchedulingLimits) -> tuple[Scheduled | None, Work]:
        """With a lower first worst moment, if one is found."""
        if not self.order:
            return None, Work()
        worst = self.live.index(max(self.live))
        first, last = self._independent(worst, limits.reach)
        if first == last:
            return None, Work()  # what has run by then is the same in all orders
        begin = max(first - margin, worst - limits.reach, 0)
        end = min(last + margin, worst + limits.reach, len(self.order) - 1) + 1
        search = replace(limits.near_peak, gain=max(self.peak_bytes // limits.least_gain, 1))
        better, work = self.reordered(begin, end, limits, search)
        return (None if better is self else better), work

    def _independent(self, place: int, reach: int) -> tuple[int, int]:
        """First and last position, at most `reach` away, of an operator that is independent of the one at `place`;
        `place` itself on a side where there is none."""
        order, before, after = self.order, self.flat.before, self.flat.after
        first = last = place
        above, below = {order[place]}, {order[place]}
        for i in range(place - 1, max(place - reach, 0) - 1, -1):
            if above.isdisjoint(after[order[i]]):
                first = i
            else:
                above.add(order[i])
        for i in range(place + 1, min(place + reach + 1, len(order))):
            if below.isdisjoint(before[order[i]]):
                last = i
            else:
                below.add(order[i])
        return first, last

    def _interval(
        self, flat: Flat, old_nodes: Iterable[NodeId], new_nodes: Iterable[NodeId], limits: SchedulingLimits
    ) -> tuple[int, int]:
        """Algorithm 2's. If no old node was touched, new ones are taken to be beside what they follow."""
        position = self.position
        touched = [position[node] for node in old_nodes if position[node] >= 0]
        if not touched:
            beside = {other for node in new_nodes for other in flat.before[node] if other < len(position)}
            touched = [position[node] for node in beside if position[node] >= 0]
        return interval(self.waists, touched, limits.interval) if touched else (0, 0)

    def _closed(self, flat: Flat, new_nodes: Iterable[NodeId], begin: int, end: int) -> tuple[int, int, Schedule]:
        """The interval, grown until all before it may run before all in it, and all after it after; and a valid
        order of what lies in it."""
        added = self._added(new_nodes)
        while True:
            old = [node for node in self.order[begin:end] if node in flat.graph.nodes]
            inside = dict.fromkeys((*old, *added))
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
