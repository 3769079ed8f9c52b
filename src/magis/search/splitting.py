"""States of a program with regions: each region and what is around it planned as a graph of its own (ADR 9)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from magis.fission.contract import HAND_OUT, REGION, SLICE, RegionCost, body, contracted, expanded
from magis.fission.parts import CannotSplitError, Infer, Part, Scope, part
from magis.fission.region import check
from magis.fission.tree import Fission, Program, sections
from magis.ir.graph import Call, Graph, NodeId, Schedule
from magis.rules.registry import rules
from magis.rules.remat import Rematerialise
from magis.rules.swap import Swap
from magis.schedule.baseline import eager_order
from magis.schedule.incremental import Scheduled
from magis.search.state import MState, Step
from magis.sim.links import Host, no_transfer
from magis.sim.region import region_cost

Orders: TypeAlias = Mapping[NodeId, Schedule]
"""For each outermost region, by its least node, the order of its nodes."""


@dataclass(frozen=True)
class Prices:
    """What operators cost, those that stand for regions included, and how types of resized calls are inferred;
    `host`: see `MState`."""

    call_latency_s: Callable[[Call], float]
    call_workspace_bytes: Callable[[Call], int]
    infer: Infer
    host: Host | None = None

    def latency_s(self, call: Call) -> float:
        """Seconds of a call."""
        if call.op == REGION:
            return float(call.args[1])  # type: ignore[arg-type]
        return 0.0 if call.op in (SLICE, HAND_OUT) else self.call_latency_s(call)

    def workspace_bytes(self, call: Call) -> int:
        """Bytes beyond inputs and results."""
        if call.op == REGION:
            return int(call.args[0])  # type: ignore[arg-type]
        return 0 if call.op in (SLICE, HAND_OUT) else self.call_workspace_bytes(call)


@dataclass(frozen=True, eq=False)
class SplitState:
    """A program with regions in an order: `top` is the contracted graph's state, `orders` those inside. `history`
    leads from the captured step to the program."""

    program: Program
    orders: Orders
    costs: Mapping[NodeId, RegionCost]
    top: MState
    history: tuple[Step, ...] = ()

    @property
    def latency_s(self) -> float:
        """Seconds of the step."""
        return self.top.latency_s

    @property
    def peak_bytes(self) -> int:
        """Everything live at the worst moment."""
        return self.top.peak_bytes

    @property
    def schedule(self) -> Schedule:
        """All nodes in order, inputs first."""
        return expanded(self.top.schedule, self.orders)


@dataclass
class Splitter:
    """Makes states of programs with regions. `wide`: sums of half-precision parts are kept in float32."""

    prices: Prices
    wide: bool = True

    def state(
        self,
        program: Program,
        history: tuple[Step, ...] = (),
        orders: Orders | None = None,
        top: Schedule | None = None,
    ) -> SplitState:
        """The state of a program: regions in the given orders, else in eager's; the contracted graph in the order
        `top` (of its own nodes), else in eager's. Raises CannotSplitError."""
        graph = program.graph
        given = dict(orders or {})
        rank = {node: i for i, node in enumerate(eager_order(graph))}
        costs: dict[NodeId, RegionCost] = {}
        regions = []
        for region in program.enabled:
            key = min(region.region)
            if set(given.get(key, ())) != region.region:
                check_tree(graph, region)
                given[key] = grouped(graph, region, sorted(region.region, key=rank.__getitem__))
            costs[key] = self._cost(region, Scope.whole(graph, region.region), given[key])
            regions.append((region, costs[key]))
        kept = {key: given[key] for key in costs}
        small = contracted(graph, regions)
        order = top if top is not None and set(top) == small.nodes.keys() else eager_order(small)
        scheduled = Scheduled.of(small, order, self.prices.workspace_bytes)
        return SplitState(program, kept, costs, self._mstate(scheduled), history)

    def _cost(self, region: Fission, scope: Scope, order: Schedule) -> RegionCost:
        prices = self.prices
        transfer_s = no_transfer if prices.host is None else prices.host.transfer_s
        return region_cost(
            region, scope, order, prices.call_latency_s, prices.call_workspace_bytes, prices.infer, transfer_s
        )

    def _mstate(self, scheduled: Scheduled) -> MState:
        return MState.of(scheduled, self.prices.latency_s, self.prices.host)

    def body(self, state: SplitState, region: Fission) -> MState:
        """A region's largest part as a state of its own."""
        graph = state.program.graph
        scope = Scope.whole(graph, region.region)
        size = sections(region.length, min(region.parts, region.length))[0][1]
        found = part(region, scope, size, self.prices.infer)
        order = state.orders[min(region.region)]
        inside = found.inside(scope)
        children = [(child, self._inner_cost(child, inside, found, region, order)) for child in region.children]
        small = body(scope, region, found, children)
        rank = {node: i for i, node in enumerate(order)}
        first = {min(child.region): min(rank[n] for n in child.region) for child in region.children}
        places = rank | first
        return self._mstate(Scheduled.of(small, _body_order(small, places), self.prices.workspace_bytes))

    def _inner_cost(
        self, child: Fission, inside: Scope, found: Part, parent: Fission, order: Sequence[NodeId]
    ) -> RegionCost:
        seen = {
            value: found.slices[value, axis]
            for node_id in sorted(child.region)
            for value, axis in zip(inside.graph.nodes[node_id].inputs, found.loops[node_id].inputs)
            if axis is not None and value.node not in parent.region
        }
        return self._cost(child, inside.seeing(seen), tuple(n for n in order if n in child.region))

    def with_body(self, state: SplitState, region: Fission, base: MState, planned: MState) -> SplitState:
        """The state with a region's body as planned: `planned` followed from `base`, the region's body."""
        moved = _Transplant(state.program, region, self.prices.infer).apply(base.graph, planned.history)
        key = min(region.region)
        inside = {min(child.region): [n for n in state.orders[key] if n in child.region] for child in region.children}
        order: list[NodeId] = []
        for unit in planned.scheduled.order:
            if unit in inside:
                order += inside[unit]
            elif planned.graph.nodes[unit].op not in (SLICE, HAND_OUT):
                order.append(moved.flat.get(unit, unit))
        orders = {**state.orders}
        del orders[key]
        orders[min(order)] = tuple(order)
        return self.state(moved.program, (*state.history, *moved.steps), orders, state.top.schedule)

    def with_top(self, state: SplitState, planned: MState) -> SplitState:
        """The state with the contracted graph as planned: `planned` followed from `state.top`."""
        moved = _Transplant(state.program, None, self.prices.infer).apply(state.top.graph, planned.history)
        order = tuple(moved.flat.get(node, node) for node in planned.schedule)
        return self.state(moved.program, (*state.history, *moved.steps), state.orders, order)


def check_tree(graph: Graph, fission: Fission) -> None:
    """Whether a region and all inside it may be split. Raises CannotSplitError."""
    for each in fission.walk():
        check(graph, each)


def grouped(graph: Graph, region: Fission, order: Sequence[NodeId]) -> Schedule:
    """A valid order of a region's nodes, as near to the given one as it can be, in which those of each region inside
    follow each other."""
    unit_of = {node: min(child.region) for child in region.children for node in child.region}
    rank = {node: i for i, node in enumerate(order)}
    members: dict[NodeId, list[NodeId]] = {}
    for node in order:
        members.setdefault(unit_of.get(node, node), []).append(node)
    before: dict[NodeId, set[NodeId]] = {
        unit: {
            unit_of.get(value.node, value.node)
            for node in nodes
            for value in graph.nodes[node].inputs
            if value.node in region.region
        }
        - {unit}
        for unit, nodes in members.items()
    }
    after: dict[NodeId, list[NodeId]] = {unit: [] for unit in members}
    for unit, earlier in before.items():
        for other in earlier:
            after[other].append(unit)
    missing = {unit: len(earlier) for unit, earlier in before.items()}
    ready = [(rank[nodes[0]], unit) for unit, nodes in members.items() if not missing[unit]]
    heapq.heapify(ready)
    inside = {min(child.region): child for child in region.children}
    found: list[NodeId] = []
    while ready:
        _, unit = heapq.heappop(ready)
        found += grouped(graph, inside[unit], members[unit]) if unit in inside else [unit]
        for other in after[unit]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (rank[members[other][0]], other))
    return tuple(found)


def _body_order(graph: Graph, places: Mapping[NodeId, int]) -> Schedule:
    """The body's nodes: the region's in their order, slices right before and results right after what they belong
    to."""
    from magis.ir.structure import topological_order

    before: dict[NodeId, float] = {}
    for node in graph.nodes.values():
        if node.id in places:
            before[node.id] = places[node.id]
    for node in graph.nodes.values():
        if node.op == HAND_OUT:
            before[node.id] = before[node.inputs[0].node] + 0.25
        elif node.id not in before:
            readers = [before[user] for user in graph.users[node.id] if user in before]
            before[node.id] = min(readers, default=0) - (0.25 if node.op == SLICE else 1e9)
    return topological_order(graph, before)


class _Transplant:
    """Carries steps that were planned on a contracted graph or on a body out on the program itself."""

    def __init__(self, program: Program, region: Fission | None, infer: Infer) -> None:
        self.program, self.region, self.infer = program, region, infer
        self.flat: dict[NodeId, NodeId] = {}  # copies: their number in the planned graph, and in the program
        self.steps: list[Step] = []

    def apply(self, planned: Graph, history: Iterable[Step]) -> _Transplant:
        """Applies each step to both, so that copies can be told."""
        small = Program(planned)
        for name, site in history:
            rule = rules()[name]
            change = rule.apply(small, site, self.infer)
            assert change is not None, f"{name} does not apply any more"
            where = self._site(name, site, small.graph)
            there = rule.apply(self.program, where, self.infer)
            if there is None:
                raise CannotSplitError(f"{name} cannot be carried out inside the region")
            inverse = {original: copy for copy, original in there.copies.items()}
            for copy, original in change.copies.items():
                self.flat[copy] = inverse[self.flat.get(original, original)]
            self.flat.update(zip(change.added, there.added))
            small, self.program = change.program, there.program
            self.steps.append((name, where))
        return self

    def _site(self, name: str, site: tuple[int, ...], graph: Graph) -> tuple[int, ...]:
        """The site in the program: copies by their numbers there; an operator that stands for a region, as a reader,
        is all its nodes that read."""
        if name not in (Rematerialise.name, Swap.name):
            return tuple(self.flat.get(NodeId(n), NodeId(n)) for n in site)
        first = 1 if name == Rematerialise.name else 3
        count, *rest = site
        value = [self.flat.get(NodeId(rest[0]), rest[0]), rest[1]] if name == Swap.name else []
        nodes, readers = site[first : count + first], site[count + first :]
        if any(graph.nodes[NodeId(n)].op == REGION for n in readers):
            raise CannotSplitError("a region reads what is computed again or loaded")
        there, reading = (sorted(self.flat.get(n, n) for n in map(NodeId, each)) for each in (nodes, readers))
        return (count, *value, *there, *reading)


def replaced(program: Program, old: Fission, new: Fission) -> Program:
    """The program with one outermost region in the place of another."""
    return replace(program, ftree=tuple(new if fission is old else fission for fission in program.ftree))
