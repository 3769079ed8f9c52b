"""`magis bench`: tables that compare plans with what can be reached otherwise."""

from __future__ import annotations

from collections.abc import Iterable
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


def _check(models: list[str] | None, known: Iterable[str]) -> None:
    from magis.errors import UsageError

    for model in models or ():
        if model not in known:
            raise UsageError(f"{model} is none of the published networks: {', '.join(known)}")


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

    _check(models, LIMITS[0].grid)
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
                f"{cell.evaluated / max(cell.seconds, 1e-9):,.0f}",
                f"{cell.best_at_s:.1f} s",
            )
            for cell in found
        ]
        columns = ("network", "limit", "reached", "grid", "", "in parts", "variants/s", "best after")
        print_table(columns, rows, right=("reached", "grid", "variants/s", "best after"))
        write(
            "\nsimulated; under a limit on time the share of eager's peak, under one on memory the overhead in time\n"
        )
    if not all(cell.good for cell in found):
        raise typer.Exit(WORSE)


@app.command()
def planner(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="bert, btlm; by default both.")
    ] = None,
    as_json: Json = False,
) -> None:
    """How many variants the search evaluates in a second, and what it reaches in 5 s (BERT) and 20 s (BTLM)."""
    from magis.bench.planner import PUBLISHED, SECONDS, speeds

    _check(models, SECONDS)
    found = []
    with guarded_stdout(as_json), working("planning") as progress:
        for speed in speeds(models or ()):
            found.append(speed)
            progress(f"{speed.model}: {speed.evaluated_per_s:,.0f} variants/s")
    if as_json:
        lines = [{**asdict(s), "evaluated_per_s": s.evaluated_per_s, "good": s.good} for s in found]
        write_json({"speeds": lines})
    else:
        rows = [
            (
                speed.model,
                f"{speed.evaluated:,}",
                f"{speed.evaluated_per_s:,.0f}",
                f"{PUBLISHED[speed.model]:.0f}",
                f"{speed.memory_ratio:.3f}",
                f"{speed.grid:.3f}",
                f"{speed.search_s:.1f} s",
                f"{speed.total_s:.1f} s",
                "" if speed.good else "worse",
            )
            for speed in found
        ]
        columns = ("network", "variants", "a second", "published", "reached", "grid", "search", "with capture", "")
        print_table(columns, rows, right=columns[1:8])
        write("\nsimulated; at most 10 % slower; reached: the share of eager's peak\n")
    if not all(speed.good for speed in found):
        raise typer.Exit(WORSE)
