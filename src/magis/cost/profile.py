"""Measured costs that survive the process: a table in SQLite, keyed by the call and by the machine."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

from magis.ir.graph import INPUT, Call, Graph, Node, NodeId, TensorSpec, Value
from magis.ir.text import parse_graph, print_graph

log = logging.getLogger(__name__)
_BUSY_S = 10.0
_COLUMNS = "environment, call, op, latency_s, spread_s, runs, workspace_bytes, scaled, measured_at"
_CREATE = """
    CREATE TABLE IF NOT EXISTS costs (
        environment TEXT NOT NULL, call TEXT NOT NULL, op TEXT NOT NULL, latency_s REAL NOT NULL,
        spread_s REAL NOT NULL, runs INTEGER NOT NULL, workspace_bytes INTEGER NOT NULL,
        scaled INTEGER NOT NULL, measured_at TEXT NOT NULL, PRIMARY KEY (environment, call)
    ) WITHOUT ROWID"""


@dataclass(frozen=True, slots=True)
class CallMeasurement:
    """What running one call told.

    `latency_s` is the median over `runs`, `spread_s` the largest minus the smallest, `workspace_bytes` the
    peak of what it allocated beyond its outputs. `scaled`: measured on fewer rows and multiplied up."""

    latency_s: float
    spread_s: float
    runs: int
    workspace_bytes: int
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Environment:
    """What a latency depends on besides the call. `method` numbers the way of measuring."""

    device: str
    threads: int
    processor: str
    torch: str
    method: int = 1

    def text(self) -> str:
        """One line that is equal for equal environments."""
        return " | ".join(str(field) for field in astuple(self))


def call_text(call: Call) -> str:
    """The call as a program of one operator: the same text for calls that take the same time.

    Operator, literals, and every tensor's shape, strides and type; where a tensor lies inside its storage
    is left out."""
    nodes = [_node(i, INPUT, (spec,), args=("batch", str(i))) for i, spec in enumerate(call.inputs)]
    values = tuple(Value(node.id) for node in nodes)
    main = replace(_node(len(nodes), call.op, call.outputs), inputs=values, args=call.args, kwargs=call.kwargs)
    return print_graph(Graph({node.id: node for node in (*nodes, main)}, (), (), "call"), origins=False)


def parse_call(text: str) -> Call:
    """Reads what `call_text` wrote. Raises PlanError when it cannot be read."""
    graph = parse_graph(text)
    return graph.call(graph.nodes[max(graph.nodes)])


def op_of(text: str) -> str:
    """The operator in what `call_text` wrote, without reading the rest."""
    lines = text.splitlines()[:-2]
    return lines[-1].partition(" = ")[2].partition("(")[0] if lines else ""


def _node(number: int, op: str, specs: tuple[TensorSpec | None, ...], args: tuple[str, ...] = ()) -> Node:
    return Node(NodeId(number), op, (), tuple(_placeless(spec, op == INPUT) for spec in specs), args)


def _placeless(spec: TensorSpec | None, is_input: bool) -> TensorSpec | None:
    if spec is None:
        return None
    if is_input or spec.alias_of is None:
        return replace(spec, offset=0, storage_bytes=spec.nbytes, alias_of=None, writes=False)
    return replace(spec, offset=0, storage_bytes=0)


def default_path() -> Path:
    """`$MAGIS_CACHE` (a file, or a folder that then holds `costs.sqlite`), else `~/.cache/magis/costs.sqlite`."""
    chosen = Path(os.environ.get("MAGIS_CACHE") or "~/.cache/magis/costs.sqlite").expanduser()
    return chosen / "costs.sqlite" if chosen.is_dir() else chosen


class ProfileCache:
    """Measurements in an SQLite file that several processes may share.

    Each operation opens the file anew (0.2 ms, next to measurements of milliseconds), so that nothing is
    held across threads and forks, and nothing waits for the disk: should a power cut damage the file, the
    costs are measured anew. A file that is no database of ours is moved aside; one that cannot be
    read or written is replaced by memory. Either is said once, in one line, and nothing is raised."""

    def __init__(self, path: Path | None = None) -> None:
        self.path: Path | None = default_path() if path is None else path
        self._memory: dict[tuple[str, str], CallMeasurement] = {}
        self._checked = False

    @property
    def in_memory(self) -> bool:
        """Whether measurements are lost with this object."""
        return self.path is None

    def load(self, environment: Environment) -> dict[str, CallMeasurement]:
        """Every measurement made in this environment, by the call's text."""
        machine = environment.text()
        found = {call: m for (where, call), m in self._memory.items() if where == machine}
        for row in self._run(f"SELECT {_COLUMNS} FROM costs WHERE environment = ?", [(machine,)]) or ():
            measurement = _measurement(row)
            if measurement is not None:
                found[str(row[1])] = measurement
        return found

    def store(self, environment: Environment, call: Call, measurement: CallMeasurement) -> None:
        """Adds or replaces one measurement."""
        machine, text, m = environment.text(), call_text(call), measurement
        now = datetime.now(UTC).isoformat(timespec="seconds")
        row = (machine, text, call.op, m.latency_s, m.spread_s, m.runs, m.workspace_bytes, m.scaled, now)
        if self._run(f"INSERT OR REPLACE INTO costs ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)", [row]) is None:
            self._memory[machine, text] = m

    def _run(self, statement: str, rows: list[tuple[object, ...]]) -> list[tuple[object, ...]] | None:
        """Runs a statement once per row of values, in one transaction; None when there is no usable file."""
        for _ in range(2):
            if self.path is None:
                break
            before = _identity(self.path)
            try:
                with self._connected(self.path) as connection:
                    return [found for row in rows for found in connection.execute(statement, row).fetchall()]
            except (sqlite3.OperationalError, OSError) as error:
                self._use_memory(error)
            except sqlite3.DatabaseError as error:
                self._move_aside(before, error)
        return None

    @contextmanager
    def _connected(self, path: Path) -> Iterator[sqlite3.Connection]:
        if not self._checked:
            path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=_BUSY_S)) as connection:
            if not self._checked:
                connection.execute("PRAGMA journal_mode = WAL").fetchall()
                connection.execute(_CREATE)
                have = [str(row[1]) for row in connection.execute("PRAGMA table_info(costs)")]
                if have != _COLUMNS.split(", "):
                    raise sqlite3.DatabaseError("its table has other columns")
                self._checked = True
            connection.execute("PRAGMA synchronous = OFF")
            with connection:
                yield connection

    def _use_memory(self, error: Exception) -> None:
        log.warning("measured costs are kept in memory only: %s: %s (set MAGIS_CACHE)", self.path, error)
        self.path = None

    def _move_aside(self, before: tuple[int, int] | None, error: Exception) -> None:
        """Renames the damaged file, unless another process has already put a new one in its place."""
        assert self.path is not None
        self._checked = False
        aside = self.path.with_name(self.path.name + ".damaged")
        if before is None or _identity(self.path) != before:
            return
        try:
            self.path.replace(aside)
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        except OSError as reason:
            self._use_memory(reason)
        else:
            log.warning("the table of measured costs was damaged (%s); moved to %s, measuring anew", error, aside)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _measurement(row: tuple[object, ...]) -> CallMeasurement | None:
    """The measurement in a row; None when its values make no sense."""
    _, call, _, latency_s, spread_s, runs, workspace_bytes, scaled, _ = row
    if not (isinstance(call, str) and isinstance(latency_s, float) and isinstance(spread_s, float)):
        return None
    if not (isinstance(runs, int) and isinstance(workspace_bytes, int) and isfinite(latency_s)):
        return None
    if latency_s < 0 or workspace_bytes < 0:
        return None
    return CallMeasurement(latency_s, spread_s, runs, workspace_bytes, bool(scaled))
