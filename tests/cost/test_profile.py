from __future__ import annotations

import logging
import multiprocessing
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from magis.cost.profile import CallMeasurement, Environment, ProfileCache, call_text, default_path, op_of, parse_call
from magis.ir.args import Slot, Symbol
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.rule import dense

HERE = Environment("cpu", 1, "a processor", "2.13.0")
ADD = Call(
    "aten.add.Tensor",
    (Slot(0), Slot(1)),
    (("alpha", 0.5),),
    (dense((8, 3)), replace(dense((8, 3)), strides=(1, 8), offset=5, storage_bytes=0, alias_of=0)),
    (dense((8, 3)),),
)
MEASURED = CallMeasurement(1.5e-3, 2e-4, 3, 4096)


def test_a_measurement_comes_back_in_another_session(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "costs.sqlite"
    ProfileCache(path).store(HERE, ADD, MEASURED)
    ProfileCache(path).store(HERE, replace(ADD, kwargs=()), replace(MEASURED, scaled=True))
    assert ProfileCache(path).load(HERE) == {
        call_text(ADD): MEASURED,
        call_text(replace(ADD, kwargs=())): replace(MEASURED, scaled=True),
    }


def test_a_new_measurement_replaces_the_old_one(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "costs.sqlite")
    cache.store(HERE, ADD, MEASURED)
    cache.store(HERE, ADD, replace(MEASURED, latency_s=1.0))
    assert cache.load(HERE) == {call_text(ADD): replace(MEASURED, latency_s=1.0)}


@pytest.mark.parametrize(
    "other",
    [{"device": "cuda"}, {"threads": 2}, {"processor": "another"}, {"torch": "2.14.0"}, {"method": 2}],
)
def test_each_environment_has_its_own_measurements(tmp_path: Path, other: dict[str, str]) -> None:
    cache = ProfileCache(tmp_path / "costs.sqlite")
    cache.store(HERE, ADD, MEASURED)
    assert cache.load(replace(HERE, **other)) == {}


def test_the_text_holds_what_a_latency_depends_on() -> None:
    text = call_text(ADD)
    moved = replace(ADD, inputs=(ADD.inputs[0], replace(ADD.inputs[1], offset=0, alias_of=None, storage_bytes=1000)))
    assert call_text(moved) == text
    assert call_text(replace(ADD, outputs=(replace(ADD.outputs[0], storage_bytes=4096),))) == text  # type: ignore[type-var]
    for changed in (
        replace(ADD, op="aten.sub.Tensor"),
        replace(ADD, kwargs=(("alpha", 1),)),
        replace(ADD, args=(Slot(1), Slot(0))),
        replace(ADD, inputs=(dense((8, 3)), dense((8, 3)))),
        replace(ADD, inputs=(dense((8, 4)), dense((8, 4)))),
        replace(ADD, inputs=(dense((8, 3), DType.BF16), ADD.inputs[1])),
    ):
        assert call_text(changed) != text


def test_a_call_is_read_back_from_its_text() -> None:
    for call in (
        ADD,
        Call("aten.full.default", ((2, 3), 1.0), (("device", Symbol("device", "cpu")),), (), (None,)),
    ):
        assert call_text(parse_call(call_text(call))) == call_text(call)
    back = parse_call(call_text(ADD))
    assert (back.op, back.args, back.kwargs) == (ADD.op, ADD.args, ADD.kwargs)
    assert back.inputs[1].strides == (1, 8)
    assert op_of(call_text(ADD)) == "aten.add.Tensor"
    assert op_of("damaged") == ""


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MAGIS_CACHE", str(tmp_path / "mine.sqlite"))
    assert default_path() == tmp_path / "mine.sqlite" == ProfileCache().path
    monkeypatch.setenv("MAGIS_CACHE", str(tmp_path))
    assert default_path() == tmp_path / "costs.sqlite"
    monkeypatch.delenv("MAGIS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "magis" / "costs.sqlite"


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"", b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_file_is_moved_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.sqlite"
    path.write_bytes(content)
    cache = ProfileCache(path)
    assert cache.load(HERE) == {}
    cache.store(HERE, ADD, MEASURED)
    assert ProfileCache(path).load(HERE) == {call_text(ADD): MEASURED}
    if content:  # an empty file is a valid empty database
        assert (tmp_path / "costs.sqlite.damaged").read_bytes() == content
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(content)
    assert all("damaged" in message and "\n" not in message for message in messages)


def test_a_file_damaged_in_the_middle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.sqlite"
    cache = ProfileCache(path)
    for rows in range(300):
        cache.store(HERE, replace(ADD, outputs=(dense((rows, 3)),)), MEASURED)
    content = bytearray(path.read_bytes())
    assert len(content) > 20000
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    assert ProfileCache(path).load(HERE) == {}
    assert "moved to" in caplog.text
    assert ProfileCache(path).load(HERE) == {}


def test_a_table_of_another_layout_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE costs (call TEXT, latency REAL)")
    connection.close()
    cache = ProfileCache(path)
    cache.store(HERE, ADD, MEASURED)
    assert cache.load(HERE) == {call_text(ADD): MEASURED}
    assert "other columns" in caplog.text


def test_rows_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    cache = ProfileCache(path)
    cache.store(HERE, ADD, MEASURED)
    for op, change in (("a", "latency_s = -1"), ("b", "runs = 'many'"), ("c", "latency_s = 9e999")):
        cache.store(HERE, replace(ADD, op=f"aten.{op}.default"), MEASURED)
        with sqlite3.connect(path) as connection:
            connection.execute(f"UPDATE costs SET {change} WHERE op = 'aten.{op}.default'")
        connection.close()
    assert ProfileCache(path).load(HERE) == {call_text(ADD): MEASURED}


def test_a_place_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = ProfileCache(tmp_path / "file" / "costs.sqlite")
    for _ in range(2):
        cache.store(HERE, ADD, MEASURED)
        assert cache.load(HERE) == {call_text(ADD): MEASURED}
    assert cache.in_memory
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "memory only" in caplog.text and "MAGIS_CACHE" in caplog.text


def test_an_unreadable_database_file_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "costs.sqlite"
    folder.mkdir()
    cache = ProfileCache(folder)
    cache.store(HERE, ADD, MEASURED)
    assert cache.load(HERE) == {call_text(ADD): MEASURED}
    assert len(caplog.records) == 1


def _store_many(path: Path, first: int) -> None:
    cache = ProfileCache(path)
    for rows in range(first, first + 20):
        cache.store(HERE, replace(ADD, outputs=(dense((rows, 3)),)), MEASURED)


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_store_many, args=(path, 100 * i)) for i in range(2)]
    for writer in writers:
        writer.start()
    _store_many(path, 200)
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    assert len(ProfileCache(path).load(HERE)) == 60
