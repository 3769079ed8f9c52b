"""Moves in the F-Tree (paper section 5.2, figure 7): which regions run in parts, and in how many.

A place is a path of child numbers from the roots. A region with `parts` 1 is a candidate; enabling gives it the least
number of parts above 1 that divides its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import TypeAlias

from magis.fission.tree import Fission

Forest: TypeAlias = tuple[Fission, ...]
Place: TypeAlias = tuple[int, ...]


def places(forest: Forest, above: Place = ()) -> Iterator[tuple[Place, Fission]]:
    """All regions with their places, outer before inner."""
    for i, fission in enumerate(forest):
        yield (*above, i), fission
        yield from places(fission.children, (*above, i))


def at(forest: Forest, place: Place) -> Fission:
    """The region at a place."""
    fission = forest[place[0]]
    return fission if len(place) == 1 else at(fission.children, place[1:])


def with_parts(forest: Forest, place: Place, parts: int) -> Forest:
    """The forest with another number of parts at one place."""
    first, rest = place[0], place[1:]
    fission = forest[first]
    new = (
        replace(fission, children=with_parts(fission.children, rest, parts)) if rest else replace(fission, parts=parts)
    )
    return (*forest[:first], new, *forest[first + 1 :])


def enable(forest: Forest) -> Iterator[Forest]:
    """Enables a disabled leaf, or the parent of an enabled region that has no enabled ancestor (which stays enabled).
    Of candidates that overlap, none of which is above the other in the tree, at most one is enabled."""
    for place, fission in places(forest):
        if fission.parts > 1 or least_parts(fission.length) is None or _clashes(forest, place):
            continue
        parent = any(child.parts > 1 for child in fission.children) and not _has_enabled_above(forest, place)
        if parent or not fission.children:
            yield with_parts(forest, place, least_parts(fission.length) or 1)


def lift(forest: Forest) -> Iterator[Forest]:
    """Disables an enabled region that has no enabled ancestor and enables its parent."""
    for place, fission in places(forest):
        if fission.parts == 1 or len(place) == 1 or _has_enabled_above(forest, place):
            continue
        above = at(forest, place[:-1])
        parts = least_parts(above.length)
        if parts is not None and not _clashes(forest, place[:-1]):
            yield with_parts(with_parts(forest, place, 1), place[:-1], parts)


def disable(forest: Forest) -> Iterator[Forest]:
    """Disables an enabled region that has no enabled one inside."""
    for place, fission in places(forest):
        if fission.parts > 1 and not any(child.enabled for child in fission.children):
            yield with_parts(forest, place, 1)


def finer(forest: Forest) -> Iterator[Forest]:
    """Raises an enabled region's number of parts to the next that divides its length."""
    for place, fission in places(forest):
        parts = next_parts(fission.length, fission.parts)
        if fission.parts > 1 and parts is not None:
            yield with_parts(forest, place, parts)


def coarser(forest: Forest) -> Iterator[Forest]:
    """Lowers an enabled region's number of parts to the next that divides its length, and is not 1."""
    for place, fission in places(forest):
        fewer = [n for n in divisors(fission.length) if 1 < n < fission.parts]
        if fission.parts > 1 and fewer:
            yield with_parts(forest, place, fewer[-1])


def divisors(length: int) -> list[int]:
    """Numbers that divide a length, ascending."""
    return [n for n in range(1, length + 1) if gcd(n, length) == n]


def least_parts(length: int) -> int | None:
    """The least number of parts above 1; None for a single position."""
    return next_parts(length, 1)


def next_parts(length: int, parts: int) -> int | None:
    """The next larger divisor; None when there is none."""
    return next((n for n in divisors(length) if n > parts), None)


def _above(place: Place) -> Iterator[Place]:
    return (place[:i] for i in range(1, len(place)))


def _has_enabled_above(forest: Forest, place: Place) -> bool:
    return any(at(forest, p).parts > 1 for p in _above(place))


def _clashes(forest: Forest, place: Place) -> bool:
    """Whether an enabled region that is neither above nor below the one at a place in the tree overlaps it."""
    region = at(forest, place).region
    return any(
        other.parts > 1 and region & other.region and place[: len(there)] != there[: len(place)]
        for there, other in places(forest)
    )
