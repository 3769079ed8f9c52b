"""The step as rewrites make it before anything else is decided: whatever is faster and takes no more memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from magis.fission.parts import Infer
from magis.ir.graph import Call
from magis.rules.registry import rewrites
from magis.search.state import MState
from magis.search.strategy import DEFAULT, Strategy

MORE_BYTES = 1e-4
"""By which share a rewrite may raise the peak: numbers that it makes are small."""


def rewritten(
    base: MState,
    latency_s: Callable[[Call], float],
    infer: Infer,
    prepare: Callable[[Iterable[Call]], None],
    strategy: Strategy = DEFAULT,
) -> MState:
    """The state after every rewrite that makes it faster, each at its best site; the state itself if none does.
    `prepare` is told of calls before they are priced."""
    state = base
    for name, rule in rewrites().items():
        if not strategy.allows(name):
            continue
        for site in islice(rule.sites(state.scheduled, state.latencies_s.__getitem__), 1):
            change = rule.apply(state.program, site, infer)
            if change is None:
                continue
            graph = change.program.graph
            prepare(graph.call(graph.nodes[node]) for node in change.new_nodes)
            edited = state.scheduled.edited(graph, change.old_nodes, change.new_nodes)
            made = state.followed_by((name, site), change, edited, latency_s)
            if made.latency_s < state.latency_s and made.peak_bytes <= (1 + MORE_BYTES) * state.peak_bytes:
                state = made
    return state
