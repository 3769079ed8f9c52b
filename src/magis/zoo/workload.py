"""What a zoo entry is: its sizes, its limits and the function that builds it. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Workload = tuple[Any, ...]
"""`(model, loss_fn, batch)`, or the same with the update as a fourth item.

`loss_fn(model, batch)` returns the scalar loss. The update is `None`, a torch optimizer, or `"sgd-inplace"`:
`weight.add_(gradient, alpha=-0.01)` for each weight as soon as its gradient exists.
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Batch size, tokens in a sequence, side of a square image; None: the model has no such size."""

    batch: int
    seq: int | None = None
    image: int | None = None


Builder = Callable[[Sizes], Workload]


@dataclass(frozen=True, slots=True)
class ZooModel:
    """One workload by name. `build(sizes)` creates every tensor on the ambient device, meta included."""

    name: str
    family: str
    description: str
    sizes: Sizes
    build: Builder
    fake_only: bool = False
    requires: str | None = None
    least: Sizes = Sizes(1, 1, 1)
    image_multiple: int = 1


def with_toy(full: ZooModel, sizes: Sizes, build: Builder, **changes: Any) -> tuple[ZooModel, ZooModel]:
    """The model and its `-toy`: same structure, but a second or less per step on one CPU thread."""
    toy = replace(
        full,
        name=f"{full.name}-toy",
        description=f"toy of {full.name}, under a second a step on one core",
        sizes=sizes,
        build=build,
        fake_only=False,
        **changes,
    )
    return full, toy
