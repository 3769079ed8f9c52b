"""Flat arrays of an edited graph from those of the old one: copies, and work only where the edit touched it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from graphlib import TopologicalSorter

from magis.ir.graph import Graph, Node, NodeId, Value
from magis.schedule.flat import Flat, describe, flatten, input_roots, kept_storages, output_roots


def updated(old: Flat, graph: Graph, old_nodes: Collection[NodeId], new_nodes: Collection[NodeId]) -> Flat:
    """The same as `flatten(graph)` but for the numbers of storages. `old_nodes` are those removed or changed,
    `new_nodes` those added or changed, as `GraphEdit` records them.

    An edit of writes, of inputs or of the order of draws is read as a whole new graph."""
    detached = with_readers_through_views(old, graph, old_nodes)
    attached = {node for node in detached if node in graph.nodes}.union(new_nodes)
    before = [old.graph.nodes[node] for node in sorted(detached)]
    now = [graph.nodes[node] for node in sorted(attached)]
    if any(_is_special(old, node) for node in (*before, *now)):
        return flatten(graph, old.workspace_bytes)
    edit = _Update(old, graph)
    edit.detach(before)
    edit.attach(now)
    return edit.flat


def with_readers_through_views(old: Flat, graph: Graph, changed: Iterable[NodeId]) -> set[NodeId]:
    """The changed nodes, and those that read views which may now lie in another storage."""
    found = set(changed)
    stack = [node for node in found if node in graph.nodes]
    while stack:
        node = stack.pop()
        if all(spec is None or spec.alias_of is None for spec in graph.nodes[node].outputs):
            continue
        for reader in old.after[node]:
            if reader not in found and reader in graph.nodes and _reads(graph.nodes[reader], node):
                found.add(reader)
                stack.append(reader)
    return found


def _reads(reader: Node, node: NodeId) -> bool:
    return any(value.node == node for value in reader.inputs)


def _is_special(old: Flat, node: Node) -> bool:
    """Whether other nodes than its readers and a later write may have to move with it. A copy of a draw, which
    has a larger number than the first, is not special."""
    return node.is_input or node.writes or (node.stream is not None and old.draws.get(node.stream, node.id) >= node.id)


class _Update:
    """Copies of the old arrays, changed one after the other."""

    def __init__(self, old: Flat, graph: Graph) -> None:
        more = max(max(graph.nodes, default=-1) + 1 - len(old.before), 0)
        self.flat = Flat(
            graph=graph,
            workspace_bytes=old.workspace_bytes,
            is_operator=old.is_operator + [False] * more,
            before=old.before + [()] * more,
            after=old.after + [()] * more,
            roots=old.roots + [()] * more,
            taken=old.taken + [()] * more,
            extra=old.extra + [0] * more,
            storage_of=dict(old.storage_of),
            maker=list(old.maker),
            nbytes=list(old.nbytes),
            readers=list(old.readers),
            kept=old.kept,
            writers=old.writers,
            draws=old.draws,
            resident_bytes=old.resident_bytes,
        )
        self.detached: set[NodeId] = set()
        self.overwriting: dict[NodeId, set[NodeId]] = {}  # writers, with the nodes that must now run before them

    def detach(self, nodes: Iterable[Node]) -> None:
        """Takes nodes out: nobody's readers, and without storages of their own unless `attach` follows."""
        flat = self.flat
        for node in nodes:
            self.detached.add(node.id)
            for root in input_roots(flat, node):
                if root in flat.writers:
                    self.overwriting.setdefault(flat.writers[root], set())
            for storage in flat.taken[node.id]:
                flat.readers[storage] = tuple(n for n in flat.readers[storage] if n != node.id)
        for node in nodes:
            if node.id not in flat.graph.nodes:
                for output in range(len(node.outputs)):
                    flat.storage_of.pop(Value(node.id, output), None)
                flat.is_operator[node.id], flat.extra[node.id] = False, 0
                flat.roots[node.id], flat.taken[node.id] = (), ()

    def attach(self, nodes: Iterable[Node]) -> None:
        """Puts nodes in, connects everything."""
        flat = self.flat
        fresh = {node.id: node for node in nodes}
        reads = {node.id: [v.node for v in node.inputs if v.node in fresh] for node in fresh.values()}
        for node_id in TopologicalSorter(reads).static_order():
            node = fresh[node_id]
            flat.roots[node_id] = output_roots(flat, node)
            describe(flat, node)
            for storage in flat.taken[node_id]:
                if flat.maker[storage] != node_id:
                    flat.readers[storage] = tuple(sorted((*flat.readers[storage], node_id)))
            for root in input_roots(flat, node):
                if root in flat.writers:
                    self.overwriting.setdefault(flat.writers[root], set()).add(node_id)
        for node_id in self.detached - fresh.keys():
            self._connect(node_id, set())
        for node in fresh.values():
            self._connect(node.id, self._producers(node))
        for writer, readers in self.overwriting.items():
            others = set(flat.before[writer]) - self.detached
            self._connect(writer, others | readers | self._producers(flat.graph.nodes[writer]))
        flat.kept = kept_storages(flat)

    def _producers(self, node: Node) -> set[NodeId]:
        found = {value.node for value in node.inputs if self.flat.is_operator[value.node]}
        if node.stream is not None:
            found.add(self.flat.draws[node.stream])
        return found

    def _connect(self, node: NodeId, before: set[NodeId]) -> None:
        """Makes `before` what must run before a node."""
        flat = self.flat
        known = set(flat.before[node])
        for earlier in known - before:
            flat.after[earlier] = tuple(n for n in flat.after[earlier] if n != node)
        for earlier in before - known:
            flat.after[earlier] = tuple(sorted((*flat.after[earlier], node)))
        flat.before[node] = tuple(sorted(before))
