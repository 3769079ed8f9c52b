"""Automatic memory optimizer for PyTorch: the same step, in less memory, proven.

Importing this package is cheap; PyTorch is imported when a model is planned or run.

    >>> import magis
    >>> plan = magis.plan("plain-mlp-toy", device="rtx3090")
    >>> plan.baseline.peak_bytes > 0
    True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magis.api.optimize import OptimizedStep, optimize
    from magis.api.plan import Plan, plan
    from magis.api.plan_file import load_plan, save_plan
    from magis.backend.resident import follow_live
    from magis.errors import (
        CaptureError,
        InfeasibleError,
        InvalidGraphError,
        MagisError,
        MismatchError,
        PlanError,
        UnsupportedOpError,
        UsageError,
    )

__version__ = "0.1.0"

_ERRORS = (
    "CaptureError",
    "InfeasibleError",
    "InvalidGraphError",
    "MagisError",
    "MismatchError",
    "PlanError",
    "UnsupportedOpError",
    "UsageError",
)
_HOME = {
    "OptimizedStep": "magis.api.optimize",
    "Plan": "magis.api.plan",
    "follow_live": "magis.backend.resident",
    "load_plan": "magis.api.plan_file",
    "optimize": "magis.api.optimize",
    "plan": "magis.api.plan",
    "save_plan": "magis.api.plan_file",
    **dict.fromkeys(_ERRORS, "magis.errors"),
}

__all__ = [
    "CaptureError",
    "InfeasibleError",
    "InvalidGraphError",
    "MagisError",
    "MismatchError",
    "OptimizedStep",
    "Plan",
    "PlanError",
    "UnsupportedOpError",
    "UsageError",
    "__version__",
    "follow_live",
    "load_plan",
    "optimize",
    "plan",
    "save_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
