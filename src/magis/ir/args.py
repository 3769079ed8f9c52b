"""Argument templates: the literals of an operator call, with slots where its tensors go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from magis.ir.dtype import DType


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the node's input number `index`. Slots are numbered in order of first appearance; a tensor
    that a call takes twice has one slot."""

    index: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named constant of PyTorch that is no number: `kind` is device, layout or memory_format."""

    kind: str
    name: str


Arg: TypeAlias = "bool | int | float | complex | str | Slot | DType | Symbol | tuple[Arg, ...] | None"
Args: TypeAlias = tuple[Arg, ...]
Kwargs: TypeAlias = tuple[tuple[str, Arg], ...]


def slots(args: Args, kwargs: Kwargs = ()) -> Iterator[int]:
    """Slot numbers in order of appearance, positional arguments first."""
    for value in (*args, *(v for _, v in kwargs)):
        yield from _slots_in(value)


def _slots_in(value: Arg) -> Iterator[int]:
    if isinstance(value, Slot):
        yield value.index
    elif isinstance(value, tuple):
        for item in value:
            yield from _slots_in(item)


def substitute(value: Arg, fill: Callable[[Slot], object]) -> object:
    """The template with every slot replaced by `fill(slot)`."""
    if isinstance(value, Slot):
        return fill(value)
    if isinstance(value, tuple):
        return tuple(substitute(item, fill) for item in value)
    return value


def renumbered(value: Arg, number: Mapping[int, int]) -> Arg:
    """The template with slot i turned into slot `number[i]`."""
    if isinstance(value, Slot):
        return Slot(number[value.index])
    if isinstance(value, tuple):
        return tuple(renumbered(item, number) for item in value)
    return value
