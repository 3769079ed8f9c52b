"""Peak and latency of a step for any choice of what is kept, made again or swapped, in microseconds (ADR 12).

The base is a scheduled graph; positions are those of its operators. What was made up to the position `turn` and is
taken after it is kept, or its maker runs again right before the first operator that needs it, or it waits on the host.
Nothing here builds a graph: one call walks the arrays of the base, and its order, peak and latency are those of the
program that the rules would make.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Seconds = NDArray[np.float64]
Flags = NDArray[np.uint8]

FEMTOSECONDS = 1e15
NEVER = -1


class Base(NamedTuple):
    """What does not change. An operator is its position, a storage its number; `x_of` and `x_at` are lists, one for
    each operator, laid end to end: those of operator p are `x_at[x_of[p]:x_of[p + 1]]`.

    `seconds`, `femtoseconds`, `workspace` of each operator; `views` whether it only gives other views; `taken` the
    storages it makes or takes. `makers`, `nbytes` of each storage; `handed` those handed back to the caller, `decided`
    those that choices are about. `sources` are the operators up to the turn from which an operator takes a decided
    storage, `through` those storages. `earlier` are the operators up to the turn that read what an operator overwrites,
    `writers` the reverse; `patient` the writes that may run later; `lasting` operators that run whoever reads them.
    `transfer` are seconds of a copy to the host, `swappable` the storages for which there is one, ordered by maker.
    Copies back begin after moments at which more than `most_bytes` would be live with them; 0: as soon as they have to.
    """

    turn: int
    seconds: Seconds
    femtoseconds: Numbers
    workspace: Numbers
    views: Flags
    taken_of: Numbers
    taken_at: Numbers
    makers: Numbers
    nbytes: Numbers
    handed: Flags
    decided: Flags
    sources_of: Numbers
    sources_at: Numbers
    through_at: Numbers
    earlier_of: Numbers
    earlier_at: Numbers
    writers_of: Numbers
    writers_at: Numbers
    patient: Flags
    lasting: Flags
    transfer: Seconds
    transfer_femtoseconds: Numbers
    swappable: Numbers
    most_bytes: int


class Scratch(NamedTuple):
    """Space for one evaluation, overwritten by the next. After one, `needed` has the operators up to the turn of which
    there is a copy, `idle` those that do not run themselves any more; `order` has the operators after the turn as they
    run, a copy of operator p as `-1 - p`; `live` the bytes live while each operator runs, those up to the turn
    included; and for each storage `begin` and `end` its first and last place if it is kept, `made` and `gone` if it is
    made again or loaded."""

    needed: Flags
    done: Flags
    used: Flags
    idle: Flags
    missing: Numbers
    passed: Flags
    stack: Numbers
    order: Numbers
    starts: Seconds
    begin: Numbers
    end: Numbers
    made: Numbers
    gone: Numbers
    first_take: Numbers
    first_read: Numbers
    stored: Numbers
    live: Numbers


class Outcome(NamedTuple):
    """Bytes live at the worst moment, residents left out, and where that is; seconds, of which waiting for transfers;
    bytes on the host; how many operators run `late`, after the turn. `peak_bytes` is negative for what cannot be."""

    peak_bytes: int
    worst: int
    latency_s: float
    stalls_s: float
    host_bytes: int
    late: int


def scratch(base: Base) -> Scratch:
    """Space for evaluations of a base."""
    operators, storages = len(base.seconds), len(base.nbytes)
    most = 2 * operators + 1
    needed, done, used, idle, passed = np.zeros((5, operators), np.uint8)
    begin, end, made, gone, first_take, first_read, stored = np.zeros((7, storages), np.int64)
    missing, stack, order = np.zeros(operators, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64)
    starts, live = np.zeros(most + 1), np.zeros(most + 1, np.int64)
    spans = begin, end, made, gone, first_take, first_read, stored
    return Scratch(needed, done, used, idle, missing, passed, stack, order, starts, *spans, live)


@njit(cache=True)
def evaluate(base: Base, again: Flags, swapped: Flags, space: Scratch) -> Outcome:
    """What a choice comes to: `again` for each operator up to the turn whether it runs again rather than having what it
    makes kept, `swapped` for each storage that is not made again whether it waits on the host."""
    _mark_needed(base, again, swapped, space)
    count = _run(base, again, swapped, space)
    _mark_idle(base, again, swapped, count, space)
    total = base.turn + 1 + count
    seconds = _clock(base, count, space)
    _spans(base, again, swapped, count, space)
    stalls, host = 0.0, 0
    if base.swappable.size:
        for storage in base.swappable:
            if swapped[storage] and not again[base.makers[storage]] and space.first_take[storage] != NEVER:
                if space.first_read[storage] == NEVER:
                    return Outcome(-1, 0, 0.0, 0.0, 0, 0)
                host += base.nbytes[storage]
        if host:
            stalls = _transfers(base, again, swapped, total, space)
    worst = _sweep(base, count, space)
    return Outcome(space.live[worst], worst, seconds + stalls, stalls, host, count)


@njit(cache=True)
def _gone(base: Base, again: Flags, swapped: Flags, source: int, storage: int) -> bool:
    """Whether a later operator that takes a storage from `source` needs a copy of that."""
    maker = base.makers[storage]
    return again[maker] != 0 or (swapped[storage] != 0 and source != maker)


@njit(cache=True)
def _mark_needed(base: Base, again: Flags, swapped: Flags, space: Scratch) -> None:
    """Which operators up to the turn run again: those from which something later takes what is gone."""
    needed = space.needed
    needed[:] = 0
    for place in range(len(base.seconds) - 1, -1, -1):
        if place > base.turn or needed[place]:
            for i in range(base.sources_of[place], base.sources_of[place + 1]):
                if _gone(base, again, swapped, base.sources_at[i], base.through_at[i]):
                    needed[base.sources_at[i]] = 1


@njit(cache=True)
def _run(base: Base, again: Flags, swapped: Flags, space: Scratch) -> int:
    """Lists the operators after the turn as they run: copies right before the first that needs them, a write that waits
    for copies right after the last of them. Returns how many there are."""
    needed, done, missing, passed = space.needed, space.done, space.missing, space.passed
    done[:] = 0
    passed[:] = 0
    count = 0
    size = len(base.seconds)
    for place in range(base.turn + 1, size):
        missing[place] = 0
        if base.patient[place]:
            for i in range(base.earlier_of[place], base.earlier_of[place + 1]):
                reader = base.earlier_at[i]
                if needed[reader] and not done[reader]:
                    missing[place] += 1
            for i in range(base.sources_of[place], base.sources_of[place + 1]):
                if needed[base.sources_at[i]] and _gone(base, again, swapped, base.sources_at[i], base.through_at[i]):
                    missing[place] = 0
                    break
            if missing[place]:
                passed[place] = 1
                continue
        count = _emit(base, again, swapped, place, count, space)
    return count


@njit(cache=True)
def _emit(base: Base, again: Flags, swapped: Flags, place: int, count: int, space: Scratch) -> int:
    """Lists an operator after what it needs."""
    stack, order, done = space.stack, space.order, space.done
    stack[0] = place
    depth = 1
    while depth:
        top = stack[depth - 1]
        source = _unmet(base, again, swapped, top, space)
        if source != NEVER:
            stack[depth] = source
            depth += 1
            continue
        depth -= 1
        if top > base.turn:
            order[count] = top
            count += 1
            continue
        order[count] = -1 - top
        count += 1
        done[top] = 1
        for i in range(base.writers_of[top], base.writers_of[top + 1]):
            writer = base.writers_at[i]
            if space.passed[writer]:
                space.missing[writer] -= 1
                if not space.missing[writer]:
                    order[count] = writer
                    count += 1
    return count


@njit(cache=True)
def _unmet(base: Base, again: Flags, swapped: Flags, place: int, space: Scratch) -> int:
    """The first operator whose copy has to run before this one and has not; NEVER if there is none."""
    found = NEVER
    for i in range(base.sources_of[place], base.sources_of[place + 1]):
        source = base.sources_at[i]
        sooner = not space.done[source] and (found == NEVER or source < found)
        if sooner and _gone(base, again, swapped, source, base.through_at[i]):
            found = source
    if place > base.turn and found == NEVER and not space.passed[place]:
        for i in range(base.earlier_of[place], base.earlier_of[place + 1]):
            reader = base.earlier_at[i]
            if space.needed[reader] and not space.done[reader] and (found == NEVER or reader < found):
                found = reader
    return found


@njit(cache=True)
def _mark_idle(base: Base, again: Flags, swapped: Flags, count: int, space: Scratch) -> None:
    """Which operators up to the turn nobody takes anything from any more, because all that would takes copies."""
    used, idle = space.used, space.idle
    used[:] = 0
    idle[:] = 0
    for i in range(count - 1, -1, -1):
        place = space.order[i] if space.order[i] >= 0 else -1 - space.order[i]
        for j in range(base.sources_of[place], base.sources_of[place + 1]):
            source, storage = base.sources_at[j], base.through_at[j]
            if not _gone(base, again, swapped, source, storage):
                used[source] = 1
            elif swapped[storage] and not again[base.makers[storage]]:
                used[base.makers[storage]] = 1
    for place in range(base.turn, -1, -1):
        if space.needed[place] and not used[place] and not base.lasting[place]:
            idle[place] = 1
            continue
        for j in range(base.sources_of[place], base.sources_of[place + 1]):
            used[base.sources_at[j]] = 1


@njit(cache=True)
def _clock(base: Base, count: int, space: Scratch) -> float:
    """Fills in when each operator starts if nothing waits; returns the end."""
    starts = space.starts
    now = 0.0
    starts[0] = now
    for place in range(base.turn + 1 + count):
        code = place if place <= base.turn else space.order[place - base.turn - 1]
        if place > base.turn or not space.idle[place]:
            now += base.seconds[code if code >= 0 else -1 - code]
        starts[place + 1] = now
    return now


@njit(cache=True)
def _spans(base: Base, again: Flags, swapped: Flags, count: int, space: Scratch) -> None:
    """From when to when each storage, and what is made again or loaded of it, is taken."""
    begin, end, made, gone = space.begin, space.end, space.made, space.gone
    first_take, first_read = space.first_take, space.first_read
    begin[:] = NEVER
    made[:] = NEVER
    first_take[:] = NEVER
    first_read[:] = NEVER
    for now in range(base.turn + 1 + count):
        early = now <= base.turn
        code = now if early else space.order[now - base.turn - 1]
        place = code if code >= 0 else -1 - code
        if early and space.idle[place]:
            continue
        for j in range(base.taken_of[place], base.taken_of[place + 1]):
            storage = base.taken_at[j]
            maker = base.makers[storage]
            if maker == place:
                if code >= 0:
                    begin[storage] = end[storage] = now
                else:
                    made[storage] = gone[storage] = now
            elif early or not base.decided[storage]:
                end[storage] = now
            elif again[maker]:
                gone[storage] = now
            elif swapped[storage]:
                gone[storage] = now
                if first_take[storage] == NEVER:
                    first_take[storage] = now
                if first_read[storage] == NEVER and not base.views[place]:
                    first_read[storage] = now
            else:
                end[storage] = now
    for storage in range(len(base.nbytes)):
        if base.handed[storage]:
            end[storage] = base.turn + count


@njit(cache=True)
def _transfers(base: Base, again: Flags, swapped: Flags, total: int, space: Scratch) -> float:
    """Places copies to the host and back as `magis.schedule.transfers` does; returns the seconds of all waits."""
    starts = space.starts
    chosen = np.empty(base.swappable.size, np.int64)
    number = 0
    clock = 0.0
    for storage in base.swappable:
        if not swapped[storage] or again[base.makers[storage]] or space.first_take[storage] == NEVER:
            continue
        after = base.makers[storage] + 1
        clock = max(clock, starts[after]) + base.transfer[storage]
        slot = after + np.searchsorted(starts[after : total + 1], clock)
        space.stored[storage] = min(slot, space.first_take[storage])
        space.end[storage] = max(space.end[storage], space.stored[storage] - 1)
        chosen[number] = storage
        number += 1
    chosen = chosen[:number]
    keys = np.empty(number, np.int64)
    for i in range(number):
        keys[i] = space.first_take[chosen[i]] * (total + 1) + space.first_read[chosen[i]]
    chosen = chosen[np.argsort(chosen, kind="mergesort")]
    for i in range(number):
        keys[i] = space.first_take[chosen[i]] * (total + 1) + space.first_read[chosen[i]]
    chosen = chosen[np.argsort(keys, kind="mergesort")]
    live = space.live
    if base.most_bytes:
        for storage in chosen:
            space.made[storage] = space.first_take[storage]
        _sweep(base, total - base.turn - 1, space)
    link = starts[total]
    for i in range(number - 1, -1, -1):
        storage = chosen[i]
        link = min(link, starts[space.first_read[storage]]) - base.transfer[storage]
        slot = min(np.searchsorted(starts[: total + 1], link, side="right") - 1, space.first_take[storage])
        slot = max(slot, space.stored[storage])
        if base.most_bytes:
            early = slot
            slot = space.first_take[storage]
            while slot > early and live[slot - 1] + base.nbytes[storage] <= base.most_bytes:
                slot -= 1
                live[slot] += base.nbytes[storage]
        link = min(link, starts[slot])
        space.made[storage] = slot
    return _stalls(base, chosen, total, space)


@njit(cache=True)
def _stalls(base: Base, chosen: Numbers, total: int, space: Scratch) -> float:
    """Seconds of all waits (`magis.sim.links`)."""
    number = chosen.size
    keys = np.empty(number, np.int64)
    for i in range(number):
        storage = chosen[i]
        keys[i] = (base.makers[storage] * (total + 1) + space.stored[storage]) * base.nbytes.size + storage
    stores = chosen[np.argsort(keys)]
    for i in range(number):
        keys[i] = space.made[chosen[i]]
    loads = chosen[np.argsort(keys, kind="mergesort")]
    for i in range(number):
        keys[i] = space.first_read[chosen[i]]
    reads = chosen[np.argsort(keys, kind="mergesort")]
    for i in range(number):
        keys[i] = space.stored[chosen[i]]
    waits = chosen[np.argsort(keys, kind="mergesort")]
    stored = np.zeros(base.nbytes.size, np.int64)
    loaded = np.zeros(base.nbytes.size, np.int64)
    now = stores_done = loads_done = waited = 0
    store = load = read = wait = 0
    for place in range(total + 1):
        while wait < number and space.stored[waits[wait]] == place:
            stall = max(stored[waits[wait]] - now, 0)
            now += stall
            waited += stall
            wait += 1
        while load < number and space.made[loads[load]] == place:
            loads_done = max(loads_done, now) + base.transfer_femtoseconds[loads[load]]
            loaded[loads[load]] = loads_done
            load += 1
        while read < number and space.first_read[reads[read]] == place:
            stall = max(loaded[reads[read]] - now, 0)
            now += stall
            waited += stall
            read += 1
        if place == total:
            break
        code = place if place <= base.turn else space.order[place - base.turn - 1]
        if place > base.turn or not space.idle[place]:
            now += base.femtoseconds[code if code >= 0 else -1 - code]
        while store < number and code == base.makers[stores[store]]:
            stores_done = max(stores_done, now) + base.transfer_femtoseconds[stores[store]]
            stored[stores[store]] = stores_done
            store += 1
    return waited / FEMTOSECONDS


@njit(cache=True)
def _sweep(base: Base, count: int, space: Scratch) -> int:
    """Fills in what is live while each operator runs; returns where it is most."""
    live, total = space.live, base.turn + 1 + count
    live[: total + 1] = 0
    for storage in range(len(base.nbytes)):
        nbytes = base.nbytes[storage]
        if space.begin[storage] != NEVER:
            live[space.begin[storage]] += nbytes
            live[space.end[storage] + 1] -= nbytes
        if space.made[storage] != NEVER:
            live[space.made[storage]] += nbytes
            live[space.gone[storage] + 1] -= nbytes
    worst = 0
    held = 0
    for place in range(total):
        code = place if place <= base.turn else space.order[place - base.turn - 1]
        held += live[place]
        live[place] = held
        if place > base.turn or not space.idle[place]:
            live[place] += base.workspace[code if code >= 0 else -1 - code]
        if live[place] > live[worst]:
            worst = place
    return worst
