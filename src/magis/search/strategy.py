"""How to search: what may be left out to see what it is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Strategy:
    """`starts`: begin from plans made by hand as well, and from whole steps in every number of parts. `without`: names
    of rules that are not applied. `paper`: Algorithm 3 alone, one rule at one site after the other, from the captured
    step; nothing is annealed and bodies are not planned."""

    starts: bool = True
    without: frozenset[str] = frozenset()
    paper: bool = False

    def allows(self, rule: str) -> bool:
        """Whether a rule may be applied."""
        return rule not in self.without


DEFAULT = Strategy()
