"""Simulated annealing over what is kept, made again or swapped across one moment of a schedule (ADR 12)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from magis.search.kernel import Base, Flags, Numbers, Outcome, Scratch, evaluate

KEEP, AGAIN, SWAP = 0, 1, 2
"""What may be done with what an operator makes."""
Choices = NDArray[np.int8]


class Units(NamedTuple):
    """The operators that choices are about, by number: the position of each; whether it may run again; its storages
    that may wait on the host and its class, as lists laid end to end: those of unit u are
    `storages_at[storages_of[u]:storages_of[u + 1]]`, the members of class c `members_at[members_of[c]:...]`."""

    position: Numbers
    may_repeat: Flags
    storages_of: Numbers
    storages_at: Numbers
    kind: Numbers
    members_of: Numbers
    members_at: Numbers


class Aim(NamedTuple):
    """What is wanted: least peak within `seconds`, or least time within `nbytes`; zero for no such limit.
    `resident_bytes` count in the peak; `host_bytes` is all there is on the host."""

    seconds: float
    nbytes: int
    resident_bytes: int
    host_bytes: int


class Cooling(NamedTuple):
    """How warm it is at first and at last, in shares of the energy; how many variants are evaluated; the seed."""

    first: float
    last: float
    evaluations: int
    seed: int


NORM = 32
"""All moments count as the power mean of this order does, which is close to their maximum."""
SMOOTH = 0.2
"""How much that mean counts beside the peak itself."""
LATE = 30.0
"""What a share of the latency beyond the limit costs, in shares of the peak."""
LARGE = 1.0
"""What a share of the peak beyond the limit costs, in shares of the latency."""
LESS = 1e-3
"""How much counts what has no limit and is not asked for least of."""


@njit(cache=True)
def energy(aim: Aim, outcome: Outcome, live: Numbers, total: int) -> float:
    """What annealing lowers: the logarithm of the peak, with seconds beyond the limit dear; or that of the seconds,
    with bytes beyond the limit dear. `live` are the bytes at each of `total` moments: all count a little, so that a
    lower second-worst moment is progress."""
    peak = outcome.peak_bytes + aim.resident_bytes
    mean = 0.0
    for place in range(total):
        share = (live[place] + aim.resident_bytes) / peak
        share *= share
        share *= share
        share *= share
        share *= share
        mean += share * share
    size = np.log(peak) + SMOOTH * np.log(mean) / NORM
    time = np.log(outcome.latency_s)
    beyond = max(outcome.host_bytes - aim.host_bytes, 0) / (aim.host_bytes + 1)
    if aim.seconds:
        return size + LATE * max(outcome.latency_s / aim.seconds - 1, 0.0) + beyond + LESS * time
    return time + LARGE * max(size - np.log(aim.nbytes), 0.0) + beyond + LESS * size


@njit(cache=True)
def better(aim: Aim, one: Outcome, other: Outcome) -> bool:
    """Whether the first is the better variant, as `Objective.key` has it."""
    if one.host_bytes > aim.host_bytes:
        return False
    if other.peak_bytes < 0:
        return True
    if aim.seconds:
        late, later = max(one.latency_s, aim.seconds), max(other.latency_s, aim.seconds)
        if late != later:
            return late < later
        if one.peak_bytes != other.peak_bytes:
            return one.peak_bytes < other.peak_bytes
        return one.latency_s < other.latency_s
    limit = aim.nbytes - aim.resident_bytes
    large, larger = max(one.peak_bytes, limit), max(other.peak_bytes, limit)
    if large != larger:
        return large < larger
    if one.latency_s != other.latency_s:
        return one.latency_s < other.latency_s
    return one.peak_bytes < other.peak_bytes


@njit(cache=True)
def _put(units: Units, again: Flags, swapped: Flags, unit: int, choice: int) -> None:
    again[units.position[unit]] = choice == AGAIN
    for i in range(units.storages_of[unit], units.storages_of[unit + 1]):
        swapped[units.storages_at[i]] = choice == SWAP


@njit(cache=True)
def _another(units: Units, unit: int, choice: int) -> int:
    """A random other choice for a unit."""
    swaps = units.storages_of[unit + 1] > units.storages_of[unit]
    if not units.may_repeat[unit]:
        return SWAP if choice == KEEP else KEEP
    if not swaps:
        return AGAIN if choice == KEEP else KEEP
    return (choice + 1 + np.random.randint(2)) % 3


@njit(cache=True)
def annealed(
    base: Base, units: Units, aim: Aim, cooling: Cooling, now: Choices, best: Choices, space: Scratch
) -> Outcome:
    """Goes on from the choices `now`, one for each unit, and changes `best` to the best met; returns what that comes
    to."""
    np.random.seed(cooling.seed)
    again = np.zeros(len(base.seconds), np.uint8)
    swapped = np.zeros(len(base.nbytes), np.uint8)
    size = len(units.position)
    for unit in range(size):
        _put(units, again, swapped, unit, best[unit])
    least = evaluate(base, again, swapped, space)
    if size == 0:
        return least
    for unit in range(size):
        _put(units, again, swapped, unit, now[unit])
    found = evaluate(base, again, swapped, space)
    level = energy(aim, found, space.live, base.turn + 1 + found.late)
    changed = np.zeros(size, np.int64)
    before = np.zeros(size, np.int8)
    heat = cooling.first
    factor = (cooling.last / cooling.first) ** (1.0 / max(cooling.evaluations, 1))
    for _ in range(cooling.evaluations):
        heat *= factor
        count = _move(units, now, changed, before)
        for i in range(count):
            _put(units, again, swapped, changed[i], now[changed[i]])
        found = evaluate(base, again, swapped, space)
        if found.peak_bytes >= 0:
            after = energy(aim, found, space.live, base.turn + 1 + found.late)
            if after <= level or np.random.random() < np.exp((level - after) / heat):
                level = after
                if better(aim, found, least):
                    least = found
                    best[:] = now
                continue
        for i in range(count):
            now[changed[i]] = before[i]
            _put(units, again, swapped, changed[i], before[i])
    return least


@njit(cache=True)
def _move(units: Units, now: Choices, changed: Numbers, before: Choices) -> int:
    """Changes some units at random: one; two of a class, that change places; or a whole class. Returns how many."""
    size = len(now)
    dice = np.random.random()
    unit = np.random.randint(size)
    kind = units.kind[unit]
    first, last = units.members_of[kind], units.members_of[kind + 1]
    if dice < 0.35 and last - first > 1:
        other = units.members_at[first + np.random.randint(last - first)]
        if now[other] != now[unit]:
            changed[0], changed[1] = unit, other
            before[0], before[1] = now[unit], now[other]
            now[unit], now[other] = before[1], before[0]
            return 2
    wanted = _another(units, unit, now[unit])
    if dice > 0.97:
        count = 0
        for i in range(first, last):
            other = units.members_at[i]
            if now[other] != wanted:
                changed[count] = other
                before[count] = now[other]
                now[other] = wanted
                count += 1
        return count
    changed[0] = unit
    before[0] = now[unit]
    now[unit] = wanted
    return 1
