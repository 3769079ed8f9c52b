"""Graphs for tests: recorded while plain PyTorch code runs on real tensors, backward pass included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from magis.aten.convert import literal, op_name, spec_of
from magis.fission.tree import Program
from magis.ir.args import Slot
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph, Origin, Value
from magis.ir.structure import topological_order
from magis.ir.verify import verify
from magis.lower.lower import lower
from magis.lower.routine import Routine

EMPTY = Graph({}, ())


@dataclass
class Recorded:
    """A graph and the tensors it was recorded with, in the order of its input nodes."""

    graph: Graph
    inputs: list[torch.Tensor]

    def routine(self) -> Routine:
        """Lowered in a valid order, the recorded one unless ids changed."""
        order = topological_order(self.graph)
        verify(self.graph, order)
        return lower(Program(self.graph), order)

    def fresh_inputs(self) -> list[torch.Tensor]:
        """Copies of the inputs, storages shared as in the originals."""
        storages: dict[int, torch.UntypedStorage] = {}
        copies = []
        for tensor in self.inputs:
            storage = tensor.untyped_storage()
            mine = storages.setdefault(storage._cdata, storage.clone())
            copy = torch.empty(0, dtype=tensor.dtype)
            copies.append(copy.set_(mine, tensor.storage_offset(), tensor.shape, tensor.stride()))
        return copies


def record(
    code: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    kinds: Sequence[str] = (),
    module: str = "",
) -> Recorded:
    """Runs `code(*inputs)` on copies and records every operator; it returns a tensor or a flat tuple of them."""
    given = Recorded(EMPTY, [t.detach() for t in inputs]).fresh_inputs()
    for tensor, original in zip(given, inputs):
        tensor.requires_grad_(original.requires_grad)
    recorder = _Recorder(module)
    for number, tensor in enumerate(given):
        recorder.input(tensor, kinds[number] if kinds else "batch", f"in{number}")
    with recorder:
        results = code(*given)
    outputs = [recorder.values[id(t)] for t in tree_flatten(results)[0] if isinstance(t, torch.Tensor)]
    recorder.edit.set_outputs(outputs)
    graph = recorder.edit.finish()
    graph = Graph(graph.nodes, graph.outputs, tuple(f"out{i}" for i in range(len(outputs))), "recorded")
    return Recorded(graph, [t.detach() for t in inputs] + recorder.constants)


class _Recorder(TorchDispatchMode):
    """Puts every operator that runs into a graph. Keeps all tensors, so that their identities stay theirs."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.edit = GraphEdit(EMPTY)
        self.values: dict[int, Value] = {}
        self.kept: list[Any] = []
        self.constants: list[torch.Tensor] = []
        self.roots: dict[int, Value] = {}
        self.module = module
        self.draws = 0

    def input(self, tensor: torch.Tensor, kind: str, name: str) -> Value:
        storage = tensor.untyped_storage()._cdata
        root = self.roots.get(storage)
        shared = () if root is None else (root,)
        slot = () if root is None else (Slot(0),)
        spec = spec_of(tensor, alias_of=None if root is None else 0)
        value = Value(self.edit.add("input", shared, [spec], (kind, name, *slot)))
        self.roots.setdefault(storage, value)
        self.values[id(tensor)] = value
        self.kept.append(tensor)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        template = [self._template(value, tensors) for value in args]
        keywords = tuple((name, self._template(value, tensors)) for name, value in kwargs.items())
        inputs = [self._value(tensor) for tensor in tensors]
        out = func(*args, **kwargs)
        flat = [out] if not isinstance(out, (tuple, list)) else list(out)
        storages = [t.untyped_storage()._cdata for t in tensors]
        written = {id(args[i]) for i, a in enumerate(func._schema.arguments) if a.is_write and i < len(args)}
        specs = []
        for result in flat:
            if not isinstance(result, torch.Tensor):
                specs.append(None)
                continue
            own = result.untyped_storage()._cdata
            alias = storages.index(own) if own in storages else None
            specs.append(spec_of(result, alias, writes=id(result) in written))
        stream = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            stream, self.draws = self.draws, self.draws + 1
        node = self.edit.add(
            op_name(func), inputs, specs, tuple(template), keywords, stream=stream, origin=Origin(self.module)
        )
        for index, result in enumerate(flat):
            if isinstance(result, torch.Tensor):
                self.values[id(result)] = Value(node, index)
        self.kept.append((args, out))
        return out

    def _value(self, tensor: torch.Tensor) -> Value:
        if id(tensor) not in self.values:
            self.constants.append(tensor.detach().clone())
            return self.input(tensor, "constant", f"constant{len(self.constants)}")
        return self.values[id(tensor)]

    def _template(self, value: Any, tensors: list[torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return Slot(len(tensors) - 1)
        if isinstance(value, (tuple, list)):
            return tuple(self._template(item, tensors) for item in value)
        return literal(value)
