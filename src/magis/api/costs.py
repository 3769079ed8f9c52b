"""What operators cost on the device that is planned for: simulated by a formula, or measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from magis.api.limits import host_bytes
from magis.cost.device import MODEL_VERSION
from magis.cost.device import device as device_spec
from magis.cost.model import AnalyticCost, Source
from magis.ir.graph import Call
from magis.sim.links import HOST_MEMORY_BYTES, Host

if TYPE_CHECKING:
    from magis.cost.measured import MeasuredCost

MEASURING_S = 60.0
"""For how long operators are measured at most, before, between and after searches together."""
LEAST_S = 5.0
"""For how long they may be measured each time in any case."""
Progress = Callable[[str], None]
"""Told in a few words what is going on; called often."""


def silent(message: str) -> None:
    """Shows no progress."""


class Costs:
    """Costs on a device by name: "cpu" (this machine, one thread, measured), a preset or a `.toml` file
    (simulated). `words` says on what they rest; for measured ones it is known after `prepare`. `host` is the memory
    to swap to: on a CPU there is some only with `swap_dir`, a folder whose speed is measured."""

    def __init__(self, device: str, swap_dir: Path | None = None, host_memory: int | str | None = None) -> None:
        """Raises UsageError, in one line, for an unknown device or a damaged device file, and for a folder or a size
        that nothing can be swapped to."""
        memory_bytes = HOST_MEMORY_BYTES if host_memory is None else host_bytes(host_memory)
        self._model: AnalyticCost | MeasuredCost
        self._left_s = MEASURING_S
        if device == "cpu":
            from magis.backend.measure import measured_cost

            with _one_thread():
                self._model = measured_cost(device)
            self.device, self.words = device, "measured"
            if swap_dir is not None:
                from magis.backend.swapping import link_bytes_per_s

                self._model.link_bytes_per_s = link_bytes_per_s(swap_dir)
        else:
            spec = device_spec(device)
            self._model = AnalyticCost(spec)
            self.device, self.words = spec.name, f"simulated by device model v{MODEL_VERSION}"
        there = device != "cpu" or swap_dir is not None
        self.host = Host(self._model.transfer_s, memory_bytes) if there else None

    @property
    def source(self) -> Source:
        """Label of every latency that rests on these costs."""
        return self._model.source

    def prepare(self, calls: Iterable[Call], progress: Progress = silent) -> None:
        """Measures the calls that are not known yet, for at most a minute in all; nothing is done when simulated."""
        if not isinstance(self._model, AnalyticCost):
            started = time.monotonic()
            with _one_thread():
                self.words = f"operator calls: {self._model.prepare(calls, progress, self._left_s)}"
            self._left_s = max(self._left_s - (time.monotonic() - started), LEAST_S)

    def latency_s(self, call: Call) -> float:
        """Seconds that one launch takes."""
        return self._model.latency_s(call)

    def workspace_bytes(self, call: Call) -> int:
        """Bytes that the call allocates and frees while it runs."""
        return self._model.workspace_bytes(call)

    def transfer_s(self, nbytes: int) -> float:
        """Seconds that a copy of so many bytes to the host, or back, takes on its own link."""
        return self._model.transfer_s(nbytes)

    def table_hash(self) -> str:
        """Identifies the costs that were used."""
        return self._model.table_hash()


def cost_model(device: str, swap_dir: Path | None = None, host_memory: int | str | None = None) -> Costs:
    """The costs on a device, see `Costs`. Raises UsageError, in one line, for an unknown device or a damaged device
    file, and for a folder or a size that nothing can be swapped to."""
    return Costs(device, swap_dir, host_memory)


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch computes in one thread while inside, as `run` does."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
