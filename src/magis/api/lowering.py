"""Programs as instructions. PyTorch is asked for the types of parts, and only loaded when regions run in parts."""

from __future__ import annotations

from collections.abc import Mapping

from magis.fission.tree import Program
from magis.ir.graph import Call, Schedule
from magis.lower.launches import launches
from magis.lower.lower import lower
from magis.lower.routine import Routine


def lowered(program: Program, schedule: Schedule) -> Routine:
    """The routine of a program. Raises CannotSplitError for regions that cannot run in parts."""
    if not program.enabled:
        return lower(program, schedule)
    from magis.aten.infer import infer

    return lower(program, schedule, infer)


def costs_of(routine: Routine, values: tuple[float, ...]) -> Mapping[Call, float]:
    """What was noted for each launch of a routine, by call."""
    return {call: value for (call, _), value in zip(launches(routine), values)}
