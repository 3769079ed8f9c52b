"""A model's graph-level dimensions: what can be split, and how many bytes lie along it."""

from __future__ import annotations

from dataclasses import dataclass

from magis.api.costs import Progress, silent
from magis.api.models import ModelSource
from magis.api.splits import loosened
from magis.fission.dimensions import all_dimensions, modules_of
from magis.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class DimensionView:
    """One dimension: its name (as `--split` takes it), its length, of how many separate pieces of the network it
    consists, the operators it runs through, the bytes of their results, and as a share of all operators' results;
    `modules` are those that it runs through; `halo`: it is read through
    windows, so that parts overlap."""

    name: str
    length: int
    components: int
    operators: int
    nbytes: int
    share: float
    modules: tuple[str, ...]
    halo: bool


def dims_of(source: ModelSource, progress: Progress = silent) -> tuple[DimensionView, ...]:
    """The dimensions of a model's step, those that cover most bytes first. Raises CaptureError and UsageError as
    `make_plan` does."""
    progress(f"capturing {source.reference}")
    return views(source.capture().graph)


def views(graph: Graph) -> tuple[DimensionView, ...]:
    """The dimensions of a graph."""
    program, _ = loosened(graph)
    everything = sum(
        spec.storage_bytes
        for node in program.graph.nodes.values()
        if not node.is_input
        for spec in node.outputs
        if spec is not None
    )
    found = []
    for each in all_dimensions(program.graph):
        nodes = {vertex.node for component in each.components for vertex in component}
        share = each.nbytes / everything if everything else 0.0
        modules = tuple(modules_of(program.graph, nodes))
        count = len(each.components)
        found.append(
            DimensionView(each.name, each.length, count, each.operators, each.nbytes, share, modules, each.halo)
        )
    return tuple(found)
