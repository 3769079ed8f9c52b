"""Re-materialisation: compute again what would have to wait in memory (paper section 5.2, figure 8).

    before   v = f(x);  early reads v;  ...;  late reads v
    after    v = f(x);  early reads v;  ...;  v' = f(x);  late reads v'

Trades the time of f for the bytes of v between its early and its late readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, Node, NodeId, Value
from magis.ops.registry import rule_for
from magis.rules.base import Change, Latency, Site, changed, remove_unread, same_home
from magis.schedule.flat import RESIDENT
from magis.schedule.incremental import Scheduled


def recomputable(node: Node) -> bool:
    """Whether a second instance of the node gives the same values without doing anything twice. A random draw does:
    its copies restore the generator's state."""
    return not node.is_input and not node.writes and rule_for(node.op).recomputable


def site(segment: Iterable[NodeId], readers: Iterable[NodeId]) -> Site:
    """The site that copies the nodes of `segment` for `readers`."""
    copied, reading = sorted(set(segment)), sorted(set(readers))
    return (len(copied), *copied, *reading)


class Rematerialise:
    """Site: how many nodes to copy, those nodes, and the readers that take the copies' results from then on.

    The segment may be one operator, a chain, or any set of them: a copy reads other copies where its original
    reads other nodes of the segment. What nobody reads any more is removed.
    """

    name: ClassVar[str] = "recompute"

    def sites(self, state: Scheduled, latency_s: Latency) -> Iterator[Site]:
        """Tensors that wait across the (first) worst moment, most bytes per second of recomputation first: each
        alone, and with the producers that are gone by then."""
        yield from _Waiting(state, latency_s).sites()

    def apply(self, program: Program, site: Site, infer: Infer = no_infer) -> Change | None:
        """Copies the segment for the readers. None when a node is not there, may not run twice or is not read."""
        graph = program.graph
        count = site[0] if site else 0
        segment, readers = _known(graph, site[1 : count + 1]), _known(graph, site[count + 1 :])
        if not segment or not readers or not all(recomputable(node) for node in segment):
            return None
        originals = {node.id for node in segment}
        if any(node.id in originals or node.is_input for node in readers):
            return None
        if not same_home(program, [node.id for node in (*segment, *readers)]):
            return None
        edit = GraphEdit(graph)
        copies: dict[NodeId, NodeId] = {}
        for node in (node for node in graph.nodes_in_order() if node.id in originals):
            copies[node.id] = edit.copy(node.id, "again")
            _take_copies(edit, copies[node.id], copies)
        for node in readers:
            _take_copies(edit, node.id, copies)
        if not all(edit.node(node.id) != node for node in readers):
            return None
        remove_unread(edit, program, originals | set(copies.values()))
        return changed(program, edit, {copy: original for original, copy in copies.items()})


def _known(graph: Graph, ids: Iterable[int]) -> list[Node]:
    """Those nodes; none when one of them is not in the graph."""
    found = [graph.nodes.get(NodeId(node_id)) for node_id in ids]
    return [] if None in found else [node for node in found if node is not None]


def _take_copies(edit: GraphEdit, reader: NodeId, copies: dict[NodeId, NodeId]) -> None:
    for value in edit.node(reader).inputs:
        if value.node in copies:
            edit.redirect(reader, value, Value(copies[value.node], value.output))


class _Waiting:
    """The storages that wait across the first worst moment of a state, and what it takes to bring them back."""

    def __init__(self, state: Scheduled, latency_s: Latency) -> None:
        self.state = state
        self.flat = state.flat
        self.position = state.position
        self.worst = state.live.index(max(state.live)) if state.live else 0
        self.latency_s = latency_s

    def sites(self) -> Iterator[Site]:
        """Most bytes per second first."""
        ranked = []
        for storage in self._waiting():
            late = [n for n in self.flat.readers[storage] if self.position[n] > self.worst]
            first = min(self.position[n] for n in late)
            for chain in (False, True):
                segment = self._segment(storage, first, chain)
                if segment is None:
                    continue
                seconds = sum(self.latency_s(n) for n in segment)
                readers = self._late_readers(segment)
                ranked.append((-self.flat.nbytes[storage] / max(seconds, 1e-9), site(segment, readers)))
        yield from dict.fromkeys(found for _, found in sorted(ranked))

    def _waiting(self) -> list[int]:
        """Storages made before the worst moment and read after it, but not touched at it."""
        if not self.state.order:
            return []
        flat, position, worst = self.flat, self.position, self.worst
        busy = set(flat.taken[self.state.order[worst]])
        return [
            storage
            for storage, maker in enumerate(flat.maker)
            if 0 <= position[maker] < worst
            and storage not in busy
            and storage not in flat.kept
            and recomputable(flat.graph.nodes[maker])
            and any(position[n] > worst for n in flat.readers[storage])
        ]

    def _segment(self, storage: int, when: int, chain: bool) -> list[NodeId] | None:
        """The maker of a storage and the views of it that are read late; with `chain` also, again and again, the
        makers of what they read and what is gone at position `when`. None when that cannot be recomputed, or when
        the chain is no other than the maker alone."""
        flat, graph = self.flat, self.flat.graph
        again, todo = {storage}, [flat.maker[storage]]
        makers: set[NodeId] = set()
        while todo:
            node_id = todo.pop()
            if not recomputable(graph.nodes[node_id]):
                return None
            makers.add(node_id)
            for other in flat.taken[node_id]:
                if flat.maker[other] == node_id or other in again or not chain:
                    continue
                if other in flat.kept or max(self.position[n] for n in flat.readers[other]) >= when:
                    continue
                again.add(other)
                todo.append(flat.maker[other])
        if chain and len(makers) == 1:
            return None
        return self._with_views(makers, again)

    def _with_views(self, makers: set[NodeId], again: set[int]) -> list[NodeId] | None:
        """The makers and the views through which they, or late readers, take what is made again."""
        flat, graph = self.flat, self.flat.graph
        found, todo = set(makers), []
        late = [n for storage in again for n in flat.readers[storage] if self.position[n] > self.worst]
        todo = [*makers, *late]
        while todo:
            for value in graph.nodes[todo.pop()].inputs:
                root = flat.roots[value.node][value.output]
                known = root is not None and flat.storage_of.get(root[0], RESIDENT) in again
                if known and value.node not in found and self.position[value.node] <= self.worst:
                    if not recomputable(graph.nodes[value.node]):
                        return None
                    found.add(value.node)
                    todo.append(value.node)
        return sorted(found)

    def _late_readers(self, segment: Iterable[NodeId]) -> list[NodeId]:
        """Operators after the worst moment that read what the segment makes."""
        originals = set(segment)
        readers = {n for node_id in originals for n in self.flat.graph.users[node_id]} - originals
        return sorted(n for n in readers if self.position[n] > self.worst)
