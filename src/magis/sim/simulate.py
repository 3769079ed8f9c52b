"""Simulates a routine: peak memory and latency of one step, without tensors."""

from __future__ import annotations

from collections.abc import Callable
from math import fsum

from magis.ir.graph import Call
from magis.lower.routine import Routine
from magis.sim.estimate import Estimate
from magis.sim.links import no_transfer
from magis.sim.timeline import Walk, no_workspace


def simulate(
    routine: Routine,
    latency_s: Callable[[Call], float],
    workspace_bytes: Callable[[Call], int] = no_workspace,
    transfer_s: Callable[[int], float] = no_transfer,
) -> Estimate:
    """What one step of a well-formed routine takes: seconds (the sum over all launches, each part's, and over all waits
    for transfers), and bytes.

    Exactly equal to `simulate(expand(routine), ...)`: loops are walked once, their launches counted for each
    part, and the sum is correctly rounded whatever its order."""
    walk = Walk(routine, workspace_bytes, latency_s, transfer_s)
    found = walk.timeline()
    return Estimate(fsum(walk.latencies), found.peak_bytes, found.resident_bytes, found.hotspots, found.host_peak_bytes)
