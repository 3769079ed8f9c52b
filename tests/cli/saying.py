"""What a run of the command line said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """An exit code, and what went to standard output and standard error."""

    code: int
    out: str
    err: str


Magis = Callable[..., Said]
