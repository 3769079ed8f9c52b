"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Model: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A zoo name (`magis models`), file.py:factory or package.module:factory."),
]
PlanPath: TypeAlias = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, made by `magis plan`.")]
Batch: TypeAlias = Annotated[
    int | None, typer.Option("--batch", min=1, metavar="N", help="Batch size; default: the model's own.")
]
Seq: TypeAlias = Annotated[
    int | None, typer.Option("--seq", min=1, metavar="N", help="Tokens in a sequence; default: the model's own.")
]
Image: TypeAlias = Annotated[
    int | None, typer.Option("--image", min=1, metavar="N", help="Side of a square image; default: the model's own.")
]
Seed: TypeAlias = Annotated[
    int,
    typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="Seeds the weights and the step's random draws."),
]
SwapDir: TypeAlias = Annotated[
    Path | None,
    typer.Option("--swap-dir", metavar="DIR", help="Folder for a file of tensors that are swapped out on a CPU."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def sizes(batch: int | None, seq: int | None, image: int | None) -> dict[str, int | None]:
    """The sizes asked for, by name."""
    return {"batch": batch, "seq": seq, "image": image}
