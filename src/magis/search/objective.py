"""What makes one state better than another (paper section 6.1, `BetterThan`)."""

from __future__ import annotations

from dataclasses import dataclass

SLACK = 1.1
"""How much worse than the best a state may be and still be explored."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Least latency within `max_peak_bytes`; with `max_latency_s`, least peak within that latency. A state beyond
    the limit is judged by how far it is beyond. None: no such limit."""

    max_latency_s: float | None = None
    max_peak_bytes: int | None = None

    def key(self, latency_s: float, peak_bytes: int, slack: float = 1.0) -> tuple[float, float, float]:
        """Smaller is better. `better(a, b, slack)` of the paper is `key(a) < key(b, slack)`."""
        latency_s, peak = slack * latency_s, slack * peak_bytes
        if self.max_latency_s is not None:
            return max(latency_s, self.max_latency_s), peak, latency_s
        return max(peak, self.max_peak_bytes or 0), latency_s, peak

    def met(self, latency_s: float, peak_bytes: int) -> bool:
        """Whether all limits hold."""
        return (self.max_latency_s is None or latency_s <= self.max_latency_s) and (
            self.max_peak_bytes is None or peak_bytes <= self.max_peak_bytes
        )
