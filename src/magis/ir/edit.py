"""The only way to change a graph: a copy-on-write edit that records what it touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView
from dataclasses import replace

from magis.ir.args import Args, Kwargs, renumbered
from magis.ir.graph import Graph, Node, NodeId, Origin, TensorSpec, Value


class GraphEdit:
    """Collects changes to a graph; `finish` gives the new graph and leaves the old one as it was.

    `old_nodes` are nodes of the old graph that were removed or whose inputs changed; `new_nodes` are nodes
    of the new graph that were added or whose inputs changed: the two sets that incremental scheduling needs.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = dict(graph.nodes)
        self._outputs = graph.outputs
        self._next = max(graph.nodes, default=-1) + 1
        self.old_nodes: set[NodeId] = set()
        self.new_nodes: set[NodeId] = set()

    def add(
        self,
        op: str,
        inputs: Iterable[Value],
        outputs: Iterable[TensorSpec | None],
        args: Args = (),
        kwargs: Kwargs = (),
        *,
        stream: int | None = None,
        origin: Origin = Origin(),
    ) -> NodeId:
        """Adds a node and returns its id, larger than every id before."""
        node_id = NodeId(self._next)
        self._next += 1
        node = Node(node_id, op, tuple(inputs), tuple(outputs), args, kwargs, stream, origin)
        self._nodes[node_id] = with_distinct_inputs(node)
        self.new_nodes.add(node_id)
        return node_id

    def node(self, node_id: NodeId) -> Node:
        """A node as it stands now."""
        return self._nodes[node_id]

    def node_ids(self) -> KeysView[NodeId]:
        """The nodes there are now."""
        return self._nodes.keys()

    @property
    def outputs(self) -> tuple[Value, ...]:
        """What the graph hands back now."""
        return self._outputs

    def copy(self, node_id: NodeId, note: str) -> NodeId:
        """Adds a second instance of a node with the same inputs; `note` goes into its origin."""
        node = self._nodes[node_id]
        origin = replace(node.origin, module=f"{node.origin.module} ({note} %{node_id})".lstrip())
        return self.add(node.op, node.inputs, node.outputs, node.args, node.kwargs, stream=node.stream, origin=origin)

    def redirect(self, reader: NodeId, old: Value, new: Value) -> None:
        """Makes one reader take `new` wherever it took `old`."""
        node = self._nodes[reader]
        self._put(replace(node, inputs=tuple(new if value == old else value for value in node.inputs)))

    def redirect_all(self, old: Value, new: Value, keep: Callable[[NodeId], bool] = lambda _: False) -> None:
        """Makes every reader of `old`, and the graph's outputs, take `new`; readers with `keep` stay."""
        users = [*self._graph.users.get(old.node, ()), *self.new_nodes]
        present = [n for n in sorted(set(users)) if n in self._nodes]
        for reader in [n for n in present if old in self._nodes[n].inputs and not keep(n)]:
            self.redirect(reader, old, new)
        self.redirect_output(old, new)

    def redirect_output(self, old: Value, new: Value) -> None:
        """Makes the graph hand back `new` wherever it handed back `old`."""
        self._outputs = tuple(new if value == old else value for value in self._outputs)

    def replace_node(self, node: Node) -> None:
        """Puts a changed node in the place of the one with its id. Who reads a result of another type counts as
        changed too."""
        retyped = node.outputs != self._nodes[node.id].outputs
        self._put(node)
        if retyped:
            readers = [n for n in self._nodes if any(value.node == node.id for value in self._nodes[n].inputs)]
            self.new_nodes.update(readers)
            self.old_nodes.update(n for n in readers if n in self._graph.nodes)

    def remove(self, node_id: NodeId) -> None:
        """Removes a node that nobody reads any more."""
        del self._nodes[node_id]
        if node_id in self._graph.nodes:
            self.old_nodes.add(node_id)
        self.new_nodes.discard(node_id)

    def set_outputs(self, outputs: Iterable[Value], names: Iterable[str] | None = None) -> None:
        """Replaces the graph's outputs, name by name, or names and all."""
        self._outputs = tuple(outputs)
        if names is not None:
            self._graph = replace(self._graph, output_names=tuple(names))

    def _put(self, changed: Node) -> None:
        node = with_distinct_inputs(changed)
        if self._nodes[node.id] == node:
            return
        self._nodes[node.id] = node
        self.new_nodes.add(node.id)
        if node.id in self._graph.nodes:
            self.old_nodes.add(node.id)

    def finish(self) -> Graph:
        """The edited graph."""
        graph = replace(self._graph, nodes=self._nodes, outputs=self._outputs)
        if "users" in vars(self._graph):
            vars(graph)["users"] = self._users()
        return graph

    def _users(self) -> dict[NodeId, tuple[NodeId, ...]]:
        """`Graph.users` of the edited graph, from those of the graph before."""
        users = dict(self._graph.users)
        changed = self.old_nodes | self.new_nodes
        gained: dict[NodeId, set[NodeId]] = {}
        lost: dict[NodeId, set[NodeId]] = {}
        for reader in changed:
            for found, nodes in ((lost, self._graph.nodes), (gained, self._nodes)):
                for value in nodes[reader].inputs if reader in nodes else ():
                    found.setdefault(value.node, set()).add(reader)
        for producer in gained.keys() | lost.keys():
            kept = set(users.get(producer, ())) - lost.get(producer, set())
            users[producer] = tuple(sorted(kept | gained.get(producer, set())))
        for node in changed - self._nodes.keys():
            users.pop(node, None)
        for node in changed & self._nodes.keys():
            users.setdefault(node, ())
        return users


def with_distinct_inputs(node: Node) -> Node:
    """The node with each tensor it takes listed once, slots renumbered to match."""
    place = {value: index for index, value in enumerate(dict.fromkeys(node.inputs))}
    if len(place) == len(node.inputs):
        return node
    number = {index: place[value] for index, value in enumerate(node.inputs)}
    return replace(
        node,
        inputs=tuple(place),
        args=tuple(renumbered(value, number) for value in node.args),
        kwargs=tuple((name, renumbered(value, number)) for name, value in node.kwargs),
        outputs=tuple(
            spec and (spec if spec.alias_of is None else replace(spec, alias_of=number[spec.alias_of]))
            for spec in node.outputs
        ),
    )
