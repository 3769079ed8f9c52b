"""A plan made by hand: exactly the regions that the caller asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from magis.api.limits import SplitRequest, Splits
from magis.errors import UsageError
from magis.fission.dimensions import Dimension, all_dimensions, modules_of
from magis.fission.parts import CannotSplitError
from magis.fission.pieces import Pieces
from magis.fission.region import is_view
from magis.fission.tree import Fission, Program
from magis.ir.graph import Graph, NodeId
from magis.rules.loosen import Loosen, loose_ends
from magis.rules.open_softmax import OpenSoftmax, openable
from magis.rules.split import Split, fitting, split, split_site
from magis.search.state import Step

LEAST = 0.01
"""Pieces of a dimension with less than this share of the largest one's bytes stay whole."""


def split_by_hand(graph: Graph, splits: Splits) -> tuple[Program, tuple[Step, ...]]:
    """The program with the regions asked for, each inside those before it where they overlap, and the steps to it.

    Raises UsageError when a dimension or module does not exist, or when nothing of it can be split."""
    program, history = loosened(graph)
    if any(request.dimension in ("vocabulary", "classes") for request in splits.wanted):
        site = openable(program.graph)
        change = OpenSoftmax().apply(program, site) if site else None
        if change is not None:
            program, history = change.program, (*history, (OpenSoftmax.name, site))
    for request in splits.wanted:
        program, steps = _requested(program, request, splits.wide)
        history += steps
    return program, history


def loosened(graph: Graph) -> tuple[Program, tuple[Step, ...]]:
    """The program ready for regions: see `magis.rules.loosen`."""
    site = loose_ends(graph)
    change = Loosen().apply(Program(graph), site) if site else None
    return (Program(graph), ()) if change is None else (change.program, ((Loosen.name, site),))


def _requested(program: Program, request: SplitRequest, wide: bool) -> tuple[Program, tuple[Step, ...]]:
    steps: list[Step] = []
    refusals: list[str] = []
    regions = _regions(program.graph, request)
    largest = max((_bytes(program.graph, region) for region in regions), default=0)
    for region in regions:
        wanted = replace(region, parts=min(request.parts, region.length), wide=wide)
        for fitted in fitting(program, wanted):
            piece = replace(fitted, parts=min(fitted.parts, fitted.length))
            if not _is_worth_it(program.graph, piece, largest) or piece.length < 2:
                continue
            try:
                site = split_site(piece, program.graph)
                change = split(program, piece)
            except CannotSplitError as error:
                refusals.append(str(error))
                continue
            program = change.program
            steps.append((Split.name, site))
    if not steps:
        where = f" in {request.module}" if request.module else ""
        why = refusals[0] if refusals else "no two operators in a row are independent along it"
        raise UsageError(f"{request.dimension}{where} cannot be split: {why}; `magis dims` lists what can be")
    return program, tuple(steps)


def _regions(graph: Graph, request: SplitRequest) -> list[Fission]:
    """The convex pieces of the dimension in the module, largest first."""
    known = all_dimensions(graph)
    named = [dimension for dimension in known if dimension.name == request.dimension]
    if not named:
        names = ", ".join(dict.fromkeys(dimension.name for dimension in known))
        raise UsageError(f"there is no dimension {request.dimension!r}; there are: {names}")
    inside = None if not request.module else set(_in_module(graph, request.module))
    if inside is not None and not inside:
        raise UsageError(f"no operator belongs to a module {request.module!r}; {_modules(graph)}")
    found = [piece for dimension in named for piece in _pieces(dimension, inside)]
    return sorted(found, key=lambda f: (-len(f.region), min(f.region)))


def _pieces(dimension: Dimension, inside: set[NodeId] | None) -> Iterator[Fission]:
    pieces = Pieces(dimension.dims)
    for component in dimension.components:
        yield from pieces.of(component, inside, dimension.name)


def _in_module(graph: Graph, module: str) -> Iterator[NodeId]:
    for node in graph.nodes.values():
        path = node.origin.module.partition(" ")[0]
        if not node.is_input and (path == module or path.startswith(f"{module}.")):
            yield node.id


def _modules(graph: Graph) -> str:
    outermost = dict.fromkeys(path.split(".")[0] for path in modules_of(graph, graph.nodes))
    return f"the outermost modules are: {', '.join(list(outermost)[:12])}"


def _is_worth_it(graph: Graph, region: Fission, largest: int) -> bool:
    """Whether two or more of its operators compute anything, and not next to nothing."""
    computing = sum(not is_view(graph.nodes[node]) for node in region.region)
    return computing > 1 and _bytes(graph, region) >= LEAST * largest


def _bytes(graph: Graph, region: Fission) -> int:
    specs = (spec for node in region.region for spec in graph.nodes[node].outputs)
    return sum(spec.storage_bytes for spec in specs if spec is not None)
