"""`magis why MODEL`: which tensors make the peak, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from magis.api.units import human_bytes
from magis.cli.chart import chart
from magis.cli.options import Batch, Image, Json, Model, Seq, sizes
from magis.cli.output import guarded_stdout, print_table, working, write, write_json

if TYPE_CHECKING:
    from magis.api.why import HotTensor, PeakReport, Place

TOP = 10
_KINDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "state": "optimizer state",
    "batch": "batch",
    "constant": "constants of the model",
}
_PURPOSES = {
    "result": "gradients and results",
    "saved": "saved for the backward pass",
    "temporary": "temporaries",
}


def command(
    model: Model,
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="How many tensors and modules to list.")] = TOP,
    batch: Batch = None,
    seq: Seq = None,
    image: Image = None,
    as_json: Json = False,
) -> None:
    """Say which tensors make the memory peak of eager's step, in module names and source lines."""
    from magis.api.models import resolve

    source = resolve(model, sizes(batch, seq, image))
    with guarded_stdout(as_json), working(f"loading {model}") as progress:
        import msgspec

        from magis.api.why import why

        report = why(source, progress)
    if as_json:
        cut = msgspec.structs.replace(report, tensors=report.tensors[:top], modules=report.modules[:top])
        write_json(cut)
    else:
        _print(report, top)


def _print(report: PeakReport, top: int) -> None:
    steps = len(report.live_bytes)
    write(f"{report.model}, batch {report.batch}: peak {human_bytes(report.peak_bytes)}\n")
    write(f"at step {report.peak.step} of {steps}, {where(report.peak)}: {report.peak.op}\n\n")
    write(chart(report.live_bytes, report.peak.step))
    residents = [(_KINDS[kind], nbytes) for kind, nbytes in report.residents.items()]
    held = [(_PURPOSES[purpose], nbytes) for purpose, nbytes in report.purposes.items()]
    parts = [*residents, *held, ("operator workspace", report.workspace_bytes)]
    rows = [(name, human_bytes(size), share(size, report.peak_bytes)) for name, size in parts if size]
    write("\n")
    print_table(("live at the peak", "bytes", "share"), rows, right=("bytes", "share"))
    write("\n")
    rows = [
        (entry.module or "(the model itself, or its loss)", str(entry.tensors), human_bytes(entry.nbytes))
        for entry in report.modules[:top]
    ]
    _table("module", rows, len(report.modules), ("module", "tensors", "bytes"), ("tensors", "bytes"))
    write("\n")
    tensors = [_row(tensor) for tensor in report.tensors[:top]]
    columns = ("tensor", "bytes", "type", "module", "operator", "line", "made at step", "kept until")
    _table("tensor", tensors, len(report.tensors), columns, ("bytes",))


def _table(
    what: str, rows: Sequence[tuple[str, ...]], total: int, columns: tuple[str, ...], right: tuple[str, ...]
) -> None:
    print_table(columns, rows, right)
    if total > len(rows):
        write(f"and {total - len(rows)} more {what}s: --top {total} lists all\n")


def _row(tensor: HotTensor) -> tuple[str, ...]:
    shape = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
    born = tensor.born
    line = born.line.rpartition("/")[2]
    operator = born.op.removeprefix("aten.").removesuffix(".default")
    return tensor.name, human_bytes(tensor.nbytes), shape, born.module, operator, line, _when(born), _when(tensor.dies)


def _when(place: Place) -> str:
    return f"{place.step} {place.direction}"


def where(place: Place) -> str:
    """Direction, module and source line in words."""
    line = f" ({place.line})" if place.line else ""
    return f"{_what(place)}{line}"


def _what(place: Place) -> str:
    return f"{place.direction} of {place.module}" if place.module else place.direction


def share(part: int, whole: int) -> str:
    """A percentage."""
    return f"{part / whole:.1%}" if whole else ""
