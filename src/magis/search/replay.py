"""A history of rule applications, carried out again on another graph of the same structure."""

from __future__ import annotations

from collections.abc import Iterable

from magis.errors import PlanError
from magis.fission.parts import Infer, no_infer
from magis.fission.tree import Program
from magis.rules.registry import rules
from magis.search.state import Step


def replay(program: Program, history: Iterable[Step], infer: Infer = no_infer) -> Program:
    """The program after each rule of the history is applied at its site; `infer` types what rules add.

    Raises PlanError naming the first that does not exist or does not apply."""
    for number, (name, site) in enumerate(history, start=1):
        rule = rules().get(name)
        change = None if rule is None else rule.apply(program, site, infer)
        if change is None:
            raise PlanError(f"step {number} of its history ({name}) does not apply to this model")
        program = change.program
    return program
