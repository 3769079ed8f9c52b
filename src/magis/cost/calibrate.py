"""Latencies of calls that were not measured, from those that were: along one dimension, else by a roofline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import log
from statistics import median

from magis.cost.profile import CallMeasurement
from magis.ir.args import Arg
from magis.ir.dtype import DType
from magis.ir.graph import Call, TensorSpec
from magis.ops.registry import rule_for
from magis.ops.rule import compute_dtype

DISPATCH_S = 2e-6
"""What a call takes on a CPU however small it is."""
RELIABLE_S = 20e-6
"""Shorter calls are mostly dispatch: rates are taken from longer ones where there are any."""
FARTHEST = 16
"""Largest ratio of sizes over which one measured call stands for another."""
DEFAULT_FLOPS = 40e9
DEFAULT_BYTES_PER_S = 5e9
"""Rates of a CPU core, for as long as nothing was measured."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a call does: floating-point operations of its matrix products, and bytes read and written."""

    flops: int
    nbytes: int

    @property
    def size(self) -> int:
        """The number to which its latency is in proportion: operations if there are any, else bytes."""
        return self.flops or self.nbytes


@lru_cache(maxsize=1 << 17)
def work(call: Call) -> Work | None:
    """The call's work by its rule; None for views, which do nothing."""
    kernels = rule_for(call.op).kernels(call)
    return Work(sum(k.flops for k in kernels), sum(k.nbytes for k in kernels)) if kernels else None


@dataclass(frozen=True, slots=True)
class _Form:
    """A call without its sizes (`family`), and its sizes: one tuple a tensor, one for each literal integer."""

    family: tuple[object, ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Point:
    sizes: tuple[tuple[int, ...], ...]
    work: Work
    cost: CallMeasurement


@dataclass(frozen=True, slots=True)
class _Relation:
    """The wanted call is `ratio` times as long as a measured one along the dimensions `along`."""

    ratio: float
    along: tuple[int, ...]
    cost: CallMeasurement


@dataclass
class Calibration:
    """Measured calls, by family for interpolation and by operator for rates.

    It depends on which calls were added, not on their order."""

    _families: dict[tuple[object, ...], list[_Point]] = field(default_factory=dict)
    _kinds: dict[tuple[str, DType], list[_Point]] = field(default_factory=dict)

    def add(self, call: Call, cost: CallMeasurement) -> None:
        """Takes in one measured call. Views are passed over."""
        done = work(call)
        if done is None or done.size == 0:
            return
        form = _form(call)
        point = _Point(form.sizes, done, cost)
        self._families.setdefault(form.family, []).append(point)
        self._kinds.setdefault((call.op, compute_dtype(call)), []).append(point)

    def interpolated(self, call: Call) -> CallMeasurement | None:
        """Latency and workspace between measured calls that differ in one dimension of each tensor, by one
        common factor, as the parts of a split do. Beyond the measured ones: in proportion to the nearest.
        None when there is no such call within a factor of `FARTHEST`."""
        form = _form(call)
        found = list(_relations(form.sizes, self._families.get(form.family, ())))
        if not found:
            return None
        nearest = min(found, key=_distance)
        if nearest.ratio == 1:
            return nearest.cost
        beyond = [r for r in found if r.along == nearest.along and (r.ratio > 1) != (nearest.ratio > 1)]
        return _between(nearest, min(beyond, key=_distance)) if beyond else _in_proportion(nearest)

    def roofline(self, call: Call) -> CallMeasurement:
        """Latency and workspace by the rates of the measured call of the same operator and type that is nearest
        in work, or by the median rate over operators, but no less time than its bytes take."""
        wanted = work(call)
        if wanted is None or wanted.size == 0:
            return CallMeasurement(DISPATCH_S, 0.0, 0, 0)
        near = _reliable(self._kinds.get((call.op, compute_dtype(call)), ()))
        workspace_bytes = 0
        if near:
            point = min(near, key=lambda p: (abs(log(p.work.size / wanted.size)), p.work.size, *_figures(p.cost)))
            rate = point.work.size / max(point.cost.latency_s - DISPATCH_S, 1e-9)
            workspace_bytes = round(point.cost.workspace_bytes * wanted.size / point.work.size)
        else:
            rate = self._rate(wanted.flops > 0)
        bytes_s = wanted.nbytes / self._rate(False) if wanted.flops else 0.0
        return CallMeasurement(DISPATCH_S + max(wanted.size / rate, bytes_s), 0.0, 0, workspace_bytes)

    def _rate(self, products: bool) -> float:
        """Median operations (or, without products, bytes) per second of the measured calls."""
        points = [p for kind in self._kinds.values() for p in kind if (p.work.flops > 0) == products]
        rates = [p.work.size / p.cost.latency_s for p in points if p.cost.latency_s >= RELIABLE_S]
        return median(rates) if rates else DEFAULT_FLOPS if products else DEFAULT_BYTES_PER_S


def _reliable(points: Iterable[_Point]) -> list[_Point]:
    known = list(points)
    return [p for p in known if p.cost.latency_s >= RELIABLE_S] or known


def _form(call: Call) -> _Form:
    tensors = [spec for spec in (*call.inputs, *call.outputs) if spec is not None]
    literals = [*call.args, *(value for _, value in call.kwargs)]
    family = (
        call.op,
        tuple(_without_integers(value) for value in literals),
        tuple(name for name, _ in call.kwargs),
        tuple((spec.dtype, len(spec.shape), _layout(spec)) for spec in tensors),
    )
    numbers = ((n,) for value in literals for n in _integers(value))
    return _Form(family, (*(spec.shape for spec in tensors), *numbers))


def _layout(spec: TensorSpec) -> tuple[int, ...]:
    """Dimensions from the outermost in memory inwards; empty when that is their order."""
    if spec.is_contiguous:
        return ()
    return tuple(sorted(range(len(spec.shape)), key=lambda i: (-spec.strides[i], i)))


def _without_integers(value: Arg) -> object:
    if isinstance(value, tuple):
        return tuple(_without_integers(item) for item in value)
    return "an integer" if _is_integer(value) else (type(value), value)


def _integers(value: Arg) -> Iterator[int]:
    if isinstance(value, tuple):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int) and _is_integer(value):
        yield value


def _is_integer(value: Arg) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _relations(sizes: tuple[tuple[int, ...], ...], points: Iterable[_Point]) -> Iterator[_Relation]:
    for point in points:
        found = _ratio(sizes, point.sizes)
        if found is not None and 1 / FARTHEST <= found[0] <= FARTHEST:
            yield _Relation(*found, point.cost)


def _ratio(
    ours: tuple[tuple[int, ...], ...], theirs: tuple[tuple[int, ...], ...]
) -> tuple[float, tuple[int, ...]] | None:
    """By what factor ours are longer, and for each tensor in which dimension (-1: none)."""
    longer, shorter = 1, 1
    along = []
    for mine, other in zip(ours, theirs):
        if mine == other:
            along.append(-1)
            continue
        different = [i for i, (a, b) in enumerate(zip(mine, other)) if a != b]
        a, b = mine[different[0]], other[different[0]]
        if len(different) > 1 or a <= 0 or b <= 0 or (longer != shorter and a * shorter != b * longer):
            return None
        longer, shorter = a, b
        along.append(different[0])
    return longer / shorter, tuple(along)


def _distance(relation: _Relation) -> tuple[float, tuple[int, ...], float, int]:
    return max(relation.ratio, 1 / relation.ratio), relation.along, *_figures(relation.cost)


def _figures(cost: CallMeasurement) -> tuple[float, int]:
    """Settles ties, so that the order of measurements does not matter."""
    return cost.latency_s, cost.workspace_bytes


def _between(one: _Relation, other: _Relation) -> CallMeasurement:
    """Linear between a shorter and a longer call, at size 1 where theirs are 1 / ratio."""
    low, high = sorted((one, other), key=lambda relation: 1 / relation.ratio)
    start, end = 1 / low.ratio, 1 / high.ratio
    share = (1 - start) / (end - start)

    def mix(a: float, b: float) -> float:
        return a + (b - a) * share

    latency_s = mix(low.cost.latency_s, high.cost.latency_s)
    workspace_bytes = round(mix(low.cost.workspace_bytes, high.cost.workspace_bytes))
    return CallMeasurement(latency_s, 0.0, 0, workspace_bytes)


def _in_proportion(near: _Relation) -> CallMeasurement:
    ratio, fixed_s = near.ratio, min(DISPATCH_S, near.cost.latency_s)
    latency_s = fixed_s + (near.cost.latency_s - fixed_s) * ratio
    return CallMeasurement(latency_s, 0.0, 0, round(near.cost.workspace_bytes * ratio))
