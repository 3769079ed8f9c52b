"""Models by reference: a zoo name, `file.py:factory` or `package.module:factory`, built for real or on meta."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from magis import zoo
from magis.api.pytorch import check_torch
from magis.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from magis.capture.capture import Captured
    from magis.capture.workload import Workload

SIZES = ("batch", "seq", "image")
"""Sizes that a caller may ask for: batch size, tokens in a sequence, side of a square image."""


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built any number of times, always the same.

    `sizes` are those asked for; the others are the model's own. `seed` seeds PyTorch's generator before the
    model is built and again after: weights of a factory that does not seed itself, and the step's own draws.
    """

    reference: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0

    @property
    def is_zoo(self) -> bool:
        """Whether it is one of the ready-made models."""
        return ":" not in self.reference

    @cached_property
    def _factory(self) -> Callable[[], Any]:
        if self.is_zoo:
            return partial(zoo.build, self.reference, **self.sizes)
        from magis.capture.workload import load_factory

        try:
            factory = load_factory(self.reference)
        except SystemExit:
            raise UsageError(f"{self.reference.rpartition(':')[0]} ends the program when it is loaded") from None
        self._check_sizes(factory)
        return partial(factory, **self.sizes)

    def _check_sizes(self, factory: Callable[..., Any]) -> None:
        parameters = _parameters(factory)
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        accepted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        for name in self.sizes:
            if name not in accepted:
                raise UsageError(
                    f"the factory {self.reference} takes no {name!r} argument: leave --{name} out, or give it one"
                )

    def build(self, fake: bool) -> Workload:
        """The workload: real tensors, or with `fake` on the meta device, where nothing is allocated.

        A user's factory that cannot be built on meta is built for real. Raises UsageError, in one line, when
        the factory is not there, raises, or returns something else than a workload."""
        if fake:
            import torch

            try:
                return self._built(torch.device("meta"))
            except UsageError:
                if self.is_zoo:
                    raise
        return self._built(nullcontext())

    def _built(self, place: AbstractContextManager[Any]) -> Workload:
        import torch

        from magis.capture.workload import call_factory

        check_torch()
        torch.manual_seed(self.seed)
        factory = self._factory
        with place:
            workload = call_factory(factory, self.reference)
        if workload.batch_size == 0:
            raise UsageError(f"{self.reference}: the batch is empty; return at least one example")
        torch.manual_seed(self.seed)
        return workload

    def capture(self) -> Captured:
        """The captured step, from fake tensors where that is possible.

        Raises UsageError when the model cannot be built, CaptureError when its step cannot be captured."""
        from magis.capture.capture import capture

        try:
            return capture(self.build(fake=True))
        except CaptureError:
            if self.is_zoo:
                raise
        return capture(self.build(fake=False))  # some factories only seem to work on meta


def _parameters(factory: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """What a factory takes; nothing, of Python's built-in types that do not say."""
    try:
        return tuple(inspect.signature(factory).parameters.values())
    except ValueError:
        return ()


def resolve(reference: str, sizes: Mapping[str, int | None] | None = None, seed: int = 0) -> ModelSource:
    """The model behind a reference; `sizes` maps names of `SIZES` to values, None for the model's own.

    Raises UsageError with close matches for a zoo name that does not exist. A factory is loaded when it is
    first built."""
    given = {name: value for name, value in (sizes or {}).items() if value is not None}
    for name, value in given.items():
        if name not in SIZES or value < 1:
            raise UsageError(f"--{name} {value}: sizes are {', '.join(SIZES)}, each at least 1")
    if ":" not in reference and reference not in zoo.names():
        raise UsageError(_no_such_model(reference))
    return ModelSource(reference, given, seed)


def _no_such_model(reference: str) -> str:
    if reference.endswith(".py"):
        return f"{reference!r} is a file: name the factory in it as {reference}:factory"
    close = get_close_matches(reference, zoo.names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    forms = "" if close else "; a model of your own is file.py:factory or package.module:factory"
    return f"no model {reference!r}; {hint}`magis models` lists them{forms}"
