"""Runs the command line in this process, in an empty folder, and keeps what it said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from saying import Magis, Said

from magis.cli.main import main

HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder but for `m.py`, the factories; no colour, a fixed width, no user's cache."""
    shutil.copy(HERE / "zoo_of_mistakes.py", tmp_path / "m.py")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("MAGIS_CACHE", str(tmp_path / "costs.sqlite"))
    monkeypatch.delenv("MAGIS_TRACEBACK", raising=False)
    return tmp_path / "work"


@pytest.fixture
def magis(folder: Path, capsys: pytest.CaptureFixture[str]) -> Magis:
    """`magis(*arguments)` runs the command line."""

    def run(*arguments: object) -> Said:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Said(ended.value.code, out, err)

    return run
