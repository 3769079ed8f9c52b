"""Readable identifiers for generated code. Names from a plan become identifiers here, and nowhere else text."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NOT_WORD = re.compile(r"\W+", re.ASCII)
_LONGEST = 48


def stem(path: str, leaves: int = 1) -> str:
    """The telling end of a module path: its last names, after the nearest numbered block.

    >>> stem("bert.encoder.layer.0.attention.self.query")
    'layer_0_query'
    >>> stem("encoder.fc1.weight", leaves=2)
    'fc1_weight'
    """
    parts = [part for part in path.split(".") if part]
    tail = len(parts) - leaves
    numbered = next((i for i in range(len(parts) - 1, -1, -1) if parts[i].isdigit()), None)
    if numbered is None or numbered == 0:
        kept = parts[max(tail, 0) :]
    elif numbered >= tail:
        kept = parts[min(max(tail, 0), numbered - 1) :]
    else:
        kept = [*parts[numbered - 1 : numbered + 1], *parts[tail:]]
    return identifier("_".join(kept))


def identifier(text: str) -> str:
    """The text with all that cannot stand in a Python name replaced; `x` when nothing is left."""
    word = _NOT_WORD.sub("_", text).strip("_")[:_LONGEST].rstrip("_")
    return f"x{word}" if not word or word[0].isdigit() else word


def comment(parts: Iterable[str]) -> str:
    """Text that is safe behind a `#`: one line, printable characters only."""
    text = " | ".join(part for part in parts if part)
    return "".join(c if c.isprintable() else " " for c in text)[:200]
