"""Capture: a workload's step as a functional graph with its inputs, results, in-place writes and eager order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from magis.capture import private
from magis.capture.convert import Converter, refuse_twofold_write
from magis.capture.trace import Trace, trace
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
    output_structure: Any = None
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
    outputs, gradients = _results(traced, converter, rank)
    update = None
    if workload.update is not None:
        update = add_update(workload, converter, gradients, rank.follow)
    else:
        outputs |= {f"grad:{name}": value for name, value in gradients.items()}
    converter.edit.set_outputs(outputs.values(), outputs)
    graph = _without_dead_nodes(converter.edit.finish())
    order = topological_order(graph, rank.of(graph))
    graph = renumber(graph, {node_id: NodeId(i) for i, node_id in enumerate(order)})
    verify(graph, tuple(graph.nodes))
    return Captured(graph, traced.constants, traced.output_structure, update)


class _Rank:
    """Positions for nodes that capture adds: right after the node that they follow, as eager runs them."""

    def __init__(self) -> None:
        self._after: dict[NodeId, NodeId] = {}

    def follow(self, added: NodeId, earlier: NodeId) -> None:
        """`added` runs as soon as it can after `earlier`."""
        self._after[added] = earlier

    def of(self, graph: Graph) -> dict[NodeId, float]:
        """For each node its place in eager order."""
        rank: dict[NodeId, float] = {}
        for node_id in graph.nodes:
            earlier = self._after.get(node_id)
            rank[node_id] = -1.0 if graph.nodes[node_id].is_input else float(node_id)
            if earlier is not None:
                rank[node_id] = rank.get(earlier, float(earlier)) + 1e-6
        return rank


def _results(traced: Trace, converter: Converter, rank: _Rank) -> tuple[dict[str, Value], dict[str, Value]]:
    """Named outputs, and the whole gradient of each input; buffer mutations become writes."""
    outputs: dict[str, Value] = {}
    gradients: dict[Value, Value] = {}
    names = {value: name for (kind, name), value in reversed(converter.input_of.items()) if kind != "constant"}
    for node, role, target in private.output_roles(traced.graph):
        if (
            node is None
            or node in converter.zeros
            or (role == "mutation" and converter.value_of[node] == _input(traced, converter, target))
        ):
            continue
        value = converter.value_of[node]
        name = traced.output_names[target] if role == "output" else ""
        if name.startswith("buffer:"):
            _write_back(converter, converter.input_of["buffer", name.removeprefix("buffer:")], value, rank)
        elif role == "output":
            outputs[name] = value
        elif role == "gradient":
            _accumulate(converter, gradients, _input(traced, converter, target), value, rank)
        elif role == "mutation":
            refuse_twofold_write(node)
            _write_back(converter, _input(traced, converter, target), value, rank)
        else:
            raise CaptureError(f"the step has a result that cannot be captured ({target})")
    return outputs, {names[of]: value for of, value in gradients.items()}


def _input(traced: Trace, converter: Converter, target: Any) -> Value:
    """The input that a parameter's or buffer's name, or a batch index, stands for."""
    if isinstance(target, int):
        return converter.input_of["batch", traced.batch_names[target]]
    name = str(target).removeprefix("model.")
    kind = "parameter" if ("parameter", name) in converter.input_of else "buffer"
    return converter.input_of[kind, name]


def _accumulate(converter: Converter, gradients: dict[Value, Value], of: Value, share: Value, rank: _Rank) -> None:
    """Adds a share of a gradient (each use of a tied parameter has one), in the order of their making."""
    if of not in gradients:
        gradients[of] = share
        return
    first, second = sorted((gradients[of], share), key=lambda value: value.node)
    edit = converter.edit
    spec = edit.node(first.node).outputs[first.output]
    assert spec is not None
    spec = replace(spec, alias_of=None, storage_bytes=spec.nbytes, offset=0)
    total = edit.add("aten.add.Tensor", (first, second), [spec], (Slot(0), Slot(1)), origin=Origin("", "", "backward"))
    rank.follow(total, second.node)
    gradients[of] = Value(total)


def _write_back(converter: Converter, target: Value, new: Value, rank: _Rank) -> None:
    """Writes a mutated buffer's new contents into it."""
    edit = converter.edit
    spec = edit.node(target.node).outputs[target.output]
    assert spec is not None
    written = replace(spec, alias_of=0, writes=True, storage_bytes=0)
    origin = edit.node(new.node).origin
    added = edit.add("aten.copy_.default", (target, new), [written], (Slot(0), Slot(1)), origin=origin)
    rank.follow(added, new.node)


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
