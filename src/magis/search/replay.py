"""A history of rule applications, carried out again on another graph of the same structure."""

from __future__ import annotations

from collections.abc import Iterable

from magis.errors import PlanError
from magis.fission.tree import Program
from magis.rules.registry import rules
from magis.search.state import Step


def replay(program: Program, history: Iterable[Step]) -> Program:
    """The program after each rule of the history is applied at its site.

    Raises PlanError naming the first that does not exist or does not apply."""
    for number, (name, site) in enumerate(history, start=1):
        rule = rules().get(name)
        change = None if rule is None else rule.apply(program, site)
        if change is None:
            raise PlanError(f"step {number} of its history ({name}) does not apply to this model")
        program = change.program
    return program
