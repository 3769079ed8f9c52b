"""The zoo by name: look a workload up, check the sizes asked for, build it."""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from magis.errors import UsageError
from magis.zoo import huggingface, monai_nets, peers, plain, published
from magis.zoo.workload import Sizes, Workload, ZooModel

__all__ = ["Sizes", "ZooModel", "build", "model", "names"]


@functools.cache
def _zoo() -> Mapping[str, ZooModel]:
    families = (published, huggingface, monai_nets, peers, plain)
    entries = [entry for family in families for entry in family.MODELS]
    zoo = {entry.name: entry for entry in entries}
    assert len(zoo) == len(entries), "two zoo models share a name"
    return MappingProxyType(zoo)


def names() -> tuple[str, ...]:
    """Every workload's name, each model followed by its toy."""
    return tuple(_zoo())


def model(name: str) -> ZooModel:
    """The entry of that name, or a UsageError that offers the nearest names."""
    entry = _zoo().get(name)
    if entry is not None:
        return entry
    close = difflib.get_close_matches(name, names(), n=3, cutoff=0.5)
    if not close:
        raise UsageError(f"unknown model {name!r}: choose one of {', '.join(names())}")
    raise UsageError(f"unknown model {name!r}: did you mean {' or '.join(close)}?")


def build(name: str, batch: int | None = None, seq: int | None = None, image: int | None = None) -> Workload:
    """Build a workload on the ambient device; sizes left out are the model's own.

    Inside `with torch.device("meta"):` nothing is allocated. Returns `(model, loss_fn, batch)`, with the
    update as a fourth item where the workload has one.
    """
    entry = model(name)
    sizes = _sizes(entry, {"batch": batch, "seq": seq, "image": image})
    if entry.requires is not None and importlib.util.find_spec(entry.requires) is None:
        raise UsageError(f"model {name} needs {entry.requires}: pip install 'magis[zoo]'")
    if entry.fake_only and not _on_meta():
        raise UsageError(f"model {name} is too large to run: build it under torch.device('meta'), or take {name}-toy")
    return entry.build(sizes)


def _sizes(entry: ZooModel, asked: Mapping[str, int | None]) -> Sizes:
    given = {what: value for what, value in asked.items() if value is not None}
    for what, value in given.items():
        if getattr(entry.sizes, what) is None:
            raise UsageError(f"model {entry.name} has no {what} size: leave --{what} out")
        least = getattr(entry.least, what)
        if value < least:
            raise UsageError(f"--{what} {value} is too small for {entry.name}: give at least {least}")
    step = entry.image_multiple
    if given.get("image", 0) % step:
        raise UsageError(f"--image {given['image']} does not fit {entry.name}: give a multiple of {step}")
    return replace(entry.sizes, **given)


def _on_meta() -> bool:
    import torch

    return bool(torch.empty(0).device.type == "meta")
