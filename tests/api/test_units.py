"""Numbers for people."""

from __future__ import annotations

import pytest

from magis.api.units import human_bytes, human_percent, human_seconds


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (887_312, "866.5 KiB"),
        (2_703_391_492, "2.52 GiB"),
        (1 << 50, "1024.00 TiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert human_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (2.3908, "2.39 s"), (0.0997, "99.7 ms"), (5e-6, "5.0 us"), (2e-8, "0.02 us")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_percent() -> None:
    assert (human_percent(0.098), human_percent(-0.01)) == ("+9.8 %", "-1.0 %")
