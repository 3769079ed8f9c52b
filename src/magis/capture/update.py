"""The weight update inside the step: each parameter's, as soon as its gradient is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from magis.aten.convert import spec_of
from magis.capture import step_graph
from magis.capture.convert import Converter
from magis.capture.shadow import check_steppable, explained, initial_layout, initial_values
from magis.capture.step_graph import GRADIENT, OPTION, PARAMETER, STATE
from magis.capture.workload import SGD_INPLACE, SGD_INPLACE_RATE, Workload
from magis.errors import UsageError
from magis.ir.args import Slot
from magis.ir.graph import Graph, NodeId, Origin, TensorSpec, Value

Follow = Callable[[NodeId, NodeId], None]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Update:
    """What an update keeps between steps.

    `initial` says for each updated parameter what its state starts from, where it has none yet; `options` are
    the optimizer's options at capture, which are part of the graph (those that are tensors are read each step).
    """

    initial: Mapping[str, Mapping[str, float]]
    options: tuple[Options, ...] = ()

    def state(self, workload: Workload) -> Mapping[str, torch.Tensor]:
        """The optimizer's tensors by name: `optimizer.exp_avg:encoder.weight`, and `optimizer.lr:0` for an option
        of group 0 that is a tensor. State that a first step would create is created in the optimizer.

        Raises UsageError when another option changed since capture."""
        optimizer = workload.update
        if not isinstance(optimizer, torch.optim.Optimizer):
            return {}
        self._check_options(optimizer)
        group_of = _groups(optimizer)
        parameters = dict(workload.model.named_parameters(remove_duplicate=False))
        found: dict[str, torch.Tensor] = {}
        for name, values in self.initial.items():
            parameter = parameters[name]
            options = _options(optimizer.param_groups[group_of[id(parameter)]])
            if not optimizer.state.get(parameter) and values:
                layout = initial_layout(optimizer, options, parameter)
                optimizer.state[parameter] = {
                    key: _filled(like, values[key], parameter.device) for key, like in layout.items()
                }
            state = optimizer.state.get(parameter, {})
            found |= {f"optimizer.{key}:{name}": t for key, t in state.items() if isinstance(t, torch.Tensor)}
        for index, group in enumerate(optimizer.param_groups):
            found |= {f"optimizer.{key}:{index}": value for key, value in _tensors(_options(group)).items()}
        return found

    def _check_options(self, optimizer: torch.optim.Optimizer) -> None:
        for index, (before, group) in enumerate(zip(self.options, optimizer.param_groups)):
            for key, value in before.items():
                now = group.get(key)
                if not isinstance(value, torch.Tensor) and now != value:
                    raise UsageError(
                        f"the optimizer's {key} of group {index} changed from {value} to {now} since the step was "
                        f"captured; make it a tensor ({key}=torch.tensor({value})), which is read in each step, or "
                        "capture again"
                    )


def add_update(workload: Workload, converter: Converter, gradients: dict[str, Value], follow: Follow) -> Update:
    """Adds the update's nodes, each behind its gradient, and takes the gradients that it consumes out of `gradients`
    (by parameter name). Raises CaptureError for an optimizer whose step cannot be captured."""
    if isinstance(workload.update, torch.optim.Optimizer):
        return _OptimizerSteps(workload, workload.update, converter, follow).add(gradients)
    assert workload.update == SGD_INPLACE
    for name in list(gradients):
        _add_sgd(converter, name, gradients.pop(name), follow)
    return Update({})


def _add_sgd(converter: Converter, name: str, gradient: Value, follow: Follow) -> None:
    weight = converter.newest(converter.input_of["parameter", name])
    added = converter.edit.add(
        "aten.add_.Tensor",
        (weight, gradient),
        [converter.written_spec(weight)],
        (Slot(0), Slot(1)),
        (("alpha", SGD_INPLACE_RATE),),
        origin=Origin(name, "", "update"),
    )
    follow(added, gradient.node)


class _OptimizerSteps:
    """Repeats one traced step for every parameter that has a gradient and belongs to the optimizer."""

    def __init__(
        self, workload: Workload, optimizer: torch.optim.Optimizer, converter: Converter, follow: Follow
    ) -> None:
        check_steppable(optimizer)
        self._optimizer, self._converter, self._follow = optimizer, converter, follow
        self._parameters = dict(workload.model.named_parameters(remove_duplicate=False))
        self._group_of = _groups(optimizer)
        if not any(id(parameter) in self._group_of for parameter in self._parameters.values()):
            raise UsageError(f"{workload.name}: the optimizer holds no parameter of the model; pass model.parameters()")
        self._steps: dict[Any, Graph] = {}
        self._initial: dict[Any, Mapping[str, float]] = {}

    def add(self, gradients: dict[str, Value]) -> Update:
        """All updates."""
        initial = {}
        for name in list(gradients):
            group = self._group_of.get(id(self._parameters[name]))
            if group is not None:
                initial[name] = self._add_one(name, group, gradients.pop(name))
        return Update(initial, tuple(map(_options, self._optimizer.param_groups)))

    def _add_one(self, name: str, group: int, gradient: Value) -> Mapping[str, float]:
        converter, parameter = self._converter, self._parameters[name]
        options = _options(self._optimizer.param_groups[group])
        weight = converter.newest(converter.input_of["parameter", name])
        given = {PARAMETER: weight, GRADIENT: gradient}
        state, values = self._state(group, options, parameter)
        for key, tensor in state.items():
            given[STATE + key] = self._input(f"optimizer.{key}:{name}", tensor, parameter.device)
        for key, tensor in _tensors(options).items():
            given[OPTION + key] = self._input(f"optimizer.{key}:{group}", tensor, tensor.device)
        specs = {key: replace(self._spec(value), alias_of=None, writes=False) for key, value in given.items()}
        kind = (group, tuple(specs.items()))
        if kind not in self._steps:
            self._steps[kind] = step_graph.step_graph(self._optimizer, options, specs)
        self._repeat(self._steps[kind], given, name)
        return values

    def _state(
        self, group: int, options: Options, parameter: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, float]]:
        """The parameter's state, real or, if there is none yet, as it will be made; then also its first values."""
        state = self._optimizer.state.get(parameter)
        if state:
            return _tensors(state), {}
        kind = (group, parameter.dtype, tuple(parameter.shape))
        with explained(self._optimizer):
            if kind not in self._initial:
                self._initial[kind] = initial_values(self._optimizer, options, parameter)
            return initial_layout(self._optimizer, options, parameter), self._initial[kind]

    def _input(self, name: str, tensor: torch.Tensor, device: torch.device) -> Value:
        known = self._converter.input_of.get(("state", name))
        if known is not None:
            return known
        place = device if tensor.device.type == "meta" else tensor.device
        spec = replace(spec_of(tensor), device="cpu" if place.type == "meta" else str(place))
        return self._converter.add_state(name, spec)

    def _repeat(self, step: Graph, given: Mapping[str, Value], name: str) -> None:
        edit, origin = self._converter.edit, Origin(name, "", "update")
        values: dict[Value, Value] = {}
        for node in step.nodes.values():
            if node.is_input:
                values[Value(node.id)] = given[node.name]
                continue
            inputs = [values[value] for value in node.inputs]
            outputs: list[TensorSpec | None] = [
                self._converter.written_spec(inputs[spec.alias_of])
                if spec is not None and spec.writes and spec.alias_of is not None
                else spec
                for spec in node.outputs
            ]
            added = edit.add(node.op, inputs, outputs, node.args, node.kwargs, origin=origin)
            self._follow(added, given[GRADIENT].node)
            values[Value(node.id)] = Value(added)

    def _spec(self, value: Value) -> TensorSpec:
        spec = self._converter.edit.node(value.node).outputs[value.output]
        assert spec is not None
        return spec


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Which group holds a parameter, by identity."""
    return {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, without its parameters and what schedulers note down."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names", "initial_lr")}


def _tensors(items: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in items.items() if isinstance(value, torch.Tensor)}


def _filled(like: torch.Tensor, value: float, device: torch.device) -> torch.Tensor:
    place = device if like.device.type == "meta" else like.device
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=place)
    return made if place.type == "meta" else made.fill_(value)
