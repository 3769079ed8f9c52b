"""Random regions of a graph, and the check that parts give what the whole gives, in the memory that was predicted."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir

import torch

from builder import Recorded
from magis.aten.infer import infer
from magis.backend.meters import storage_peak
from magis.backend.runtime import compile_routine
from magis.backend.swapping import SwapFile
from magis.fission.dim_graph import dim_graph, window_graph
from magis.fission.parts import CannotSplitError
from magis.fission.pieces import Pieces
from magis.fission.tree import Fission, Program
from magis.ir.graph import Graph, NodeId, Schedule, Value
from magis.lower.check import verify_routine
from magis.lower.lower import lower
from magis.lower.routine import Loop, Routine, expand
from magis.rules.loosen import Loosen, loose_ends
from magis.rules.remat import Rematerialise, recomputable, site
from magis.rules.split import fitting, split
from magis.rules.swap import Swap, late_site, swappable
from magis.schedule.baseline import eager_order
from magis.search.splitting import Prices, Splitter
from magis.sim.links import Host
from magis.sim.simulate import simulate
from magis.sim.timeline import no_latency, no_workspace

HOST = Host(lambda nbytes: 1e-6)
PRICES = Prices(no_latency, no_workspace, infer, HOST)
CLOSE = 1e-9
"""Largest difference of float64 results, as a share of a result's largest number (or of 1, if that is more)."""
EPSILON = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass(frozen=True)
class Split:
    """A program with regions, and its order."""

    program: Program
    schedule: Schedule
    peak_bytes: int

    def routine(self) -> Routine:
        """The code that runs it."""
        return lower(self.program, self.schedule, infer)


def loosened(graph: Graph) -> Program:
    """The program with means made sums where that lets a region contain them."""
    ends = loose_ends(graph)
    change = Loosen().apply(Program(graph), ends) if ends else None
    return Program(graph) if change is None else change.program


def random_split(program: Program, choice: random.Random, halo: bool = False) -> Split | None:
    """The program with a random region in parts, often with others elsewhere, around or inside; with `halo`, one that
    is read through windows among them. None when there is no region to be had. Raises CannotSplitError when the first
    region is refused."""
    others = choice.choice([0, 0, 0, 1, 1, 2])
    kinds = [False] * others + [halo] if halo and choice.random() < 0.3 else [halo] + [False] * others
    first = True
    for kind in kinds:
        fission = random_region(program, choice, kind)
        if fission is None:
            continue
        try:
            pieces = fitting(program, fission)
            if pieces:
                program = split(program, choice.choice(pieces)).program
        except CannotSplitError:
            if first:
                raise
        first = False
    if not any(f.halo for root in program.enabled for f in root.walk()) if halo else not program.enabled:
        return None
    if choice.random() < 0.25:
        program = _recomputed(program, choice)
    if choice.random() < 0.25:
        program = _swapped(program, choice)
    return planned(program)


def planned(program: Program) -> Split:
    """The program in the order and with the peak that it is given."""
    state = Splitter(PRICES).state(program)
    return Split(state.program, state.schedule, state.peak_bytes)


def random_region(program: Program, choice: random.Random, halo: bool = False) -> Fission | None:
    """A piece of a random component, in some parts; None when none was found in some tries."""
    graph = program.graph
    dims = window_graph(graph) if halo else dim_graph(graph)
    pieces = Pieces(dims)
    components = [c for c in dims.strict_components if any(not graph.nodes[v.node].is_input for v in c)]
    if halo:
        components = [c for c in components if any(dims.loop(v).loop.window is not None for v in c)]
    taken = {n for root in program.enabled for f in root.walk() if f.halo for n in f.region}  # these hold no others
    for _ in range(8 if components else 0):
        component = components[min(choice.randrange(len(components)), choice.randrange(len(components)))]
        among = [v.node for v in component if not graph.nodes[v.node].is_input and v.node not in taken]
        found = [p for p in pieces.of(component, _within(program, among, choice)) if p.halo == halo]
        found = found if choice.random() < 0.5 else found[:1]
        if found:
            piece = choice.choice(found)
            parts = choice.choice([2, 3, choice.randint(2, piece.length), piece.length])
            return replace(piece, parts=min(parts, piece.length), wide=True)
    return None


def _within(program: Program, among: list[NodeId], choice: random.Random) -> list[NodeId]:
    """All; or a stretch of a component's nodes, or some of them; or those of a region that runs in parts already."""
    how = choice.randrange(5)
    enabled = [region for root in program.enabled for region in root.walk() if not region.halo]
    if enabled and how in (0, 1, 2):
        inside = sorted(choice.choice(enabled).region)
        return inside if how == 0 else _stretch(inside, choice)
    if how in (0, 1) or not among:
        return among
    return _stretch(among, choice) if how in (2, 3) else [n for n in among if choice.random() < 0.7]


def _stretch(nodes: list[NodeId], choice: random.Random) -> list[NodeId]:
    start = choice.randrange(len(nodes))
    return nodes[start : start + choice.randint(1, len(nodes))]


def _recomputed(program: Program, choice: random.Random) -> Program:
    """The program with one node computed again for some of its readers, where that can be done."""
    graph = program.graph
    nodes = [n for n in graph.nodes.values() if not n.is_input and len(graph.users[n.id]) > 1 and recomputable(n)]
    if not nodes:
        return program
    node = choice.choice(nodes)
    readers = choice.sample(sorted(graph.users[node.id]), choice.randint(1, len(graph.users[node.id]) - 1))
    change = Rematerialise().apply(program, site([node.id], readers))
    return program if change is None else change.program


def _swapped(program: Program, choice: random.Random) -> Program:
    """The program with one tensor swapped for its later readers, where that can be done."""
    graph = program.graph
    values = [Value(n.id, i) for n in graph.nodes.values() for i in range(len(n.outputs))]
    values = [value for value in values if swappable(graph, value)]
    early = choice.choice(list(graph.nodes))
    where = late_site(graph, choice.choice(values), lambda reader: reader > early) if values else None
    change = None if where is None else Swap().apply(program, where)
    return program if change is None else change.program


def check_split(recorded: Recorded, found: Split, exact: list[torch.Tensor] | None = None) -> None:
    """Runs the parts, and asserts that results and memory are as they should be. With `exact` results, those of
    narrower types may be wrong by rounding, wide sums not by more than the whole graph's."""
    routine = found.routine()
    verify_routine(routine)
    assert any(isinstance(instruction, Loop) for instruction in routine.body)
    estimate = simulate(routine, no_latency, transfer_s=HOST.transfer_s)
    assert estimate == simulate(expand(routine), no_latency, transfer_s=HOST.transfer_s), (
        "a loop differs from itself unrolled"
    )
    results, peak = _run(routine, recorded)
    whole = lower(Program(recorded.graph), eager_order(recorded.graph))
    expected, _ = _run(whole, recorded)
    for number, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        _assert_close(ours, theirs, None if exact is None else exact[number], f"result {number}")
    assert peak == estimate.peak_bytes, f"measured {peak}, predicted {estimate.peak_bytes}"
    assert found.peak_bytes == estimate.peak_bytes, f"planned {found.peak_bytes}, simulated {estimate.peak_bytes}"


def exact_results(recorded: Recorded) -> list[torch.Tensor]:
    """Those of the whole graph."""
    return _run(lower(Program(recorded.graph), eager_order(recorded.graph)), recorded)[0]


def _run(routine: Routine, recorded: Recorded) -> tuple[list[torch.Tensor], int]:
    step, inputs, results = (
        compile_routine(routine, SwapFile(Path(gettempdir()))),
        recorded.fresh_inputs(),
        list[torch.Tensor](),
    )
    torch.manual_seed(5)
    with torch.no_grad():
        measured = storage_peak(lambda: results.extend(step(list(inputs))), inputs)
    return results, measured.peak_bytes


def _assert_close(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor | None, what: str) -> None:
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), what
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), what
        return
    assert torch.equal(ours.isfinite(), theirs.isfinite()), what
    wanted = theirs if exact is None else exact
    scale = max(1.0, _largest(wanted))
    allowed = CLOSE * scale
    if exact is not None:
        allowed = 3 * _largest(theirs.double() - exact) + 8 * EPSILON[theirs.dtype] * scale
    error = _largest(ours.double() - wanted.double())
    assert error <= allowed, f"{what} is wrong by {error:.3g} of {scale:.3g}"


def _largest(x: torch.Tensor) -> float:
    return float(x.nan_to_num(0, 0, 0).abs().max()) if x.numel() else 0.0
