"""From the traced joint graph to the core's graph: aliases, draws, origins; noise nodes left out."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from magis.aten.convert import literal, op_name, spec_of
from magis.capture import private
from magis.capture.trace import Trace
from magis.errors import CaptureError
from magis.ir.args import Arg, Slot, Symbol
from magis.ir.edit import GraphEdit
from magis.ir.graph import INPUT, Call, Graph, NodeId, Origin, TensorSpec, Value
from magis.ops.registry import rule_for

# They copy nothing in a functional graph.
_SCATTER = (
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
    torch.ops.aten.as_strided_scatter.default,
)
# Lazy views that every kernel resolves into a copy of its own: the copy is made once, and counted.
_RESOLVED = {"aten._conj.default": "aten._conj_physical.default", "aten._neg_view.default": "aten.neg.default"}
PASS_THROUGH = {
    "aten.detach.default",
    "aten.alias.default",
    "aten.lift_fresh_copy.default",
    "aten.lift_fresh.default",
}


class Converter:
    """Builds the core's graph node by node. `edit` holds it; `value_of` maps traced nodes to values.

    Inputs are created on first sight, one for each distinct tensor: tied parameters, and a tensor that a
    batch holds twice, are one input; inputs that share a storage own its bytes once."""

    def __init__(self, traced: Trace) -> None:
        self._trace = traced
        self.edit = GraphEdit(Graph({}, (), (), traced.name))
        self.value_of: dict[torch.fx.Node, Any] = {}
        self.input_of: dict[tuple[str, str], Value] = {}
        self._of_tensor: dict[int, Value] = {}
        self._owner_of_storage: dict[int, Value] = {}
        self._storage: dict[Value, int] = {}  # the traced storage in which each value lies
        self._same_storage: dict[int, int] = {}  # traced storages that are one when the graph runs
        self.written_back: list[tuple[NodeId, NodeId]] = []  # (write into a buffer, maker of its contents)
        self.zeros: set[torch.fx.Node] = set()  # gradients that reach an overwritten parameter from later steps
        self._newest: dict[Value, Value] = {}  # input -> its version after the writes so far
        self._draws = 0

    def convert(self) -> None:
        """Converts every traced node in order; results are left to the caller."""
        for node in self._trace.graph.nodes:
            match node.op:
                case "placeholder":
                    self._placeholder(node)
                case "get_attr":
                    constant = self._trace.constants[node.target]
                    self.value_of[node] = self.add_input("constant", str(node.target), constant, node.meta["val"])
                case "call_function":
                    self._call(node)

    def add_input(self, kind: str, name: str, original: torch.Tensor, traced: torch.Tensor | None = None) -> Value:
        """The input that stands for a tensor of the caller's; a new one unless it already has one."""
        known = self._of_tensor.get(id(original))
        if known is None:
            storage = original.untyped_storage()._cdata
            owner = self._owner_of_storage.get(storage)
            inputs = () if owner is None else (owner,)
            spec = spec_of(original, None if owner is None else 0)
            if original.device.type == "meta":
                spec = _on_cpu(spec)
            slots = tuple(Slot(i) for i in range(len(inputs)))
            known = Value(self.edit.add(INPUT, inputs, [spec], (kind, name, *slots)))
            self._of_tensor[id(original)] = known
            self._owner_of_storage.setdefault(storage, known)
        if traced is not None:
            storage = traced.untyped_storage()._cdata
            self._same_storage[storage] = self._storage.setdefault(known, storage)
        self.input_of[kind, name] = known
        return known

    def add_state(self, name: str, spec: TensorSpec) -> Value:
        """An input that the optimizer keeps from step to step."""
        made = Value(self.edit.add(INPUT, (), [spec], ("state", name)))
        self.input_of["state", name] = made
        return made

    def newest(self, target: Value) -> Value:
        """The version of an input after all writes so far."""
        return self._newest.get(target, target)

    def written_spec(self, target: Value) -> TensorSpec:
        """The type of an input's next version."""
        return replace(spec_in(self.edit, target), alias_of=0, writes=True, storage_bytes=0)

    def write(self, target: Value, new: Value) -> NodeId:
        """Adds a copy of a value over an input's newest version."""
        origin = self.edit.node(new.node).origin
        target, first = self.newest(target), target
        spec = self.written_spec(target)
        added = self.edit.add("aten.copy_.default", (target, new), [spec], (Slot(0), Slot(1)), origin=origin)
        self._newest[first] = Value(added)
        return added

    def _placeholder(self, node: torch.fx.Node) -> None:
        role, what = private.input_role(node)
        if role == "tangent":
            if what == "loss":
                return  # made where backward begins: see `_tangent`
            self.zeros.add(node)
            return
        if role == "unknown":
            raise CaptureError(
                f"{self._trace.name}: the step overwrites tensors that share memory with others ({what}); "
                "pass copies (.clone()) or keep them apart"
            )
        name = self._trace.batch_names[what] if role == "batch" else str(what).removeprefix("model.")
        original = self._trace.originals[role, name]
        self.value_of[node] = self.add_input(role, name, original, node.meta["val"])

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            self._getitem(node)
            return
        op = op_name(node.target)
        if op.startswith("profiler."):
            return  # marks for the profiler compute nothing
        if op in PASS_THROUGH or (op == "aten.clone.default" and self._is_idle_clone(node)):
            self._pass_through(node)
            return
        summands = [a for a in node.args if a not in self.zeros]
        if op == "aten.add.Tensor" and len(summands) == 1:
            self.value_of[node] = self.value_of[summands[0]]  # type: ignore[index]
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(f"{_origin(node).module or 'the step'}: {node.target} is no plain operator of PyTorch")
        if op == "aten.copy.default" and self._is_idle_copy(node):
            self._pass_through(node, 1)
            return
        self._adopt_view_of_constant(node)
        try:
            self._operator(node, _RESOLVED.get(op, op))
        except (TypeError, KeyError) as error:
            place = f"{_origin(node).module or 'the step'} ({_origin(node).line})"
            raise CaptureError(f"{place}: {node.target} cannot be captured ({error})") from error

    def _pass_through(self, node: torch.fx.Node, argument: int = 0) -> None:
        """The node's result is its argument, whatever storage tracing gave it."""
        value = self.value_of[node] = self.value_of[node.args[argument]]  # type: ignore[index]
        self._same_storage[node.meta["val"].untyped_storage()._cdata] = self._storage[value]

    def _adopt_view_of_constant(self, node: torch.fx.Node) -> None:
        """A constant becomes a fake tensor anew wherever it is used: of its views, the schema tells the storage."""
        target: Any = node.target
        source: Any = node.args[0] if node.args else None
        is_view = any(result.alias_info is not None for result in target._schema.returns)
        if isinstance(source, torch.fx.Node) and source.op == "get_attr" and is_view and not target._schema.is_mutable:
            for item in torch.utils._pytree.tree_leaves(node.meta["val"]):
                self._same_storage[item.untyped_storage()._cdata] = self._storage[self.value_of[source]]

    def _storage_of(self, tensor: torch.Tensor) -> int:
        storage: int = tensor.untyped_storage()._cdata
        return self._same_storage.get(storage, storage)

    def _is_idle_clone(self, node: torch.fx.Node) -> bool:
        """Whether a clone keeps layout and copies a temporary: tracing makes one of each idle dropout.

        A clone of a caller's tensor stays, since that tensor may be overwritten later in the step."""
        source: Any = node.args[0]
        value = self.value_of.get(source)
        if not isinstance(value, Value) or self._lies_in_input(value):
            return False
        before, after = source.meta["val"], node.meta["val"]
        return bool(before.stride() == after.stride() and before.storage_offset() == after.storage_offset())

    def _is_idle_copy(self, node: torch.fx.Node) -> bool:
        """Whether the functional form of a copy into a tensor gives just what was copied: a temporary of the same
        type, whose layout matters to no reader."""
        source: Any = node.args[1]
        value = self.value_of.get(source)
        if not isinstance(value, Value) or self._lies_in_input(value):
            return False
        before, after = source.meta["val"], node.meta["val"]
        layout = before.stride() == after.stride() and before.storage_offset() == after.storage_offset()
        scattered = all(user.target in _SCATTER and user.args[1] is node for user in node.users)
        return bool(before.shape == after.shape and before.dtype == after.dtype and (layout or scattered))

    def _lies_in_input(self, value: Value) -> bool:
        storage = self._storage[value]
        return any(self._storage.get(known) == storage for known in self._of_tensor.values())

    def _tangent(self, node: torch.fx.Node) -> Value:
        """The gradient of the loss with respect to itself: 1."""
        spec = spec_of(node.meta["val"])
        kwargs: tuple[tuple[str, Arg], ...] = (("dtype", spec.dtype), ("device", Symbol("device", spec.device)))
        origin = Origin("", "", "backward")
        made = Value(self.edit.add("aten.full.default", (), [spec], (spec.shape, 1.0), kwargs, origin=origin))
        self._storage[made] = self._storage_of(node.meta["val"])
        return made

    def _getitem(self, node: torch.fx.Node) -> None:
        parent, index = node.args
        found = self.value_of[parent]  # type: ignore[index]
        self.value_of[node] = found[index] if isinstance(found, tuple) else found

    def _operator(self, node: torch.fx.Node, op: str) -> None:
        if op == "aten.bernoulli.p" and not node.meta["val"].is_contiguous():
            self._permuted_mask(node)
            return
        inputs: list[Value] = []
        args, kwargs = templates(node, inputs, self._found)
        result = node.meta.get("val")
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        written = self._written(node)
        _refuse_sparse(node, results)
        resolved = op in _RESOLVED.values() and results[0].is_conj() | results[0].is_neg()
        items = [torch.empty_like(item) for item in results] if resolved else results
        specs = [self._result_spec(item, inputs, index in written) for index, item in enumerate(items)]
        call = Call(op, args, kwargs, tuple(spec_in(self.edit, value) for value in inputs), tuple(specs))
        specs = [
            spec and replace(spec, storage_bytes=rule_for(op).storage_bytes(call, i)) for i, spec in enumerate(specs)
        ]
        stream = self._stream(node, call)
        node_id = self.edit.add(op, inputs, specs, args, kwargs, stream=stream, origin=self._origin(node, inputs))
        values = tuple(Value(node_id, i) if isinstance(item, torch.Tensor) else item for i, item in enumerate(results))
        for item, value in zip(results, values):
            if isinstance(value, Value):
                self._storage[value] = self._storage_of(item)
        self.value_of[node] = values if isinstance(result, (tuple, list)) else values[0]
        if written:
            self._newest[inputs[0]] = Value(node_id)
            self.written_back.append((node_id, max(value.node for value in inputs[1:])))

    def _permuted_mask(self, node: torch.fx.Node) -> None:
        """A random mask in another memory order: drawn row-major, seen through a permutation.

        (`bernoulli` itself has no memory order; eager fills an `empty_like` of its input in place.)"""
        source: Any = node.args[0]
        value, origin = self.value_of[source], _origin(node)
        result = spec_of(node.meta["val"])
        order = sorted(range(len(result.shape)), key=lambda d: (-result.strides[d], -result.shape[d], d))
        back = tuple(order.index(d) for d in range(len(order)))
        add, permuted = self.edit.add, _permuted(spec_in(self.edit, value), order)
        view = Value(add("aten.permute.default", [value], [permuted], (Slot(0), tuple(order)), origin=origin))
        drawn = _permuted(replace(result, alias_of=None), order)
        drawn = replace(drawn, alias_of=None, storage_bytes=result.storage_bytes)
        args = (Slot(0), *map(literal, node.args[1:]))
        mask = add("aten.bernoulli.p", [view], [drawn], args, stream=self._next_draw(), origin=origin)
        seen = replace(result, alias_of=0, storage_bytes=0)
        made = Value(add("aten.permute.default", [Value(mask)], [seen], (Slot(0), back), origin=origin))
        self.value_of[node] = made
        self._storage[made] = self._storage[Value(mask)] = self._storage_of(node.meta["val"])

    def _written(self, node: torch.fx.Node) -> frozenset[int]:
        """Which results are the new contents of an argument: tracing leaves only writes into buffers."""
        target: Any = node.target
        if not target._schema.is_mutable:
            return frozenset()
        if op_name(target) != "aten.copy_.default":
            raise CaptureError(f"{_origin(node).module or 'the step'}: {target} writes into a temporary")
        refuse_twofold_write(node)
        return frozenset((0,))

    def _found(self, node: torch.fx.Node) -> Any:
        """What stands for a traced node that is an argument: its value, or a literal."""
        if node in self.zeros:
            raise CaptureError("the step overwrites a parameter in a way that needs its gradient; use no_grad()")
        if node not in self.value_of:
            self.value_of[node] = self._tangent(node)
        return self.value_of[node]

    def _result_spec(self, item: Any, inputs: list[Value], writes: bool) -> TensorSpec | None:
        if not isinstance(item, torch.Tensor):
            return None
        storage = self._storage_of(item)
        alias = next((i for i, value in enumerate(inputs) if self._storage.get(value) == storage), None)
        return spec_of(item, alias, writes)

    def _stream(self, node: torch.fx.Node, call: Call) -> int | None:
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded not in target.tags or not rule_for(call.op).draws(call):
            return None
        return self._next_draw()

    def _next_draw(self) -> int:
        self._draws += 1
        return self._draws - 1

    def _origin(self, node: torch.fx.Node, inputs: list[Value]) -> Origin:
        """The node's own origin; where tracing lost it, the place that made the latest of its inputs."""
        own = _origin(node)
        if own.module or own.line:
            return own
        makers = [self.edit.node(value.node) for value in inputs]
        latest = max((m for m in makers if not m.is_input), key=lambda m: m.id, default=None)
        return own if latest is None else replace(latest.origin, direction=own.direction)


def templates(
    node: torch.fx.Node, inputs: list[Value], found: Callable[[torch.fx.Node], Any]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """A traced node's arguments and keywords as the core writes them. `found` gives what stands for a node: a literal,
    or a value, which is then one of the `inputs`."""

    def template(value: Any) -> Arg:
        if isinstance(value, (tuple, list)):
            return tuple(map(template, value))
        value = found(value) if isinstance(value, torch.fx.Node) else value
        if not isinstance(value, Value):
            return literal(value)
        if value not in inputs:
            inputs.append(value)
        return Slot(inputs.index(value))

    return tuple(map(template, node.args)), tuple((key, template(arg)) for key, arg in node.kwargs.items())


def spec_in(edit: GraphEdit, value: Value) -> TensorSpec:
    """The type of a value in a graph that is being made."""
    spec = edit.node(value.node).outputs[value.output]
    assert spec is not None
    return spec


def _refuse_sparse(node: torch.fx.Node, results: list[Any]) -> None:
    for item in results:
        if isinstance(item, torch.Tensor) and item.layout != torch.strided:
            origin = _origin(node)
            raise CaptureError(
                f"{origin.module or 'the step'} ({origin.line}): {node.target} makes a {item.layout} tensor, which "
                "cannot be captured; use dense tensors (of an embedding: sparse=False)"
            )


def refuse_twofold_write(node: torch.fx.Node) -> None:
    """Raises CaptureError for a state that eager updates once in the forward pass and once in a recomputation."""
    notes = private.annotation(node)
    if notes.get("inside") == "checkpoint":
        raise CaptureError(
            f"{notes.get('module', '')} ({notes.get('line', '')}): a buffer is updated inside torch.utils.checkpoint, "
            "which runs it twice; switch checkpointing off, magis decides itself what to recompute"
        )


def _permuted(spec: TensorSpec, order: list[int]) -> TensorSpec:
    """A view with the dimensions in another order."""
    shape, strides = tuple(spec.shape[d] for d in order), tuple(spec.strides[d] for d in order)
    return replace(spec, shape=shape, strides=strides, alias_of=0, storage_bytes=0)


def _on_cpu(spec: TensorSpec) -> TensorSpec:
    return replace(spec, device="cpu")


def _origin(node: torch.fx.Node) -> Origin:
    notes = private.annotation(node)
    direction = "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"
    return Origin(notes.get("module", ""), notes.get("line", ""), direction)
