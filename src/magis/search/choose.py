"""What to keep, make again or swap, chosen by simulated annealing (ADR 12)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np

from magis.ir.graph import Call
from magis.rules.remat import Rematerialise
from magis.rules.swap import Swap
from magis.search.anneal import AGAIN, KEEP, Aim, Choices, Cooling, Units, annealed
from magis.search.objective import Objective
from magis.search.state import MState
from magis.search.strategy import DEFAULT, Strategy
from magis.search.variants import Variant, Variants, laid
from magis.sim.links import swaps

HOT, COLD = 0.02, 1e-4
"""Heat at first and at last, in shares of the energy."""
CHUNK = 1000
"""After so many variants it is asked whether there is time for more."""
TIGHT = 0.85
"""Beyond which share of the best peak copies back are held up."""
LEVELS = 3
"""Most turns, one after the other: each starts from the best state of the one before."""

Tell = Callable[[int], bool]
"""Told how many more variants were evaluated; says whether there is time for more."""


def always(evaluated: int) -> bool:
    """There is always time."""
    return True


def chosen(
    base: MState,
    objective: Objective,
    latency_s: Callable[[Call], float],
    evaluations: int,
    tell: Tell = always,
    strategy: Strategy = DEFAULT,
    tighter: int = 0,
) -> Iterator[MState]:
    """States better than the base, the last one best: one for each turn, the worst moment of the state before.
    `evaluations` variants are evaluated for each, and again up to `tighter` times with copies back held up where more
    than a share of the best peak would be live."""
    for _ in range(LEVELS):
        better = at_turn(base, objective, latency_s, evaluations, tell, strategy, tighter)
        if better is None:
            return
        yield better
        if swaps(better.graph) or (objective.max_latency_s is None and _met(better, objective)):
            return
        base = better


def at_turn(
    base: MState,
    objective: Objective,
    latency_s: Callable[[Call], float],
    evaluations: int,
    tell: Tell = always,
    strategy: Strategy = DEFAULT,
    tighter: int = 0,
) -> MState | None:
    """The best state around the base's worst moment; None if nothing better than the base was found."""
    live = base.scheduled.live
    if not live or swaps(base.graph):
        return None
    variants = Variants(base, live.index(max(live)))
    units = _units(variants, strategy)
    if not len(units.position):
        return None
    first = variants.first()
    start = np.array([AGAIN if first.again[place] else KEEP for place in units.position], np.int8)
    best = base
    for _ in range(1 + tighter):
        choices = _annealed(variants, units, objective, evaluations, tell, start)
        made = variants.made(_variant(variants, units, choices), latency_s)
        if made is None or not _better(made, best, objective):
            break
        best, start = made, choices
        if objective.max_latency_s is None or not swaps(made.graph):
            break
        variants.hold(int(TIGHT * max(made.scheduled.live)))
    return None if best is base else best


def _better(new: MState, old: MState, objective: Objective) -> bool:
    after, before = (objective.key(state.latency_s, state.peak_bytes) for state in (new, old))
    return after < before


def _met(state: MState, objective: Objective) -> bool:
    return objective.met(state.latency_s, state.peak_bytes)


def _annealed(
    variants: Variants, units: Units, objective: Objective, evaluations: int, tell: Tell, start: Choices
) -> Choices:
    """The best choices found."""
    state = variants.state
    aim = Aim(
        objective.max_latency_s or 0.0,
        objective.max_peak_bytes or 0,
        state.scheduled.flat.resident_bytes,
        0 if state.host is None else state.host.memory_bytes,
    )
    best, now = start.copy(), start.copy()
    chunks = max(evaluations // CHUNK, 1)
    factor = (COLD / HOT) ** (1 / chunks)
    for chunk in range(chunks):
        cooling = Cooling(HOT * factor**chunk, HOT * factor ** (chunk + 1), CHUNK, chunk)
        annealed(variants.arrays, units, aim, cooling, now, best, variants.space)
        if not tell(CHUNK):
            break
    return best


def _units(variants: Variants, strategy: Strategy) -> Units:
    """The operators that make what is decided, by class: those of a repeated block are alike."""
    graph, order = variants.state.graph, variants.scheduled.order
    may_repeat = set(variants.may_repeat) if strategy.allows(Rematerialise.name) else set()
    may_swap = set(variants.may_swap) if strategy.allows(Swap.name) else set()
    units: list[tuple[int, bool, list[int], int]] = []
    classes: dict[object, int] = {}
    for place, storages in sorted(variants.makes.items()):
        away = [s for s in storages if s in may_swap]
        if place not in may_repeat and not away:
            continue
        node = graph.nodes[order[place]]
        sizes = tuple(int(variants.arrays.nbytes[s]) for s in storages)
        kind = (node.op, place in may_repeat, bool(away), sizes, re.sub(r"\d+", "#", node.origin.module))
        units.append((place, place in may_repeat, away, classes.setdefault(kind, len(classes))))
    members: list[list[int]] = [[] for _ in classes]
    for unit, (_, _, _, kind_number) in enumerate(units):
        members[kind_number].append(unit)
    return Units(
        np.array([place for place, _, _, _ in units], np.int64),
        np.array([repeats for _, repeats, _, _ in units], np.uint8),
        *laid(away for _, _, away, _ in units),
        np.array([number for _, _, _, number in units], np.int64),
        *laid(members),
    )


def _variant(variants: Variants, units: Units, choices: Choices) -> Variant:
    found = variants.first()
    found.again[:] = 0
    for unit, choice in enumerate(choices):
        found.again[units.position[unit]] = choice == AGAIN
        for i in range(units.storages_of[unit], units.storages_of[unit + 1]):
            found.swapped[units.storages_at[i]] = choice not in (KEEP, AGAIN)
    return found
