"""How fast the search is: variants evaluated in a second, and what it reaches in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from magis.api.plan import plan
from magis.bench.limits import DEVICE, HALF, LIMITS, ROUNDING

SECONDS = {"bert": 5.0, "btlm": 20.0}
"""In how many seconds of search a network has to be as small as in the grid, at most 10 % slower."""
PUBLISHED = {"bert": 101.0, "btlm": 46.0}
"""States that the published code evaluates in a second."""
WANTED = {"bert": 2000.0, "btlm": 800.0}
"""Variants that have to be evaluated in a second."""


@dataclass(frozen=True)
class Speed:
    """One network: seconds until the plan is there, of which for the search; variants evaluated and programs made in
    that; the share of eager's peak reached, beside the grid's."""

    model: str
    total_s: float
    search_s: float
    evaluated: int
    states: int
    memory_ratio: float
    grid: float

    @property
    def evaluated_per_s(self) -> float:
        """Variants for each second of the search, whatever else it did."""
        return self.evaluated / self.search_s

    @property
    def good(self) -> bool:
        """Whether it is as fast and as good as it has to be."""
        return self.evaluated_per_s >= WANTED[self.model] and self.memory_ratio < self.grid + ROUNDING


def speeds(models: Sequence[str] = (), iterations: int | None = None) -> Iterator[Speed]:
    """Figures, network by network; of these only, if any are given. Raises what `plan` raises."""
    limit = LIMITS[0]
    for model in models or SECONDS:
        started = time.perf_counter()
        found = plan(
            model,
            device=DEVICE,
            max_slowdown=limit.max_slowdown,
            budget_s=SECONDS[model],
            iterations=iterations,
            accumulate="same" if model in HALF else "float32",
        )
        search = found.search
        total = time.perf_counter() - started
        ratio = found.memory_ratio
        yield Speed(model, total, search.seconds, search.evaluated, search.states, ratio, limit.grid[model])
