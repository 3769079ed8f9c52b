"""What the simulator predicts. A measurement is another type (`magis.backend.measure`)."""

from __future__ import annotations

from dataclasses import dataclass

from magis.ir.graph import Value


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted latency and memory of one step.

    `peak_bytes` is everything live at the worst moment, residents included; `resident_bytes` is what the
    caller's tensors (parameters, buffers, state, batch) hold all the time; `hotspots` are the values live at
    any worst moment, residents left out; `host_peak_bytes` is the most that is swapped out at a time.
    """

    latency_s: float
    peak_bytes: int
    resident_bytes: int
    hotspots: frozenset[Value]
    host_peak_bytes: int = 0

    @property
    def step_peak_bytes(self) -> int:
        """The peak without what was live before the step."""
        return self.peak_bytes - self.resident_bytes
