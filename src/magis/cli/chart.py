"""A small chart of live bytes over the steps, in block characters."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from magis.api.units import human_bytes

COLUMNS, ROWS = 72, 6
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN = " ....::::#"


def chart(live_bytes: Sequence[int], peak_step: int, columns: int = COLUMNS, rows: int = ROWS) -> str:
    """Lines of text: bytes upwards from 0, steps to the right, the largest value of each column, the peak marked.

    Empty when there is nothing to show."""
    top = max(live_bytes, default=0)
    if not top:
        return ""
    columns = min(columns, len(live_bytes))
    highest = _column_maxima(live_bytes, columns)
    labels = [human_bytes(top), *[""] * (rows - 2), "0 B"] if rows > 1 else [human_bytes(top)]
    margin = max(map(len, labels))
    blocks = _blocks()
    lines = []
    for row, label in enumerate(labels):
        floor = rows - 1 - row
        filled = [min(max(value / top * rows - floor, 0.0), 1.0) for value in highest]
        bar = "".join(blocks[round(share * 8)] for share in filled)
        lines.append(f"{label:>{margin}} |{bar}".rstrip())
    mark = min(peak_step * columns // len(live_bytes), columns - 1)
    lines.append(f"{'':>{margin}} {' ' * (mark + 1)}^ step {peak_step}")
    return "\n".join(lines) + "\n"


def _column_maxima(values: Sequence[int], columns: int) -> list[int]:
    edges = [i * len(values) // columns for i in range(columns + 1)]
    return [max(values[a:b]) for a, b in itertools.pairwise(edges)]


def _blocks() -> str:
    """Block characters where the output can show them."""
    try:
        _BLOCKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN
    return _BLOCKS
