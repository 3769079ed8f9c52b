"""Which part of an order is worth re-scheduling after a change (paper section 5.1, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IntervalLimits:
    """At most `max_steps` steps on either side; narrow waists up to `wide` stop the interval unless they are
    under `narrow`."""

    max_steps: int = 20
    wide: int = 10
    narrow: int = 4


def extend(waists: Sequence[int], start: int, direction: int, limits: IntervalLimits) -> int:
    """Algorithm 2's `extend`: from position `start`, the first position outside the interval. `waists` are
    narrow-waist values in the order's sequence. One step or more; -1 or the length at the order's ends."""
    best: float = float("inf")
    steps, i = 0, start
    while 0 <= i < len(waists) and steps < limits.max_steps:
        waist = waists[i]
        if not ((best > limits.wide or waist < limits.narrow) and waist < best):
            break
        best = waist
        i += direction
        steps += 1
    return i


def interval(waists: Sequence[int], touched: Iterable[int], limits: IntervalLimits) -> tuple[int, int]:
    """Positions [begin, end) to re-schedule around the touched positions (of which there is one or more)."""
    positions = sorted(touched)
    begin = extend(waists, positions[0], -1, limits)
    return max(begin, 0), extend(waists, positions[-1], 1, limits)
