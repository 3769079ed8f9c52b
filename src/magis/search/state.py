"""M-State: a program in its order, what is predicted of it, and how it came about (paper section 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Protocol

from magis.fission.tree import Program
from magis.ir.fingerprint import Fingerprint, fingerprint, update_fingerprint
from magis.ir.graph import Call, Graph, NodeId, Schedule
from magis.ops.swap import STORE
from magis.rules.base import Change, Site
from magis.schedule.incremental import Scheduled
from magis.schedule.transfers import with_placed_transfers
from magis.sim.links import Host, stalls_s, swaps

Step = tuple[str, Site]
"""A rule's name and the site where it was applied."""


class Solution(Protocol):
    """A program in an order, what is predicted of it, and the steps that led to it."""

    @property
    def program(self) -> Program: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def latency_s(self) -> float: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def history(self) -> tuple[Step, ...]: ...


@dataclass(frozen=True, eq=False)
class MState:
    """A scheduled program. `latencies_s` has the seconds of each operator; `history` leads from the captured step
    to this program. `host` is the memory to swap to; None: there is none."""

    scheduled: Scheduled
    latencies_s: Mapping[NodeId, float]
    history: tuple[Step, ...] = ()
    host: Host | None = None

    @classmethod
    def of(
        cls,
        scheduled: Scheduled,
        latency_s: Callable[[Call], float],
        host: Host | None = None,
    ) -> MState:
        """A state without a history."""
        graph = scheduled.flat.graph
        latencies_s = {node: latency_s(graph.call(graph.nodes[node])) for node in scheduled.order}
        return cls(scheduled, latencies_s, host=host)

    @property
    def graph(self) -> Graph:
        """The program's graph."""
        return self.scheduled.flat.graph

    @property
    def program(self) -> Program:
        """The program."""
        return Program(self.graph)

    @property
    def schedule(self) -> Schedule:
        """All nodes in order, inputs first."""
        return self.scheduled.schedule

    @property
    def peak_bytes(self) -> int:
        """Everything live at the worst moment."""
        return self.scheduled.peak_bytes

    @cached_property
    def latency_s(self) -> float:
        """Seconds of all operators, and of all waits for transfers."""
        return fsum([*(self.latencies_s[node] for node in self.scheduled.order), *self._stalls])

    @property
    def fits_host(self) -> bool:
        """Whether all that is swapped out, at whatever time, fits into host memory."""
        nodes = self.graph.nodes.values()
        away = sum(spec.nbytes for node in nodes if node.op == STORE for spec in node.outputs if spec is not None)
        return away <= (0 if self.host is None else self.host.memory_bytes)

    @property
    def stalls_s(self) -> float:
        """Seconds of all waits for transfers."""
        return fsum(self._stalls)

    @cached_property
    def _stalls(self) -> list[float]:
        if self.host is None or not swaps(self.graph):
            return []
        return stalls_s(self.graph, self.scheduled.order, self.latencies_s, self.host.transfer_s)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Structural hash of the graph."""
        return fingerprint(self.graph)

    def changed_fingerprint(self, change: Change) -> Fingerprint:
        """That of a program that a rule made of this state's."""
        return update_fingerprint(
            self.fingerprint, self.graph, change.program.graph, change.old_nodes, change.new_nodes
        )

    def followed_by(
        self, step: Step, change: Change, scheduled: Scheduled, latency_s: Callable[[Call], float]
    ) -> MState:
        """The state after a change, in the given order."""
        graph = change.program.graph
        latencies = dict(self.latencies_s)
        for node in change.old_nodes:
            if node not in graph.nodes:
                latencies.pop(node, None)
        for node in change.new_nodes:
            latencies[node] = latency_s(graph.call(graph.nodes[node]))
        if self.host is not None and swaps(graph):
            scheduled = with_placed_transfers(scheduled, latencies, self.host.transfer_s)
        return MState(scheduled, latencies, (*self.history, step), self.host)
