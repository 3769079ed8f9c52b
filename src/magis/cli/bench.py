"""`magis bench`: tables that compare plans with what can be reached otherwise."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from magis.cli.options import Json
from magis.cli.output import guarded_stdout, print_table, working, write, write_json

WORSE = 1

app = typer.Typer(help="Compare plans with what can be reached otherwise.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass


@app.command()
def limits(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Published networks; all seven by default.")
    ] = None,
    budget: Annotated[float, typer.Option("--budget", metavar="S", help="Seconds of search for each plan.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Plan the published networks within limits on time and memory (simulated), beside a simple grid of plans."""
    from magis.bench.limits import LIMITS, cells
    from magis.errors import UsageError

    known = LIMITS[0].grid
    for model in models or ():
        if model not in known:
            raise UsageError(f"{model} is none of the published networks: {', '.join(known)}")
    found = []
    with guarded_stdout(as_json), working("planning") as progress:
        for cell in cells(models or (), budget):
            found.append(cell)
            progress(f"{cell.model}, {cell.limit}: {cell.figure:.3f} (grid {cell.grid:.3f})")
    if as_json:
        write_json({"budget_s": budget, "cells": [{**asdict(cell), "good": cell.good} for cell in found]})
    else:
        rows = [
            (
                cell.model,
                cell.limit,
                f"{cell.figure:.3f}",
                f"{cell.grid:.3f}",
                "" if cell.good else "worse" if cell.met else "not met",
                ", ".join(cell.regions),
                f"{cell.states / max(cell.seconds, 1e-9):.0f}",
                f"{cell.best_at_s:.1f} s",
            )
            for cell in found
        ]
        columns = ("network", "limit", "reached", "grid", "", "in parts", "states/s", "best after")
        print_table(columns, rows, right=("reached", "grid", "states/s", "best after"))
        write(
            "\nsimulated; under a limit on time the share of eager's peak, under one on memory the overhead in time\n"
        )
    if not all(cell.good for cell in found):
        raise typer.Exit(WORSE)
