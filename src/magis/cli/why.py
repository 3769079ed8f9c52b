"""`magis why MODEL|PLAN`: which tensors make the peak, and when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from magis.api.units import human_bytes
from magis.cli.chart import chart
from magis.cli.options import Batch, Image, Json, Seq, sizes
from magis.cli.output import guarded_stdout, print_table, working, write, write_json
from magis.errors import UsageError

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


ModelOrPlan: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|PLAN",
        help="A zoo name, file.py:factory or package.module:factory; or a plan file (.json), made by `magis plan`.",
    ),
]


def command(
    model: ModelOrPlan,
    top: Annotated[int, typer.Option("--top", min=1, metavar="N", help="How many tensors and modules to list.")] = TOP,
    batch: Batch = None,
    seq: Seq = None,
    image: Image = None,
    as_json: Json = False,
) -> None:
    """Say which tensors make the memory peak of eager's step, or of a plan, in module names and source lines."""
    asked = sizes(batch, seq, image)
    report = _of_plan(model, asked, as_json) if model.endswith(".json") else _of_model(model, asked, as_json)
    if as_json:
        import msgspec

        cut = msgspec.structs.replace(report, tensors=report.tensors[:top], modules=report.modules[:top])
        write_json(cut)
    else:
        _print(report, top)


def _of_model(model: str, asked: dict[str, int | None], as_json: bool) -> PeakReport:
    from magis.api.models import resolve

    source = resolve(model, asked)
    with guarded_stdout(as_json), working(f"loading {model}") as progress:
        from magis.api.why import why

        return why(source, progress)


def _of_plan(path: str, asked: dict[str, int | None], as_json: bool) -> PeakReport:
    given = next((name for name, value in asked.items() if value is not None), None)
    if given is not None:
        raise UsageError(f"{path} is a plan, which has its sizes: leave --{given} out, or name the model")
    with guarded_stdout(as_json), working(f"reading {path}"):
        from magis.api.plan_file import load_plan
        from magis.api.why import why_plan

        return why_plan(load_plan(Path(path)))


def _print(report: PeakReport, top: int) -> None:
    steps = len(report.live_bytes)
    write(f"{report.model}, batch {report.batch}: peak {human_bytes(report.peak_bytes)}\n")
    write(f"at step {report.peak.step} of {steps}, {where(report.peak)}: {report.peak.op}\n\n")
    write(chart(report.live_bytes, report.peak.step))
    residents = [(_KINDS[kind], nbytes) for kind, nbytes in report.residents.items()]
    held = [(_PURPOSES[purpose], nbytes) for purpose, nbytes in report.purposes.items()]
    parts = [(name, size) for name, size in (*residents, *held) if size]
    if report.workspace_known or report.workspace_bytes:
        parts.append((f"workspace of {operator(report.peak)}", report.workspace_bytes))
    rows = [(name, human_bytes(size), share(size, report.peak_bytes)) for name, size in parts]
    write("\n")
    print_table(("live at the peak", "bytes", "share"), rows, right=("bytes", "share"))
    if not report.workspace_known:
        write(
            "operators' workspace is not measured: `magis plan` on the model finds it, then `magis why` on the plan\n"
        )
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
    size = human_bytes(tensor.nbytes)
    return tensor.name, size, shape, born.module, operator(born), line, _when(born), _when(tensor.dies)


def operator(place: Place) -> str:
    """PyTorch's name of the operator, without what goes without saying."""
    return place.op.removeprefix("aten.").removesuffix(".default")


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
