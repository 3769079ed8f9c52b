"""Capture: a workload's step as a functional graph with its inputs, results, in-place writes and eager order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from magis.aten.convert import spec_of, torch_dtype
from magis.capture import private
from magis.capture.convert import Converter, refuse_twofold_write
from magis.capture.trace import OutputStructure, Trace, trace
from magis.capture.update import Update, add_update
from magis.capture.workload import Workload, batch_tensors
from magis.errors import CaptureError
from magis.ir.args import Slot
from magis.ir.edit import GraphEdit
from magis.ir.fingerprint import renumber
from magis.ir.graph import Graph, NodeId, Origin, Schedule, Value
from magis.ir.structure import topological_order
from magis.ir.verify import verify


@dataclass(frozen=True)
class Captured:
    """A captured step. Node ids count in eager order, which is the `schedule` of the baseline.

    `constants` are tensors that the model made outside its parameters and buffers. `output_structure` puts
    the outputs of an inference call back into the model's own structure. `update` holds the optimizer's part.
    """

    graph: Graph
    constants: Mapping[str, torch.Tensor]
    output_structure: OutputStructure | None = None
    update: Update | None = None

    @property
    def schedule(self) -> Schedule:
        """Eager's order."""
        return tuple(self.graph.nodes)

    def bind(self, workload: Workload) -> list[torch.Tensor]:
        """The tensors that the graph's input nodes stand for, in their order."""
        tables: dict[str, Mapping[str, torch.Tensor]] = {
            "parameter": dict(workload.model.named_parameters(remove_duplicate=False)),
            "buffer": dict(workload.model.named_buffers(remove_duplicate=False)),
            "batch": dict(batch_tensors(workload.batch)),
            "constant": self.constants,
            "state": {} if self.update is None else self.update.state(workload),
        }
        return [tables[node.kind][node.name] for node in self.graph.inputs]


def capture(workload: Workload) -> Captured:
    """Captures forward, loss, backward and update of a training step, or an inference call.

    Nothing is computed and nothing is allocated: tensors may be real or on the meta device. Raises
    CaptureError with module and line when the step cannot be captured."""
    traced = trace(workload)
    converter = Converter(traced)
    converter.convert()
    rank = _Rank()
    for write, maker in converter.written_back:
        rank.follow(write, maker)
    outputs, gradients = _Results(traced, converter, rank).collect()
    if workload.loss_fn is not None and not gradients:
        raise CaptureError(f"{workload.name}: the traced step gives no parameter a gradient, though its loss has one")
    update = None
    if workload.update is not None:
        of_parameters = {name: gradients.pop((kind, name)) for kind, name in list(gradients) if kind == "parameter"}
        update = add_update(workload, converter, of_parameters, rank.follow)
        gradients |= {("parameter", name): value for name, value in of_parameters.items()}
    outputs |= {f"grad:{name}": value for (_, name), value in gradients.items()}
    converter.edit.set_outputs(outputs.values(), outputs)
    graph = _without_dead_nodes(converter.edit.finish())
    order = topological_order(graph, rank.of(graph))
    graph = renumber(graph, {node_id: NodeId(i) for i, node_id in enumerate(order)})
    verify(graph, tuple(graph.nodes))
    return Captured(graph, traced.constants, traced.output_structure, update)


class _Rank:
    """Positions for nodes that capture adds: right after the node that they follow, as eager runs them; those that
    follow the same node one after the other."""

    def __init__(self) -> None:
        self._after: dict[NodeId, NodeId] = {}

    def follow(self, added: NodeId, earlier: NodeId) -> None:
        """`added` runs as soon as it can after `earlier`, which is older."""
        self._after[added] = self._after.get(earlier, earlier)

    def of(self, graph: Graph) -> dict[NodeId, float]:
        """For each node its place in eager order."""
        followers: Counter[NodeId] = Counter()
        rank: dict[NodeId, float] = {}
        for node_id, node in graph.nodes.items():
            traced = self._after.get(node_id, node_id)
            followers[traced] += 1
            rank[node_id] = -1.0 if node.is_input else traced + 1e-6 * followers[traced]
        return rank


Gradients = dict[tuple[str, str], Value]


class _Results:
    """What the step hands back and what it writes, from the results of the traced graph."""

    def __init__(self, traced: Trace, converter: Converter, rank: _Rank) -> None:
        self._traced, self._converter, self._rank = traced, converter, rank
        self._outputs: dict[str, Value] = {}
        self._shares: dict[Value, list[Value]] = {}

    def collect(self) -> tuple[dict[str, Value], Gradients]:
        """Named outputs, and the whole gradient of each input; mutations become writes."""
        take = {"output": self._output, "gradient": self._gradient, "mutation": self._mutation}
        for node, role, target in private.output_roles(self._traced.graph):
            if node is None or node in self._converter.zeros:
                continue
            if role not in take:
                raise CaptureError(f"{self._traced.name}: the step has a result that cannot be captured ({target})")
            take[role](node, target)
        named = [item for item in reversed(self._converter.input_of.items()) if item[0][0] != "constant"]
        names = {value: name for name, value in named}
        return self._outputs, {names[of]: self._total(shares) for of, shares in self._shares.items()}

    def _output(self, node: torch.fx.Node, index: Any) -> None:
        name, value = self._traced.output_names[index], self._converter.value_of[node]
        if name.startswith("buffer:"):
            self._write(self._converter.input_of["buffer", name.removeprefix("buffer:")], value)
        else:
            self._outputs[name] = value

    def _gradient(self, node: torch.fx.Node, target: Any) -> None:
        self._shares.setdefault(self._input(target), []).append(self._converter.value_of[node])

    def _mutation(self, node: torch.fx.Node, target: Any) -> None:
        overwritten, value = self._input(target), self._converter.value_of[node]
        if value != overwritten:
            refuse_twofold_write(node)
            self._write(overwritten, value)

    def _write(self, target: Value, new: Value) -> None:
        self._rank.follow(self._converter.write(target, new), new.node)

    def _input(self, target: Any) -> Value:
        """The input that a parameter's or buffer's name, or a batch index, stands for."""
        inputs = self._converter.input_of
        if isinstance(target, int):
            return inputs["batch", self._traced.batch_names[target]]
        name = str(target).removeprefix("model.")
        return inputs["parameter" if ("parameter", name) in inputs else "buffer", name]

    def _total(self, shares: list[Value]) -> Value:
        """The sum of a gradient's shares (each name of a tied parameter has one), in the order of their making."""
        total, *others = sorted(shares)
        edit = self._converter.edit
        for share in others:
            summands = [edit.node(value.node).outputs[value.output] for value in (total, share)]
            like = [
                torch.empty_strided(spec.shape, spec.strides, dtype=torch_dtype(spec.dtype), device="meta")
                for spec in summands
                if spec is not None
            ]
            spec = replace(spec_of(like[0] + like[1]), device=summands[0].device)  # type: ignore[union-attr]
            origin = Origin("", "", "backward")
            added = edit.add("aten.add.Tensor", (total, share), [spec], (Slot(0), Slot(1)), origin=origin)
            self._rank.follow(added, share.node)
            total = Value(added)
        return total


def _without_dead_nodes(graph: Graph) -> Graph:
    """Drops what neither a result, nor a write, nor the random generator's state depends on.

    Inputs stay: the caller's tensors are resident whether they are read or not."""
    needed: set[NodeId] = set()
    todo = [value.node for value in graph.outputs]
    todo += [n.id for n in graph.nodes.values() if n.is_input or n.stream is not None or n.writes]
    while todo:
        node_id = todo.pop()
        if node_id not in needed:
            needed.add(node_id)
            todo += [value.node for value in graph.nodes[node_id].inputs]
    edit = GraphEdit(graph)
    for node_id in reversed(list(graph.nodes)):
        if node_id not in needed:
            edit.remove(node_id)
    return edit.finish()
