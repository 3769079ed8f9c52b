"""The weight update inside the step: each parameter's, as soon as its gradient is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from magis.capture.convert import Converter
from magis.capture.workload import SGD_INPLACE, SGD_INPLACE_RATE, Workload
from magis.errors import CaptureError
from magis.ir.args import Slot
from magis.ir.graph import NodeId, Origin, Value

Follow = Callable[[NodeId, NodeId], None]


@dataclass(frozen=True)
class Update:
    """What an update keeps between steps."""

    def state(self, workload: Workload) -> Mapping[str, torch.Tensor]:
        """The optimizer's tensors by name."""
        return {}


def add_update(workload: Workload, converter: Converter, gradients: Mapping[str, Value], follow: Follow) -> Update:
    """Adds the update's nodes; each follows its gradient. Raises CaptureError for an unknown update."""
    if workload.update != SGD_INPLACE:
        raise CaptureError(f"the update {type(workload.update).__name__} cannot be captured")
    for name, gradient in gradients.items():
        _add_sgd(converter, name, gradient, follow)
    return Update()


def _add_sgd(converter: Converter, name: str, gradient: Value, follow: Follow) -> None:
    weight = converter.input_of["parameter", name]
    spec = converter.edit.node(weight.node).outputs[weight.output]
    assert spec is not None
    written = replace(spec, alias_of=0, writes=True, storage_bytes=0)
    added = converter.edit.add(
        "aten.add_.Tensor",
        (weight, gradient),
        [written],
        (Slot(0), Slot(1)),
        (("alpha", SGD_INPLACE_RATE),),
        origin=Origin(name, "", "update"),
    )
    follow(added, gradient.node)
