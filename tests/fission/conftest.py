"""Every test here knows the einsum operator."""

from __future__ import annotations

import pytest
from einsums import register


@pytest.fixture(autouse=True)
def einsums(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
