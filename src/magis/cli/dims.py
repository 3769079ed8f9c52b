"""`magis dims MODEL`: the dimensions along which a model's step can be split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magis.api.models import resolve
from magis.api.units import human_bytes
from magis.cli.options import Batch, Image, Json, Model, Seed, Seq, sizes
from magis.cli.output import guarded_stdout, print_table, working, write, write_json

if TYPE_CHECKING:
    from magis.api.dims import DimensionView


def command(
    model: Model, batch: Batch = None, seq: Seq = None, image: Image = None, seed: Seed = 0, as_json: Json = False
) -> None:
    """List the dimensions of a model's step (batch, heads, hidden, ...) and the bytes that lie along each."""
    source = resolve(model, sizes(batch, seq, image), seed)
    with guarded_stdout(as_json), working(f"loading {model}") as progress:
        from magis.api.dims import dims_of

        found = dims_of(source, progress)
    if as_json:
        write_json({"model": source.reference, "dimensions": found})
        return
    rows = [
        (
            each.name,
            str(each.length),
            str(each.components),
            str(each.operators),
            human_bytes(each.nbytes),
            f"{each.share:.1%}",
            _modules(each),
        )
        for each in found
    ]
    columns = ("dimension", "length", "pieces", "operators", "bytes", "of all", "modules")
    print_table(columns, rows, right=columns[1:6])
    write("\nbytes: results of operators that lie along the dimension, which parts make smaller\n")
    write(f"`magis plan {model} --split DIM=PARTS` splits one, `--split DIM=PARTS@MODULE` only there\n")


def _modules(dimension: DimensionView) -> str:
    first, *rest = dimension.modules or ("",)
    return first + (f" and {len(rest)} more" if rest else "")
