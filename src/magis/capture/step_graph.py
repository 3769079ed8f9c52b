"""One parameter's optimizer step as a small graph, traced once for all parameters of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from magis.aten.convert import op_name, overload, spec_of, torch_dtype
from magis.capture import private
from magis.capture.convert import PASS_THROUGH, spec_in, templates
from magis.capture.shadow import explained, shadow_step
from magis.errors import CaptureError, PlanError
from magis.ir.args import Slot
from magis.ir.edit import GraphEdit
from magis.ir.graph import INPUT, Call, Graph, Origin, TensorSpec, Value
from magis.ops.registry import rule_for

PARAMETER, GRADIENT, STATE, OPTION = "parameter", "gradient", "state:", "option:"


def step_graph(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> Graph:
    """The step on fake tensors of these types: "parameter", "gradient", "state:KEY" and, for options that are
    tensors, "option:KEY". The graph's inputs carry these names; parameter and state are written in place.

    Raises CaptureError in one line for an optimizer whose step cannot be expressed so."""
    name = type(optimizer).__name__
    mode = private.KnownValuesMode()
    with mode:
        fakes = {key: _fake(spec) for key, spec in specs.items()}
    rebound: dict[str, int] = {}

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = dict(zip(fakes, tensors))
        state = {key.removeprefix(STATE): t for key, t in given.items() if key.startswith(STATE)}
        before = {key: given.get(OPTION + key, value) for key, value in options.items()}
        after, new = shadow_step(optimizer, before, given[PARAMETER], given[GRADIENT], state)
        given[PARAMETER].grad = None
        _check_plain_numbers(name, before, after)
        fresh = {key: new[key] for key in state if new.get(key) is not state[key]}
        if any(not isinstance(t, torch.Tensor) for t in fresh.values()) or new.keys() != state.keys():
            raise CaptureError(f"{name} keeps state that is not a tensor; take it out of the workload's update")
        rebound.update({STATE + key: position for position, key in enumerate(fresh)})
        return list(fresh.values())

    with explained(optimizer), mode:
        traced = make_fx(run)(*fakes.values())
    return _StepConverter(name, list(fakes), specs).convert(traced.graph, rebound)


def _fake(spec: TensorSpec) -> torch.Tensor:
    extent = spec.offset + 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides))
    storage = torch.empty(max(extent, 0) if spec.numel else 0, dtype=torch_dtype(spec.dtype), device=spec.device)
    return storage.as_strided(spec.shape, spec.strides, spec.offset)


def _check_plain_numbers(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for key, value in after.items():
        if before.get(key) is not value and before.get(key) != value:
            raise CaptureError(f"{name} changes its option {key!r} in every step; take it out of the workload's update")


class _StepConverter:
    """Turns the traced step into a graph: writes into parameter and state stay, temporaries become functional."""

    def __init__(self, name: str, names: list[str], specs: Mapping[str, TensorSpec]) -> None:
        self._optimizer, self._names, self._specs = name, names, specs
        self._edit = GraphEdit(Graph({}, (), (), name))
        self._values: dict[torch.fx.Node, Value] = {}
        self._tensor: dict[torch.fx.Node, torch.fx.Node] = {}  # the node that first stood for the same tensor
        self._viewed: dict[torch.fx.Node, torch.fx.Node] = {}  # view -> what it is a view of
        self._resident: set[torch.fx.Node] = set()
        self._stale: set[torch.fx.Node] = set()

    def convert(self, traced: torch.fx.Graph, rebound: Mapping[str, int]) -> Graph:
        """`rebound` says which result is the new contents of which state."""
        inputs: dict[str, torch.fx.Node] = {}
        for node in traced.nodes:
            if node.op == "placeholder":
                key = self._names[len(inputs)]
                inputs[key] = node
                value = self._edit.add(INPUT, (), [self._specs[key]], (STATE[:-1], key))
                self._start(node, Value(value))
                if key != GRADIENT:
                    self._resident.add(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                for key, position in rebound.items():
                    self._overwrite(inputs[key], node.args[0][position])
            else:
                raise self._refused(f"{node.op} in its step")
        return self._edit.finish()

    def _refused(self, what: str) -> CaptureError:
        return CaptureError(f"{self._optimizer} cannot be captured ({what}): take it out of the workload's update")

    def _start(self, node: torch.fx.Node, value: Value) -> None:
        self._values[node], self._tensor[node] = value, node

    def _call(self, node: torch.fx.Node) -> None:
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
            raise self._refused(str(target))
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise self._refused("random numbers")
        op = op_name(target)
        if op in PASS_THROUGH:
            source: Any = node.args[0]
            self._tensor[node] = self._tensor[source]
        elif target._schema.is_mutable:
            self._in_place(node, op)
        else:
            self._functional(node, op)

    def _functional(self, node: torch.fx.Node, op: str) -> None:
        value = self._add(op, node, None)
        self._start(node, value)
        spec = spec_in(self._edit, value)
        if spec.alias_of is not None:
            made = self._edit.node(value.node).inputs[spec.alias_of]
            self._viewed[node] = next(n for n in self._values if self._values[n] == made)

    def _in_place(self, node: torch.fx.Node, op: str) -> None:
        written = [n for n, a in self._arguments(node) if a.alias_info is not None and a.alias_info.is_write]
        if len(written) != 1 or not isinstance(written[0], torch.fx.Node):
            raise self._refused(op)
        holder = self._tensor[written[0]]
        if holder in self._viewed or holder in self._viewed.values():
            raise self._refused(f"{op} on a view")
        self._tensor[node] = holder
        if holder in self._resident:
            self._values[holder] = self._add(op, node, holder)
            return
        functional = op.replace("_.", ".", 1)
        if functional == op:
            raise self._refused(op)
        try:
            result = overload(functional)(*_fakes(node.args), **_fakes(node.kwargs))
        except (PlanError, TypeError, RuntimeError):
            raise self._refused(op) from None
        if not isinstance(result, torch.Tensor) or spec_of(result) != spec_of(node.meta["val"]):
            raise self._refused(op)
        self._values[holder] = self._add(functional, node, None)

    def _overwrite(self, state: torch.fx.Node, new: torch.fx.Node) -> None:
        """A state that the step replaces by a new tensor is written instead."""
        target, source = self._values[state], self._values[self._tensor[new]]
        if spec_in(self._edit, target).shape != spec_in(self._edit, source).shape:
            raise self._refused("a state that changes its shape")
        spec = replace(spec_in(self._edit, target), alias_of=0, writes=True, storage_bytes=0)
        self._edit.add("aten.copy_.default", (target, source), [spec], (Slot(0), Slot(1)))

    def _arguments(self, node: torch.fx.Node) -> list[tuple[Any, Any]]:
        target: Any = node.target
        arguments = target._schema.arguments
        return [*zip(node.args, arguments), *((node.kwargs[a.name], a) for a in arguments if a.name in node.kwargs)]

    def _add(self, op: str, node: torch.fx.Node, written: torch.fx.Node | None) -> Value:
        inputs: list[Value] = []
        args, kwargs = templates(node, inputs, lambda argument: self._values[self._tensor[argument]])
        if written is not None:
            alias: int | None = inputs.index(self._values[written])
        else:
            alias = self._alias(node, inputs)
        spec = spec_of(node.meta["val"], alias, written is not None)
        call = Call(op, args, kwargs, tuple(spec_in(self._edit, value) for value in inputs), (spec,))
        spec = replace(spec, storage_bytes=rule_for(op).storage_bytes(call, 0))
        return Value(self._edit.add(op, inputs, [spec], args, kwargs, origin=Origin("", "", "update")))

    def _alias(self, node: torch.fx.Node, inputs: list[Value]) -> int | None:
        target: Any = node.target
        if target._schema.is_mutable:
            return None  # of a temporary, now functional
        storage = node.meta["val"].untyped_storage()._cdata
        for source in node.all_input_nodes:
            if source.meta["val"].untyped_storage()._cdata == storage:
                return inputs.index(self._values[self._tensor[source]])
        return None


def _fakes(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda a: a.meta["val"] if isinstance(a, torch.fx.Node) else a, value)
