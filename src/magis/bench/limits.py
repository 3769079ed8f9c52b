"""The published networks under the published limits, simulated on an RTX 3090, beside a simple grid of plans.

The grid is what one would try first: the whole step in 1, 2, 4, ... parts; in each, swapping what is dearest to compute
again as far as the link can hide it, then dropping what saves most bytes for a second until the time is used up. Plans
have to be at least as good everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from magis.api.plan import Plan, plan

DEVICE = "rtx3090"
BUDGET_S = 60.0
HALF = ("gptneo", "btlm")
"""Networks in bfloat16: their gradients are summed in it, as in the grid."""
ROUNDING = 5e-4
"""Figures are compared at three decimals."""


@dataclass(frozen=True)
class Limit:
    """One line of the table: what is asked for, and for each network what the grid reaches: the share of eager's peak
    under a limit on time, the overhead in time under a limit on memory."""

    name: str
    grid: dict[str, float]
    max_slowdown: float | None = None
    memory: str | None = None

    def figure(self, found: Plan) -> float:
        """What is compared."""
        return found.memory_ratio if self.max_slowdown is not None else found.latency_overhead


_MODELS = ("resnet50", "bert", "vit", "unet", "unetpp", "gptneo", "btlm")


def _grid(*values: float) -> dict[str, float]:
    return dict(zip(_MODELS, values, strict=True))


LIMITS = (
    Limit("time <= 1.10", _grid(0.297, 0.162, 0.273, 0.066, 0.062, 0.203, 0.129), max_slowdown=1.10),
    Limit("time <= 1.05", _grid(0.503, 0.300, 0.414, 0.111, 0.123, 0.244, 0.234), max_slowdown=1.05),
    Limit("memory <= 80%", _grid(0.022, 0.006, 0.005, 0.004, 0.004, 0.000, 0.000), memory="80%"),
    Limit("memory <= 40%", _grid(0.092, 0.045, 0.055, 0.010, 0.012, 0.019, 0.017), memory="40%"),
)


@dataclass(frozen=True)
class Cell:
    """One network under one limit: what was reached, beside the grid; `regions` are the dimensions that run in parts,
    outer before inner, with their parts."""

    model: str
    limit: str
    figure: float
    grid: float
    met: bool
    memory_ratio: float
    latency_overhead: float
    regions: tuple[str, ...]
    evaluated: int
    seconds: float
    best_at_s: float

    @property
    def good(self) -> bool:
        """Whether the limit holds and the figure is no worse than the grid's."""
        return self.met and self.figure < self.grid + ROUNDING


def cells(models: Sequence[str] = (), budget_s: float = BUDGET_S, iterations: int | None = None) -> Iterator[Cell]:
    """The table, cell by cell; of these networks only, if any are given. Raises what `plan` raises."""
    for model in models or _MODELS:
        for limit in LIMITS:
            accumulate = "same" if model in HALF else "float32"
            found = plan(
                model,
                device=DEVICE,
                max_slowdown=limit.max_slowdown,
                memory_limit=limit.memory,
                budget_s=budget_s,
                iterations=iterations,
                accumulate=accumulate,
            )
            yield _cell(model, limit, found)


def _cell(model: str, limit: Limit, found: Plan) -> Cell:
    search = found.search
    return Cell(
        model,
        limit.name,
        limit.figure(found),
        limit.grid[model],
        found.met,
        found.memory_ratio,
        found.latency_overhead,
        tuple(f"{region.dimension}={region.parts}" for region in found.regions),
        search.evaluated,
        search.seconds,
        search.best_at_s,
    )
