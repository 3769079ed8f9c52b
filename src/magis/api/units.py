"""Bytes and seconds for people. Files and JSON keep exact numbers."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def human_bytes(nbytes: int) -> str:
    """Bytes in binary units: `12 B`, `870.9 KiB`, `2.52 GiB`.

    >>> human_bytes(2_703_391_492)
    '2.52 GiB'
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value, unit = float(nbytes), 0
    while abs(value) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.2f} {_BYTE_UNITS[unit]}" if unit >= 3 else f"{value:.1f} {_BYTE_UNITS[unit]}"


def human_seconds(seconds: float) -> str:
    """Seconds with three digits or more: `2.39 s`, `99.7 ms`, `5.0 us`.

    >>> human_seconds(0.0997)
    '99.7 ms'
    """
    if seconds == 0:
        return "0 s"
    for size, unit in _SECOND_UNITS:
        if abs(seconds) >= size:
            return f"{seconds / size:.2f} {unit}" if size == 1.0 else f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.2g} us"


def human_percent(fraction: float) -> str:
    """A signed percentage: `+9.8 %`."""
    return f"{fraction * 100:+.1f} %"
