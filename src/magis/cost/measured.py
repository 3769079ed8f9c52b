"""Costs from measurements on this machine: what to measure within a time limit, and what stands in for the rest."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

from magis.cost.calibrate import Calibration, work
from magis.cost.model import Source, short_hash
from magis.cost.profile import CallMeasurement, Environment, ProfileCache, call_text, op_of, parse_call
from magis.errors import PlanError
from magis.ir.graph import Call
from magis.ops.registry import rule_for

Basis = Literal["measured", "scaled", "interpolated", "estimated"]
Progress = Callable[[str], None]

BUDGET_S = 60.0
DIRECT_S = 0.3
"""Calls that take longer are measured on a slice of their rows."""
SLICE_S = 0.1
"""How long the slice should take."""
LARGEST_BYTES = 1 << 30
"""Inputs and outputs of one measurement; calls on more are sliced. With workspace and what the allocator holds
back, measuring stays around 2 GB."""
_RUNS = 6
_SETUP_S = 0.03
_FILLED_BYTES_PER_S = 1e9


class Measurer(Protocol):
    """What can measure calls; it knows tensors, this package does not."""

    @property
    def environment(self) -> Environment:
        """What its measurements depend on besides the call."""

    def measure(self, call: Call) -> CallMeasurement | None:
        """Runs the call alone; None when that is impossible."""

    def with_fewer_rows(self, call: Call, fraction: float) -> Call | None:
        """The same call on about that fraction of its rows; None when it has none to leave out."""

    def operand_bytes(self, call: Call) -> int:
        """Bytes that measuring the call allocates."""


@dataclass(frozen=True)
class Coverage:
    """On what the costs of some calls rest, for an honest report: how many, and how many seconds, by basis.

    measured: this very call. scaled: the call on fewer rows. interpolated: measured calls of other sizes.
    estimated: the rate of other measured calls. Views count nowhere."""

    calls: dict[Basis, int] = field(default_factory=dict)
    seconds: dict[Basis, float] = field(default_factory=dict)

    def share_s(self, *bases: Basis) -> float:
        """Share of the time that rests on these."""
        total = sum(self.seconds.values())
        return sum(self.seconds.get(basis, 0.0) for basis in bases) / total if total else 0.0

    def __str__(self) -> str:
        shares = (f"{n} {basis} ({100 * self.share_s(basis):.0f} % of the time)" for basis, n in self.calls.items())
        return ", ".join(shares) or "nothing to measure"


@dataclass(frozen=True, slots=True)
class _Cost:
    latency_s: float
    workspace_bytes: int
    basis: Basis | None


class MeasuredCost:
    """Costs on this machine (a `CostModel`). `prepare` measures; asking for a cost never does, so that costs
    change only in `prepare`, and the same table gives the same plan."""

    source: ClassVar[Source] = "measured"

    def __init__(self, cache: ProfileCache, measurer: Measurer) -> None:
        self.link_bytes_per_s = 1e9  # of a memory-mapped file on disk; assumed until somebody measures it
        self._cache = cache
        self._measurer = measurer
        self._table: dict[str, CallMeasurement] = {}
        self._calibration = Calibration()
        self._unread: dict[str, list[str]] = {}
        self._refused: set[str] = set()
        self._costs: dict[Call, _Cost] = {}
        self._texts: dict[Call, str] = {}
        self._load()

    def latency_s(self, call: Call) -> float:
        """Seconds that the call takes, its dispatch included; 0 for views."""
        return self._cost(call).latency_s

    def workspace_bytes(self, call: Call) -> int:
        """Bytes that the call allocates and frees while it runs, on top of its outputs."""
        return self._cost(call).workspace_bytes

    def transfer_s(self, nbytes: int) -> float:
        """Seconds of a Store to, or a Load from, a memory-mapped file."""
        return nbytes / self.link_bytes_per_s + 10e-6

    def table_hash(self) -> str:
        """Hash of every cost that was asked for: the plan follows from them."""
        lines = sorted(f"{self._text(c)} {cost.latency_s!r} {cost.workspace_bytes}" for c, cost in self._costs.items())
        return short_hash("\n".join(lines))

    def coverage(self, calls: Iterable[Call] | None = None) -> Coverage:
        """On what the costs of these calls rest, each counted as often as it comes; default: all asked for."""
        counts: Counter[Basis] = Counter()
        seconds: defaultdict[Basis, float] = defaultdict(float)
        for call in list(self._costs) if calls is None else calls:
            cost = self._cost(call)
            if cost.basis is not None:
                counts[cost.basis] += 1
                seconds[cost.basis] += cost.latency_s
        bases: tuple[Basis, ...] = ("measured", "scaled", "interpolated", "estimated")
        return Coverage({b: counts[b] for b in bases if counts[b]}, {b: seconds[b] for b in bases if counts[b]})

    def prepare(
        self, calls: Iterable[Call], progress: Progress = lambda message: None, budget_s: float = BUDGET_S
    ) -> Coverage:
        """Measures the distinct calls that are missing, for at most `budget_s` seconds, and says on what the
        costs of all of them rest.

        First those that tell most about the step per second of measuring: time in the step (latency times
        occurrences, estimated) over time to measure."""
        counted = Counter(call for call in calls if work(call) is not None)
        self._load()
        missing = [call for call in counted if self._is_missing(call)]
        missing.sort(
            key=lambda call: (-counted[call] * self._estimate_s(call) / self._effort_s(call), self._text(call))
        )
        start = time.monotonic()
        for done, call in enumerate(missing):
            spent_s = time.monotonic() - start
            progress(f"measuring operators: {done} of {len(missing)}, {spent_s:.0f} s of at most {budget_s:.0f} s")
            if spent_s + self._effort_s(call) <= budget_s and self._is_missing(call):
                self._measure(call)
        self._costs.clear()
        return self.coverage(counted.elements())

    def _is_missing(self, call: Call) -> bool:
        text = self._text(call)
        return text not in self._table and text not in self._refused

    def _load(self) -> None:
        """Takes in what this or another process has measured before."""
        for text, measurement in self._cache.load(self._measurer.environment).items():
            if text not in self._table:
                self._table[text] = measurement
                self._unread.setdefault(op_of(text), []).append(text)

    def _read(self, ops: Iterable[str]) -> None:
        """Reads the loaded calls of these operators into the calibration: a tenth of a millisecond each."""
        for op in ops:
            for text in self._unread.pop(op, ()):
                with suppress(PlanError):  # not written by this version
                    self._calibration.add(parse_call(text), self._table[text])

    def _interpolated(self, call: Call) -> CallMeasurement | None:
        self._read([call.op])
        return self._calibration.interpolated(call)

    def _roofline(self, call: Call) -> CallMeasurement:
        self._read(sorted(self._unread))
        return self._calibration.roofline(call)

    def _text(self, call: Call) -> str:
        text = self._texts.get(call)
        if text is None:
            text = self._texts[call] = call_text(call)
        return text

    def _cost(self, call: Call) -> _Cost:
        known = self._costs.get(call)
        if known is None:
            known = self._costs[call] = self._looked_up(call)
        return known

    def _looked_up(self, call: Call) -> _Cost:
        if work(call) is None:
            return _Cost(0.0, 0, None)
        found = self._table.get(self._text(call))
        if found is not None:
            return _Cost(found.latency_s, found.workspace_bytes, "scaled" if found.scaled else "measured")
        found = self._interpolated(call)
        if found is not None:
            return _Cost(found.latency_s, found.workspace_bytes, "interpolated")
        found = self._roofline(call)
        workspace_bytes = found.workspace_bytes or rule_for(call.op).workspace_bytes(call)
        return _Cost(found.latency_s, workspace_bytes, "estimated")

    def _estimate_s(self, call: Call) -> float:
        return (self._interpolated(call) or self._roofline(call)).latency_s

    def _effort_s(self, call: Call) -> float:
        """Seconds that measuring the call will take, about."""
        estimate_s = self._estimate_s(call)
        filled_s = min(self._measurer.operand_bytes(call), LARGEST_BYTES) / _FILLED_BYTES_PER_S
        return _SETUP_S + filled_s + _RUNS * (estimate_s if estimate_s <= DIRECT_S else SLICE_S)

    def _measure(self, call: Call) -> None:
        """Measures a call, on a slice when it is long or large; a long call without slices stays unmeasured."""
        fits = LARGEST_BYTES / max(1, self._measurer.operand_bytes(call))
        estimate_s = self._estimate_s(call)
        fraction = min(fits, 1.0 if estimate_s <= DIRECT_S else SLICE_S / estimate_s)
        if fraction < 1.0:
            scaled = self._on_slice(call, fraction)
            if scaled is None or scaled.latency_s > DIRECT_S or fits < 1.0:
                if scaled is not None:
                    self._record(call, scaled)
                return
        self._record(call, self._measurer.measure(call))

    def _on_slice(self, call: Call, fraction: float) -> CallMeasurement | None:
        """Latency in proportion to a slice's work; workspace along the line through two slices."""
        part = self._slice(call, fraction)
        whole, done = work(call), None if part is None else work(part)
        if part is None or whole is None or done is None or not 0 < done.size < whole.size:
            return None
        cost = self._known(part)
        if cost is None:
            return None
        ratio = whole.size / done.size
        workspace_bytes = cost.workspace_bytes
        if workspace_bytes:
            workspace_bytes += max(0, round((whole.size - done.size) * self._workspace_slope(call, part, cost)))
        return replace(
            cost,
            latency_s=cost.latency_s * ratio,
            spread_s=cost.spread_s * ratio,
            workspace_bytes=workspace_bytes,
            scaled=True,
        )

    def _workspace_slope(self, call: Call, part: Call, cost: CallMeasurement) -> float:
        """Workspace bytes per unit of work, from this slice and its half, or twice it when it is one row; in
        proportion when there is neither."""
        done, whole = work(part), work(call)
        assert done is not None and whole is not None
        twice = 2.001 * done.size / whole.size
        other = self._measurer.with_fewer_rows(part, 0.5) or (self._slice(call, twice) if twice < 1 else None)
        second = None if other is None else self._known(other)
        size = 0 if other is None else (work(other) or done).size
        if second is None or size == done.size:
            return cost.workspace_bytes / done.size
        return (cost.workspace_bytes - second.workspace_bytes) / (done.size - size)

    def _slice(self, call: Call, fraction: float) -> Call | None:
        part = self._measurer.with_fewer_rows(call, fraction)
        return None if part is None or self._measurer.operand_bytes(part) > LARGEST_BYTES else part

    def _known(self, call: Call) -> CallMeasurement | None:
        if self._is_missing(call):
            self._record(call, self._measurer.measure(call))
        return self._table.get(self._text(call))

    def _record(self, call: Call, measurement: CallMeasurement | None) -> None:
        if measurement is None:
            self._refused.add(self._text(call))
            return
        self._table[self._text(call)] = measurement
        self._calibration.add(call, measurement)
        self._cache.store(self._measurer.environment, call, measurement)
