"""What commands print: tables and JSON on standard output, progress on standard error."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 160
"""Columns of a table that is not shown on a terminal."""
QUIET_S = 30.0


def console(stderr: bool = False) -> Console:
    """A console that prints text as it is; without colour when NO_COLOR is set or nobody watches."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A plain table; the columns named in `right` are aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    lines = console()
    with lines.capture() as captured:
        lines.print(table)
    shown = [line.rstrip() for line in captured.get().splitlines()]
    write("\n".join(line for line in shown if line) + "\n")


def write(text: str) -> None:
    """Text as it is, on standard output."""
    with suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.stdout.write(text)


def write_json(value: Any) -> None:
    """One JSON object on standard output."""
    import msgspec

    write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


@contextmanager
def guarded_stdout(active: bool) -> Iterator[None]:
    """While inside and `active`, all that models and processes print goes to standard error instead."""
    if not active:
        yield
        return
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class _Heartbeat:
    """Passes on a message now and then, as a line."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, message: str) -> None:
        now = time.monotonic()
        if now - self._last >= QUIET_S:
            self._last = now
            note(message)


@contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error while inside; gives the function that changes its words.

    Where nobody watches, long work says every `QUIET_S` seconds what it is at."""
    if not sys.stderr.isatty():
        yield _Heartbeat()
        return
    with console(stderr=True).status(message) as status:
        yield status.update


def note(message: str) -> None:
    """One line for people, on standard error."""
    print(message, file=sys.stderr)
