"""Swapping: wait in host memory instead of the device's (paper section 5.2, figure 8; ADR 10).

    before   v = f(x);  early reads v;  ...;  late reads v
    after    v = f(x);  early reads v;  h = store(v);  ...;  v' = load(h);  late reads v'

Trades time on the links for the bytes of v between its early and its late readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Cut, Fission, Program
from magis.ir.args import Slot
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, Node, NodeId, TensorSpec, Value
from magis.lower.launches import is_dense
from magis.lower.transfers import is_view
from magis.ops.loop import Concat
from magis.ops.swap import LOAD, STORE, stored
from magis.rules.base import Change, Latency, Site, changed, remove_unread, same_home
from magis.schedule.incremental import Scheduled


def swap_site(value: Value, views: Iterable[NodeId], readers: Iterable[NodeId]) -> Site:
    """The site that swaps a value for some readers, which read it directly or through those views."""
    seen = sorted(set(views))
    return (len(seen), value.node, value.output, *seen, *sorted(set(readers)))


def swappable(graph: Graph, value: Value) -> bool:
    """Whether a value is a tensor with a storage of its own that a copy can stand for. What was loaded can be dropped
    and loaded again."""
    node = graph.nodes[value.node]
    spec = node.outputs[value.output]
    if spec is None or node.is_input or node.op == STORE or spec.alias_of is not None:
        return False
    return is_dense(spec) and 0 < spec.storage_bytes == spec.nbytes and not spec.offset


class Swap:
    """Site: how many views to repeat, the node and the output to swap, those views, and the readers that take the
    loaded tensor, or its views, from then on."""

    name: ClassVar[str] = "swap"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """Tensors that wait across the (first) worst moment, largest first."""
        flat, position, graph = state.flat, state.position, state.flat.graph
        worst = state.live.index(max(state.live)) if state.live else 0
        busy = set(flat.taken[state.order[worst]]) if state.order else set()
        ranked = []
        for value, storage in flat.storage_of.items():
            if storage in busy or storage in flat.kept or not 0 <= position[value.node] < worst:
                continue
            if swappable(graph, value) and any(position[n] > worst for n in flat.readers[storage]):
                late = late_site(graph, value, lambda node: position[node] > worst)
                if late is not None:
                    ranked.append((-flat.nbytes[storage], late))
        yield from (site for _, site in sorted(ranked))

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Swaps the value. None when it is not there, has no storage of its own, or is not read so."""
        graph = program.graph
        if len(site) < 4 or any(number not in graph.nodes for number in (site[1], *site[3:])):
            return None
        value = Value(NodeId(site[1]), site[2])
        views, readers = [NodeId(n) for n in site[3 : site[0] + 3]], [NodeId(n) for n in site[site[0] + 3 :]]
        if value.output >= len(graph.nodes[value.node].outputs) or not swappable(graph, value) or not readers:
            return None
        if not all(is_view(graph.nodes[view]) and graph.root(Value(view)) == value for view in views):
            return None
        if any(graph.nodes[n].op == STORE for n in readers) or value.node in readers:
            return None
        if not same_home(program, [value.node, *views, *readers]):
            return None
        change = _swapped(program, value, views, readers)
        return change if change is None or _is_read(change.program.graph, Value(change.added[-1])) else None


def late_site(graph: Graph, value: Value, is_late: Callable[[NodeId], bool]) -> Site | None:
    """The site that swaps a value for all readers for which `is_late(node)` holds; None if there is none."""
    views: set[NodeId] = set()
    readers: set[NodeId] = set()
    todo = [value.node]
    seen = {value.node}
    while todo:
        for user in graph.users[todo.pop()]:
            node = graph.nodes[user]
            if node.op == STORE or not any(graph.root(v) == value for v in node.inputs):
                continue
            if is_late(user):
                readers.add(user)
            elif is_view(node) and user not in seen:
                seen.add(user)
                todo.append(user)
    for reader in readers:
        stack = [v.node for v in graph.nodes[reader].inputs if graph.root(v) == value]
        while stack:
            node_id = stack.pop()
            if node_id != value.node and node_id not in readers and node_id not in views:
                views.add(node_id)
                stack += [v.node for v in graph.nodes[node_id].inputs if graph.root(v) == value]
    return swap_site(value, views, readers) if readers else None


def _is_read(graph: Graph, value: Value) -> bool:
    """Whether any operator reads the elements of a tensor: what waits for them."""
    todo = [value.node]
    while todo:
        for user in graph.users[todo.pop()]:
            if any(graph.root(v) == value for v in graph.nodes[user].inputs):
                if not is_view(graph.nodes[user]):
                    return True
                todo.append(user)
    return False


def _views_before(graph: Graph, value: Value, node: Node) -> int:
    """How many views, of each other, lie between a value and a view of it."""
    count = 0
    while node.id != value.node:
        place = next(spec.alias_of for spec in node.outputs if spec is not None and spec.alias_of is not None)
        node = graph.nodes[node.inputs[place].node]
        count += 1
    return count


def _swapped(program: Program, value: Value, views: list[NodeId], readers: list[NodeId]) -> Change | None:
    graph = program.graph
    edit, spec, origin = GraphEdit(graph), graph.spec(value), graph.nodes[value.node].origin
    added = []
    if graph.nodes[value.node].op == LOAD:
        copy_there = graph.nodes[value.node].inputs[0]
    else:
        added.append(edit.add(STORE, (value,), (stored(spec),), (Slot(0),), origin=origin))
        copy_there = Value(added[0])
    load = edit.add(LOAD, (copy_there,), (spec,), (Slot(0),), origin=origin)
    added.append(load)
    moved = {value: Value(load)}
    copies: dict[NodeId, NodeId] = {}
    for node in sorted((graph.nodes[view] for view in views), key=lambda node: _views_before(graph, value, node)):
        copy = edit.copy(node.id, "of what was swapped")
        for old in node.inputs:
            edit.redirect(copy, old, moved.get(old, old))
        copies[copy] = node.id
        moved |= {Value(node.id, i): Value(copy, i) for i in range(len(node.outputs))}
    for reader in readers:
        for old in edit.node(reader).inputs:
            edit.redirect(reader, old, moved.get(old, old))
    if any(edit.node(reader) == graph.nodes[reader] for reader in readers):
        return None
    remove_unread(edit, program, {value.node, *views, *copies})
    change = changed(program, edit, copies)
    forest = tuple(_with_transfers(fission, graph, value, spec, added) for fission in change.program.ftree)
    if None in forest:
        return None
    kept = tuple(fission for fission in forest if fission is not None)
    return replace(change, program=Program(change.program.graph, kept), added=tuple(added))


def _with_transfers(
    fission: Fission, graph: Graph, value: Value, spec: TensorSpec, nodes: Sequence[NodeId]
) -> Fission | None:
    """A region with the transfers of a value that is made in it. None when its parts give no slice of the value."""
    if value.node not in fission.region:
        return fission
    children = [_with_transfers(child, graph, value, spec, nodes) for child in fission.children]
    role = fission.cuts[value.node].of(graph.call(graph.nodes[value.node])).roles[value.output]
    if None in children or not isinstance(role, Concat) or fission.halo:
        return None
    axis = role.axis
    number = sum(length > 1 for length in spec.shape[: axis.dim])  # among the loops of a copy
    cuts = {**fission.cuts, **dict.fromkeys(nodes, Cut(number, axis.outer, axis.length))}
    inside = tuple(child for child in children if child is not None)
    return replace(fission, region=frozenset(cuts), cuts=cuts, children=inside)


class Unswap:
    """The inverse of swapping. Site: the node that loads."""

    name: ClassVar[str] = "stay"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """Every load, smallest first."""
        graph = state.flat.graph
        loads = [node for node in graph.nodes.values() if node.op == LOAD]
        yield from ((node.id,) for node in sorted(loads, key=lambda n: (graph.spec(Value(n.id)).nbytes, n.id)))

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Readers of the loaded tensor read the stored one. None when there is no such node."""
        graph = program.graph
        load = graph.nodes.get(NodeId(site[0])) if len(site) == 1 else None
        if load is None or load.op != LOAD:
            return None
        store = graph.nodes[load.inputs[0].node]
        edit = GraphEdit(graph)
        edit.redirect_all(Value(load.id), store.inputs[0])
        remove_unread(edit, program, {load.id})
        return changed(program, edit)
