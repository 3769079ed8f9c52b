"""Every error that magis raises on purpose. Each message says what to do instead."""

from __future__ import annotations


class MagisError(Exception):
    """Base of all errors raised on purpose."""


class UsageError(MagisError):
    """The caller asked for something contradictory or unknown; the message says what to pass instead."""


class CaptureError(MagisError):
    """The model cannot be captured; the message names the module and the source line where it is known."""


class UnsupportedOpError(MagisError):
    """An operator without a rule, in strict mode. Otherwise such an operator is costed by its bytes."""


class InfeasibleError(MagisError):
    """The limits cannot be met; carries the lowest peak known."""

    def __init__(self, message: str, lowest_peak_bytes: int | None = None) -> None:
        super().__init__(message)
        self.lowest_peak_bytes = lowest_peak_bytes


class PlanError(MagisError):
    """A plan file that is damaged, of another version, or made for another model."""


class InvalidGraphError(MagisError):
    """A named invariant of the graph does not hold: a defect of magis, not of the caller."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant


class MismatchError(MagisError):
    """The program computed other numbers than eager PyTorch."""
