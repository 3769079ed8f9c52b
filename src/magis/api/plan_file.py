"""The plan file: written atomically as JSON, read back with every part checked; nothing in it is executed."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from magis.api.lowering import lowered
from magis.api.plan import FORMAT, Certificate, Plan, batch_size, program_hash
from magis.api.pytorch import check_torch, torch_version
from magis.api.regions import forest_of
from magis.errors import InvalidGraphError, PlanError, UsageError
from magis.fission.parts import CannotSplitError
from magis.fission.tree import Program
from magis.ir.fingerprint import digest
from magis.ir.graph import Graph, NodeId, Schedule, TensorSpec
from magis.ir.text import parse_graph, print_spec
from magis.ir.verify import verify
from magis.lower.launches import launches
from magis.lower.routine import Routine
from magis.ops.swap import LOAD, STORE

if TYPE_CHECKING:
    from magis.capture.capture import Captured

_LARGEST_BYTES = 1 << 30


def default_path(model: str) -> Path:
    """`MODEL.plan.json` in the working folder; of `dir/file.py:factory` it is `file-factory.plan.json`."""
    place, _, factory = model.rpartition(":")
    words = [Path(place).stem if place.endswith(".py") else place, factory]
    return Path(re.sub(r"[^\w.-]+", "-", "-".join(filter(None, words))) + ".plan.json")


def check_writable(path: Path) -> None:
    """Finds out whether a file can be written there, before the work. Raises UsageError when not."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot write {path}: it is no regular file; choose another place")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}; make it, or choose another")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {_reason(error)}; choose another place") from None


def save_plan(plan: Plan, path: Path) -> None:
    """Writes the file whole or not at all. Raises UsageError when it cannot be written."""
    content = msgspec.json.format(msgspec.json.encode(plan), indent=2)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(content + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {_reason(error)}; choose another place") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def load_plan(path: Path) -> Plan:
    """Reads a plan and checks all that can be checked without its model.

    Raises UsageError when there is no such file; PlanError, in one line, when it is no plan, is damaged or of
    another version, when its program does not parse, is invalid or names an unknown operator, or when its
    schedule is no order of the program."""
    plan = _decoded(path)
    try:
        program_of(plan)
    except PlanError as error:
        raise PlanError(f"{path}: {error}; {_again(plan)}") from None
    return plan


def program_of(plan: Plan) -> tuple[Program, Schedule]:
    """The program and its order, parsed and verified. Raises PlanError saying what is wrong with them."""
    try:
        graph = parse_graph(plan.program)
        schedule = parse_schedule(plan.schedule)
        _check_operators(graph)
        verify(graph, schedule)
    except InvalidGraphError as error:
        raise PlanError(f"its program is invalid ({error})") from None
    except RecursionError:
        raise PlanError("its program cannot be read") from None
    program = Program(graph, forest_of(plan.regions))
    count = sum(1 for _ in launches(_lowered(program, schedule)))
    for costs in (plan.latencies_s, plan.workspaces_bytes):
        if len(costs) != count or any(cost < 0 for cost in costs):
            raise PlanError(f"it has {len(costs)} costs for {count} launches, or negative ones")
    return program, schedule


def _lowered(program: Program, schedule: Schedule) -> Routine:
    try:
        return lowered(program, schedule)
    except CannotSplitError as error:
        raise PlanError(f"a region of it cannot run in parts ({error})") from None
    except InvalidGraphError as error:
        raise PlanError(f"its program is invalid ({error})") from None


def check_plan(plan: Plan, captured: Captured) -> None:
    """Whether the plan is for this captured step. Raises PlanError saying what differs."""
    program, _ = program_of(plan)
    difference = _input_difference(program.graph, captured.graph)
    if difference is None and digest(captured.graph) != plan.digest:
        difference = f"the operators of {plan.model} are not those that were planned"
    if difference is None:
        difference = _result_difference(program.graph, captured.graph)
    if difference is None:
        return
    if plan.torch != torch_version():
        difference += f" (planned with torch {plan.torch}, this is {torch_version()})"
    elif plan.batch != batch_size(captured.graph):
        difference = f"it is for batch {plan.batch}, not {batch_size(captured.graph)}: {difference}"
    raise PlanError(f"the plan does not fit {captured.graph.name}: {difference}; {_again(plan)}")


def with_certificate(plan: Plan, certificate: Certificate | None) -> Plan:
    """The plan with another certificate, or none."""
    return msgspec.structs.replace(plan, certificate=certificate)


def _decoded(path: Path) -> Plan:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise PlanError(f"{path} is no plan: it is larger than any plan")
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"no such plan: {path}; `magis plan MODEL -o {path}` makes one") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {_reason(error)}") from None
    try:
        version = msgspec.json.decode(content, type=_Version).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise PlanError(f"{path} is no plan, or is damaged: `magis plan MODEL -o {path}` makes a new one") from None
    if version != FORMAT:
        raise PlanError(f"{path} has plan format {version}, this magis reads format {FORMAT}: plan again")
    try:
        plan = msgspec.json.decode(content, type=Plan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is damaged ({error}): plan again") from None
    proven = plan.certificate is None or plan.certificate.program == program_hash(plan)
    return plan if proven else with_certificate(plan, None)


class _Version(msgspec.Struct):
    format: int


def parse_schedule(text: str) -> Schedule:
    """Node numbers from text. Raises PlanError when it is anything else."""
    words = text.split()
    if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in words):
        raise PlanError("its schedule is no list of node numbers")
    return tuple(NodeId(int(word)) for word in words)


def _check_operators(graph: Graph) -> None:
    """Every operator is one of PyTorch's, found in its registry."""
    import torch

    from magis.aten.convert import overload

    check_torch()
    for op in {node.op for node in graph.nodes.values() if not node.is_input}:
        if op not in (STORE, LOAD) and not isinstance(overload(op), torch._ops.OpOverload):
            raise PlanError(f"{op} is no operator of PyTorch")


def _input_difference(planned: Graph, captured: Graph) -> str | None:
    """The first input that is not the same on both sides."""
    theirs, ours = _inputs(planned), _inputs(captured)
    for key in dict.fromkeys((*theirs, *ours)):
        if theirs.get(key) != ours.get(key):
            kind, name = key
            was, now = theirs.get(key, "not there"), ours.get(key, "not there")
            return f"{kind} {name} was {was} when planned and is {now}"
    return None if list(theirs) == list(ours) else "its inputs come in another order"


def _inputs(graph: Graph) -> dict[tuple[str, str], str]:
    return {(node.kind, node.name): print_spec(node.outputs[0]) for node in graph.inputs}


def _result_difference(planned: Graph, captured: Graph) -> str | None:
    theirs, ours = _results(planned), _results(captured)
    return None if theirs == ours else "the program in the file hands back other results"


def _results(graph: Graph) -> list[tuple[str, str]]:
    def essence(spec: TensorSpec) -> str:
        return f"{spec.dtype.value}{list(spec.shape)}"

    return [(name, essence(graph.spec(value))) for name, value in zip(graph.output_names, graph.outputs)]


def _again(plan: Plan) -> str:
    sizes = "".join(f" --{name} {value}" for name, value in plan.sizes.items())
    return f"plan again with `magis plan {plan.model}{sizes}`"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
