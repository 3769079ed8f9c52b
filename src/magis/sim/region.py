"""What a region takes by itself: simulated as a routine of its own, so exactly as it takes it within a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import fsum

from magis.fission.contract import RegionCost
from magis.fission.parts import Infer, Scope
from magis.fission.region import boundary
from magis.fission.tree import Fission
from magis.ir.graph import Call, NodeId, TensorSpec, Value
from magis.lower.regions import lower_region
from magis.lower.routine import Register, Routine
from magis.sim.links import no_transfer
from magis.sim.timeline import Walk


def region_cost(
    fission: Fission,
    scope: Scope,
    order: Sequence[NodeId],
    latency_s: Callable[[Call], float],
    workspace_bytes: Callable[[Call], int],
    infer: Infer,
    transfer_s: Callable[[int], float] = no_transfer,
) -> RegionCost:
    """The cost of a region whose nodes run in `order`. Raises CannotSplitError."""
    border = boundary(scope.graph, fission.region)
    values: dict[Register, Value] = {}
    numbered = 0

    def number(value: Value | None) -> Register:
        nonlocal numbered
        numbered += 1
        if value is not None:
            values[numbered - 1] = value
        return numbered - 1

    outside = {value: number(value) for value in border.inputs}
    instructions, results = lower_region(fission, scope, order, outside, number, infer)
    routine = Routine(
        name="region",
        inputs=tuple(outside.values()),
        input_specs=tuple(_given(scope.spec(value)) for value in outside),
        input_roots=tuple(outside.values()),
        body=tuple(instructions),
        outputs=tuple(results.values()),
        output_names=tuple(str(value) for value in results),
        values=values,
    )
    walk = Walk(routine, workspace_bytes, latency_s, transfer_s)
    kept = sum(scope.spec(value).nbytes for value in border.outputs)
    return RegionCost(walk.timeline().peak_bytes - kept, fsum(walk.latencies))


def _given(spec: TensorSpec) -> TensorSpec:
    """The type of what the region finds: it occupies nothing more."""
    return replace(spec, storage_bytes=0, alias_of=None, writes=False)
