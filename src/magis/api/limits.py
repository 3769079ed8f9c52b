"""What a caller asks of a plan: limits on memory and time, and how long the search may take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from magis.errors import UsageError
from magis.search.strategy import Strategy

BUDGET_S = 30.0
"""Seconds that a search may take unless the caller says otherwise."""
_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_MOST_BYTES = 2**63
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]+|%)?")
_SPLIT = re.compile(r"(?P<dimension>[\w-]+)=(?P<parts>\d{1,9})(?:@(?P<module>[\w.]+))?")
_FORMS = "pass bytes, a size such as 8GiB or 500MB, or a share of eager's peak such as 40%"


@dataclass(frozen=True, slots=True)
class Limits:
    """At most `max_slowdown` times eager's time; peak at most `memory_bytes`, or `memory_share` of eager's.
    None: no such limit. At most one of the two memory limits is set."""

    max_slowdown: float | None = None
    memory_bytes: int | None = None
    memory_share: float | None = None

    def peak_bytes(self, baseline_peak_bytes: int) -> int | None:
        """The limit on peak memory in bytes; None without one."""
        if self.memory_share is not None:
            return math.floor(self.memory_share * baseline_peak_bytes)
        return self.memory_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """A search ends after so many seconds or so many iterations, whichever comes first; None: no such end."""

    seconds: float | None = BUDGET_S
    iterations: int | None = None


@dataclass(frozen=True, slots=True)
class Splits:
    """What the caller decides about regions. `wanted`: exactly these, in the order of nesting, and no search.
    `wide`: sums of half-precision parts are kept in float32."""

    wanted: tuple[SplitRequest, ...] = ()
    wide: bool = True


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """A dimension by its name, in how many parts it is to run, and in which module ("": everywhere)."""

    dimension: str
    parts: int
    module: str = ""


NO_SPLITS = Splits()
NO_LIMITS = Limits()
DEFAULT_BUDGET = Budget()


def limits(max_slowdown: float | None = None, memory: int | float | str | None = None) -> Limits:
    """Checks what a caller asked for. `memory` is a number of bytes, a size ("8GiB"), or a share of eager's peak
    ("40%", or a float up to 1). Raises UsageError, in one line, for anything that no plan could keep to."""
    if max_slowdown is not None and not (math.isfinite(max_slowdown) and max_slowdown >= 1):
        raise UsageError(
            f"a slowdown of at most {max_slowdown:g} is impossible: pass a factor of eager's time from 1 on, "
            "such as 1.10 for 10 % slower"
        )
    if memory is None:
        return Limits(max_slowdown)
    if isinstance(memory, str):
        nbytes, share = _parsed(memory)
    elif isinstance(memory, float):
        nbytes, share = None, memory
        if not 0 < memory <= 1:
            raise UsageError(f"a memory limit of {memory:g} is no share of eager's peak: {_FORMS}")
    else:
        nbytes, share = memory, None
    if (nbytes is not None and nbytes <= 0) or (share is not None and not 0 < share < math.inf):
        raise UsageError(f"a memory limit of {memory} is impossible: {_FORMS}")
    return Limits(max_slowdown, nbytes, share)


def _parsed(text: str) -> tuple[int | None, float | None]:
    """Bytes, or a share."""
    found = _SIZE.fullmatch(text.strip())
    number, unit = found.groups() if found else ("", "")
    if found is None or (unit not in _UNITS and unit not in ("%", None)):
        raise UsageError(f"{text!r} is no memory limit: {_FORMS}")
    if unit == "%":
        return None, float(number) / 100
    nbytes = float(number) * _UNITS[unit or "B"]
    if nbytes > _MOST_BYTES:
        raise UsageError(f"{text!r} is more memory than there is: {_FORMS}")
    return int(nbytes), None


def host_bytes(memory: int | str) -> int:
    """How much may be swapped out at a time: bytes, or a size such as "64GiB". Raises UsageError for anything else."""
    nbytes, share = _parsed(memory) if isinstance(memory, str) else (memory, None)
    if share is not None or nbytes is None or nbytes < 0:
        raise UsageError(f"{memory} is no size of host memory: pass bytes, or a size such as 64GiB; 0 swaps nothing")
    return nbytes


def budget(seconds: float | None = BUDGET_S, iterations: int | None = None) -> Budget:
    """Checks a search budget. Raises UsageError for a negative or endless one."""
    if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
        raise UsageError(f"a budget of {seconds:g} s is impossible: pass seconds, such as 30")
    if iterations is not None and iterations < 0:
        raise UsageError(f"{iterations} iterations are impossible: pass 0 or more")
    return Budget(seconds, iterations)


def splits(requests: Iterable[str] = (), accumulate: str = "float32") -> Splits:
    """Checks `DIM=PARTS[@MODULE]` requests and in which type sums of parts are kept. Raises UsageError, in one line."""
    if accumulate not in ("float32", "same"):
        raise UsageError(f"cannot accumulate in {accumulate!r}: pass float32 or same (the parameter's own type)")
    return Splits(tuple(map(_request, requests)), accumulate == "float32")


def _request(text: str) -> SplitRequest:
    found = _SPLIT.fullmatch(text.strip())
    if found is None or int(found["parts"]) < 2:
        raise UsageError(
            f"{text!r} is no split: pass DIM=PARTS or DIM=PARTS@MODULE with 2 parts or more, such as batch=4 or "
            "heads=2@encoder.layer.0; `magis dims MODEL` lists the dimensions"
        )
    return SplitRequest(found["dimension"], int(found["parts"]), found["module"] or "")


def strategy(starts: str = "all", without: Iterable[str] = (), search: str = "best") -> Strategy:
    """How to search. Raises UsageError for a word that means nothing and for a rule that does not exist."""
    from magis.rules.registry import rules

    if starts not in ("all", "none"):
        raise UsageError(f"starts {starts!r}: pass all or none")
    if search not in ("best", "paper"):
        raise UsageError(f"search {search!r}: pass best or paper")
    unknown = sorted(set(without) - set(rules()))
    if unknown:
        raise UsageError(f"no rule is called {unknown[0]!r}; there are {', '.join(rules())}")
    return Strategy(starts == "all" and search == "best", frozenset(without), search == "paper")
