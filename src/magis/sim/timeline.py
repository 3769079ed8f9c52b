"""Symbolic memory: what lives when, worked out by walking a routine without running it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from magis.ir.graph import Call, NodeId, TensorSpec, Value
from magis.lower.launches import launched, made
from magis.lower.routine import (
    Accumulate,
    Allocate,
    Compute,
    Free,
    Instruction,
    Load,
    Loop,
    Register,
    Routine,
    Slice,
    Store,
    Wait,
    Write,
)
from magis.sim.links import Links, no_transfer


def no_workspace(call: Call) -> int:
    """No operator allocates anything but its results."""
    return 0


def no_latency(call: Call) -> float:
    """Nothing takes time."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One storage that the step allocates: live from step `first` to the end of step `last`. `value` is the
    value that owns it, None for a copy that only a loop needs."""

    value: Value | None
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Timeline:
    """Memory step by step. A step is an instruction that may allocate or launch: all but Free and Loop; a
    loop's body appears once, since its parts are alike (walk `expand(routine)` to see each).

    `live_bytes[i]` is everything live while step i runs: residents, its inputs and outputs, its workspace.
    `nodes[i]` is the graph node it runs, None for a loop's copies and sums; `repeats[i]` how often it runs.
    `host_peak_bytes` is the most that is swapped out at a time.
    """

    resident_bytes: int
    live_bytes: tuple[int, ...]
    nodes: tuple[NodeId | None, ...]
    repeats: tuple[int, ...]
    lifetimes: tuple[Lifetime, ...]
    host_peak_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Everything live at the worst moment; without steps, the residents."""
        return max(self.live_bytes, default=self.resident_bytes)

    @property
    def peak_steps(self) -> tuple[int, ...]:
        """All worst moments."""
        peak = self.peak_bytes
        return tuple(step for step, live in enumerate(self.live_bytes) if live == peak)

    @property
    def hotspots(self) -> frozenset[Value]:
        """Owners of the storages (of more than 0 bytes) that are live at any worst moment, residents left out."""
        worst = self.peak_steps
        found = set()
        for life in self.lifetimes:
            at = bisect_left(worst, life.first)
            if life.nbytes and life.value is not None and at < len(worst) and worst[at] <= life.last:
                found.add(life.value)
        return frozenset(found)


def timeline(routine: Routine, workspace_bytes: Callable[[Call], int] = no_workspace) -> Timeline:
    """What lives at each step of a well-formed routine."""
    return Walk(routine, workspace_bytes, no_latency, lambda nbytes: 0.0).timeline()


class Walk:
    """One pass over a routine with symbolic storages, counted by the registers that lie in them."""

    def __init__(
        self,
        routine: Routine,
        workspace_bytes: Callable[[Call], int],
        latency_s: Callable[[Call], float],
        transfer_s: Callable[[int], float] = no_transfer,
    ) -> None:
        self.workspace_bytes = workspace_bytes
        self.latency_s = latency_s
        self.latencies: list[float] = []  # of every launch and wait, in order, loops unrolled
        self._links = Links(transfer_s)
        self._host: dict[Register, int] = {}
        self._host_peak_bytes = 0
        self._values = routine.values
        self._resident_bytes = routine.resident_bytes
        self._live = self._resident_bytes
        self._live_bytes: list[int] = []
        self._nodes: list[NodeId | None] = []
        self._repeats: list[int] = []
        self._times = 1
        # Storages: owner's register, bytes, registers that lie in it, first and last step. Number 0 stands for
        # all of the caller's tensors and never goes.
        self._owner: list[Register] = [-1]
        self._nbytes = [0]
        self._registers = [1]
        self._first = [0]
        self._last = [0]
        self._storage: dict[Register, int] = dict.fromkeys(routine.inputs, 0)
        self._specs: dict[Register, TensorSpec] = dict(zip(routine.inputs, routine.input_specs))
        self._run(routine.body)

    def timeline(self) -> Timeline:
        """What the walk found."""
        end = max(len(self._live_bytes) - 1, 0)
        get = self._values.get
        lifetimes = tuple(
            Lifetime(get(owner), nbytes, first, end if last < 0 else last)
            for owner, nbytes, first, last in zip(self._owner[1:], self._nbytes[1:], self._first[1:], self._last[1:])
        )
        return Timeline(
            self._resident_bytes,
            tuple(self._live_bytes),
            tuple(self._nodes),
            tuple(self._repeats),
            lifetimes,
            self._host_peak_bytes,
        )

    def _run(self, body: Iterable[Instruction]) -> None:
        handlers: dict[type, Callable[[Any], None]] = {
            Compute: self._compute,
            Free: self._free,
            Loop: self._loop,
            Allocate: self._other,
            Slice: self._other,
            Write: self._other,
            Accumulate: self._other,
            Store: self._store,
            Load: self._load,
            Wait: self._wait,
        }
        for instruction in body:
            handlers[type(instruction)](instruction)

    def _compute(self, instruction: Compute) -> None:
        call = instruction.call
        specs, storage = self._specs, self._storage
        for register, spec in zip(instruction.outputs, call.outputs):
            if register is None or spec is None:
                continue
            specs[register] = spec
            if spec.alias_of is None:
                self._new(register, spec.storage_bytes)
            else:
                shared = storage[instruction.inputs[spec.alias_of]]
                storage[register] = shared
                self._registers[shared] += 1
        self._live_bytes.append(self._live + self.workspace_bytes(call))
        self._nodes.append(instruction.node)
        self._repeats.append(self._times)
        self._took(self.latency_s(call))

    def _took(self, seconds: float) -> None:
        self.latencies.append(seconds)
        self._links.run(seconds)

    def _store(self, store: Store) -> None:
        self._specs[store.register] = store.spec
        self._host[store.register] = store.spec.nbytes
        self._host_peak_bytes = max(self._host_peak_bytes, sum(self._host.values()))
        self._links.store(store.register, store.spec.nbytes)
        self._step(store.node)

    def _load(self, load: Load) -> None:
        self._specs[load.register] = load.spec
        self._new(load.register, load.spec.storage_bytes)
        self._links.load(load.register, load.spec.nbytes)
        self._step(load.node)

    def _wait(self, wait: Wait) -> None:
        self.latencies.append(self._links.wait(wait.register))
        self._step(None)

    def _step(self, node: NodeId | None) -> None:
        self._live_bytes.append(self._live)
        self._nodes.append(node)
        self._repeats.append(self._times)

    def _other(self, instruction: Allocate | Slice | Write | Accumulate) -> None:
        call = launched(instruction, self._specs)
        for register, spec in made(instruction):
            self._specs[register] = spec
            if spec.alias_of is None or not isinstance(instruction, Slice):
                self._new(register, spec.storage_bytes)
            else:
                shared = self._storage[instruction.source]
                self._storage[register] = shared
                self._registers[shared] += 1
        self._live_bytes.append(self._live + (0 if call is None else self.workspace_bytes(call)))
        self._nodes.append(None)
        self._repeats.append(self._times)
        if call is not None:
            self._took(self.latency_s(call))

    def _new(self, register: Register, nbytes: int) -> None:
        self._storage[register] = len(self._owner)
        self._owner.append(register)
        self._nbytes.append(nbytes)
        self._registers.append(1)
        self._first.append(len(self._live_bytes))
        self._last.append(-1)
        self._live += nbytes

    def _free(self, instruction: Free) -> None:
        counts = self._registers
        for register in instruction.registers:
            if register in self._host:
                del self._host[register]
                continue
            place = self._storage.pop(register)
            counts[place] -= 1
            if not counts[place]:
                self._live -= self._nbytes[place]
                self._last[place] = len(self._live_bytes) - 1

    def _loop(self, loop: Loop) -> None:
        """Walks one part: a body frees what it makes, so every part meets the same memory."""
        before, began, idle = len(self.latencies), self._links.now, self._links.idle
        self._times *= loop.parts
        self._run(loop.body)
        if idle or not _transfers(loop.body):
            self.latencies.extend(self.latencies[before:] * (loop.parts - 1))
            self._links.now += (self._links.now - began) * (loop.parts - 1)
        else:
            for _ in range(loop.parts - 1):
                self._again(loop.body)
        self._times //= loop.parts

    def _again(self, body: Iterable[Instruction]) -> None:
        """Another part, which waits for other transfers; its steps are known."""
        lists: list[list[Any]] = [self._live_bytes, self._nodes, self._repeats]
        lists += [self._owner, self._nbytes, self._registers, self._first, self._last]
        lengths = [len(each) for each in lists]
        self._run(body)
        for each, length in zip(lists, lengths):
            del each[length:]


def _transfers(body: Iterable[Instruction]) -> bool:
    return any(
        isinstance(instruction, Store) or (isinstance(instruction, Loop) and _transfers(instruction.body))
        for instruction in body
    )
