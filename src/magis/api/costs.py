"""What operators cost on the device that is planned for: simulated by a formula, or measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from magis.cost.device import MODEL_VERSION
from magis.cost.device import device as device_spec
from magis.cost.model import AnalyticCost, CostModel, Source
from magis.ir.graph import Call

Progress = Callable[[str], None]
"""Told in a few words what is going on; called often."""


def silent(message: str) -> None:
    """Shows no progress."""


class Costs:
    """Costs on a device by name: "cpu" (measured), a preset or a `.toml` file (simulated)."""

    def __init__(self, device: str) -> None:
        """Raises UsageError, in one line, for an unknown device or a damaged device file."""
        spec = device_spec(device)
        self.device = spec.name
        self.words = f"simulated by device model v{MODEL_VERSION}"
        self._model: CostModel = AnalyticCost(spec)

    @property
    def source(self) -> Source:
        """Label of every latency that rests on these costs."""
        return self._model.source

    def prepare(self, calls: Iterable[Call], progress: Progress = silent) -> None:
        """Measures the calls that are not known yet, for at most a minute. Nothing when simulated."""

    def latency_s(self, call: Call) -> float:
        """Seconds that one launch takes."""
        return self._model.latency_s(call)

    def workspace_bytes(self, call: Call) -> int:
        """Bytes that the call allocates and frees while it runs."""
        return self._model.workspace_bytes(call)

    def table_hash(self) -> str:
        """Identifies the costs that were used."""
        return self._model.table_hash()


def cost_model(device: str) -> Costs:
    """The costs on a device. Raises UsageError, in one line, for an unknown device or a damaged device file."""
    return Costs(device)
