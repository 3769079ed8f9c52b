"""Where a traced operator comes from: the running module and the caller's source line; errors that name both."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from magis.capture import private
from magis.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]


class ModulePath:
    """The module whose forward is running, by name."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, BaseException | None]] = []  # names; the error being handled on entry
        self._failed: tuple[BaseException, str] | None = None

    @property
    def current(self) -> str:
        """Name of the innermost running module; once an error has left them all, the one that it came from."""
        if self._stack:
            return self._stack[-1][0]
        return self._failed[1] if self._failed is not None and self._failed[0] is sys.exc_info()[1] else ""

    def _enter(self, name: str, _module: Any, _args: Any) -> None:
        self._stack.append((name, sys.exc_info()[1]))

    def _leave(self, name: str, _module: Any, _args: Any, _result: Any) -> None:
        """Also called when an error passes; not inside `claims_tracing`, so modules left over are dropped with it."""
        places = [place for place, (running, _) in enumerate(self._stack) if running == name]
        if not places:
            return  # another hook failed before the module was entered
        _, handled = self._stack[places[-1]]
        del self._stack[places[-1] :]
        error = sys.exc_info()[1]
        if error is not None and error is not handled and (self._failed is None or self._failed[0] is not error):
            self._failed = error, name

    @contextlib.contextmanager
    def follow(self, model: torch.nn.Module) -> Iterator[None]:
        """Keeps track while inside."""
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(partial(self._enter, name), prepend=True))
            hooks.append(module.register_forward_hook(partial(self._leave, name), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class SourceLines(TorchFunctionMode):  # type: ignore[misc]
    """Annotates what each call of PyTorch traces with the running module and the caller's source line."""

    def __init__(self, path: ModulePath, casts: private.CastCache, checkpoints: private.Checkpoints) -> None:
        super().__init__()
        self._path, self._casts, self._checkpoints = path, casts, checkpoints

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._casts.enabled = torch._C._is_any_autocast_enabled()
        inside = "checkpoint" if self._checkpoints.active else ""
        with private.annotate(module=self._path.current, line=_calling_line(), inside=inside):
            return func(*args, **(kwargs or {}))


def _calling_line() -> str:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        frame = frame.f_back  # type: ignore[assignment]
    return source_line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def source_line(filename: str, number: int | None) -> str:
    """`package/module.py:12`: the path below site-packages or the working directory."""
    place = Path(filename)
    if "site-packages" in place.parts:
        place = Path(*place.parts[place.parts.index("site-packages") + 1 :])
    elif place.is_absolute() and place.is_relative_to(Path.cwd()):
        place = place.relative_to(Path.cwd())
    elif place.is_absolute():
        place = Path(place.name)
    return f"{place}:{number}"


def explain(error: BaseException, module: str = "") -> CaptureError:
    """The error in one line: where, what, and what to do instead."""
    where = getattr(error, "magis_module", module) or "the step"
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith((_TORCH, _HERE, _STDLIB))]
    line = source_line(outside[-1].filename, outside[-1].lineno) if outside else "no source line"
    return CaptureError(f"{where} ({line}): {_reason(error)}")


_READS_VALUES = (
    "reads the value of a tensor that depends on the batch or the model's state (.item(), bool(tensor), nonzero, a "
    "mask as index); such a step cannot be captured: compute it with tensor operations such as torch.where"
)
_REASONS = {
    ".numpy() is not supported": "leaves PyTorch for NumPy; such a step cannot be captured: use tensor operations",
    "wrapped inside of a functionalize()": (
        "writes into a tensor that is neither a parameter or buffer of the model nor in the batch; "
        "make it a buffer (register_buffer)"
    ),
    "dynamo-optimized function": "is compiled by torch.compile; hand in the model as it was before (model._orig_mod)",
    "HigherOrderOperator with_effects": (
        "runs a check inside an operator, such as those of torch.linalg; use the form without it (torch.linalg.inv_ex)"
    ),
}


def _reason(error: BaseException) -> str:
    if isinstance(error, private.DATA_DEPENDENT):
        return _READS_VALUES
    text = str(error).strip()
    for part, reason in _REASONS.items():
        if part in text:
            return reason
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
