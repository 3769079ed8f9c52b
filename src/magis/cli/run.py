"""`magis run PLAN`: runs a plan beside eager, proves its numbers and measures both."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magis.api.units import human_bytes, human_percent, human_seconds
from magis.cli.options import Json, PlanPath, SwapDir
from magis.cli.output import guarded_stdout, note, print_table, working, write, write_json
from magis.errors import MagisError

if TYPE_CHECKING:
    from magis.api.plan import Plan
    from magis.api.run import RivalMeasurement, RunReport, SideMeasurement

LIMIT_MISSED = 3
NOT_PROVEN = 4
TERMINATED = 128 + signal.SIGTERM
PAIRS = 9


def command(
    path: PlanPath,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="Steps of each side; overrides --pairs.")
    ] = None,
    pairs: Annotated[
        int, typer.Option("--pairs", min=1, metavar="N", help="Alternating pairs of steps that are timed.")
    ] = PAIRS,
    no_check: Annotated[bool, typer.Option("--no-check", help="Measure only, without the proof.")] = False,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            "--beside",
            metavar="METHOD",
            help="Also measure what one would do by hand: checkpoint (every block) or micro:K. Repeatable.",
        ),
    ] = None,
    swap_dir: SwapDir = None,
    as_json: Json = False,
) -> None:
    """Run a plan beside eager, prove that the numbers are equal, and measure memory and time of both."""
    with _terminable(), guarded_stdout(as_json), working(f"loading {path}") as progress:
        from magis.api.plan_file import load_plan

        plan = load_plan(path)
        from magis.api.run import missed, run_plan

        check, wanted = not no_check, beside or ()
        report = run_plan(
            plan, steps=steps, pairs=pairs, check=check, progress=progress, beside=wanted, swap_dir=swap_dir
        )
    _certify(plan, report, path)
    for line in report.notes:
        note(line)
    rivals = report.beside if beside else ()
    if as_json:
        write_json(contents(report, rivals))
    else:
        _print(plan, report)
        if rivals:
            _print_beside(report, rivals)
    if (report.proof is None and not no_check) or (report.proof is not None and not report.proof.ok):
        raise typer.Exit(NOT_PROVEN)
    exceeded = missed(plan, report)
    if exceeded is not None:
        note(f"limit missed when measured: {exceeded}")
        raise typer.Exit(LIMIT_MISSED)


class _Terminated(BaseException):
    """SIGTERM arrived."""


@contextmanager
def _terminable() -> Iterator[None]:
    """While inside, SIGTERM unwinds the stack as Ctrl-C does, so that no process and no file stays behind."""

    def stop(*_: object) -> None:
        raise _Terminated

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: signals are not ours to handle
        yield
        return
    try:
        yield
    except _Terminated:
        note("error: terminated")
        raise typer.Exit(TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _certify(plan: Plan, report: RunReport, path: Path) -> None:
    """Writes what was proven into the plan file; a failed proof takes an earlier certificate away."""
    from magis.api.plan import Certificate, program_hash
    from magis.api.plan_file import save_plan, with_certificate
    from magis.api.pytorch import torch_version

    proof = report.proof
    if proof is None or (not proof.ok and plan.certificate is None):
        return
    certificate = None
    if proof.ok:
        certificate = Certificate(
            program_hash(plan), torch_version(), "cpu", proof.batch, proof.tensors, proof.max_rel_error
        )
    try:
        save_plan(with_certificate(plan, certificate), path)
    except MagisError as error:
        note(f"the certificate is not kept: {error}")


def contents(report: RunReport, rivals: Sequence[RivalMeasurement] = ()) -> dict[str, Any]:
    """What `--json` prints; `rivals` are the methods measured beside."""
    proof = report.proof
    return {
        "baseline": _side(report.baseline),
        "optimized": _side(report.optimized),
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "memory_ratio": report.memory_ratio,
        "step_memory_ratio": report.step_memory_ratio,
        "latency_overhead": report.latency_overhead,
        "proof": proof
        and {
            "ok": proof.ok,
            "max_rel_error": proof.max_rel_error,
            "tensors": proof.tensors,
            "batch": proof.batch,
        },
        "beside": [_rival(rival) for rival in rivals],
    }


def _side(side: SideMeasurement) -> dict[str, Any]:
    return {
        "peak_bytes": side.peak_bytes,
        "step_peak_bytes": side.step_peak_bytes,
        "latency_s": side.latency_s,
        "resident_growth_bytes": side.resident_growth_bytes,
    }


def _rival(rival: RivalMeasurement) -> dict[str, Any]:
    side = rival.side
    return {
        "method": rival.method,
        "peak_bytes": side and side.peak_bytes,
        "step_peak_bytes": side and side.step_peak_bytes,
        "latency_s": side and side.latency_s,
        "step_memory_ratio": rival.step_memory_ratio,
        "latency_overhead": rival.latency_overhead,
        "max_rel_error": rival.max_rel_error,
        "failed": rival.failed,
    }


def _print(plan: Plan, report: RunReport) -> None:
    before, after = report.baseline, report.optimized
    times = "pair" if report.pairs == 1 else "pairs"
    write(f"{plan.model}, measured on cpu, one thread, {report.pairs} alternating {times} of steps\n\n")
    rows = [
        ("peak memory", human_bytes(before.peak_bytes), human_bytes(after.peak_bytes), f"{report.memory_ratio:.1%}"),
        (
            "  of the step",
            human_bytes(before.step_peak_bytes),
            human_bytes(after.step_peak_bytes),
            f"{report.step_memory_ratio:.1%}",
        ),
        ("  predicted", "", human_bytes(report.predicted_peak_bytes), ""),
        ("  process growth", _growth(before), _growth(after), ""),
        ("CPU time", _time(before), _time(after), human_percent(report.latency_overhead)),
    ]
    print_table(("", "eager", "planned", ""), rows, right=("eager", "planned"))
    if report.remedy.startswith("none"):
        write(f"\nmemory of the planned process: no remedy, {report.remedy}\n")
    else:
        write(f"\nmemory of the planned process follows its live tensors: {report.remedy}\n")
    write(f"{proof_line(report)}\n")


def _print_beside(report: RunReport, rivals: Sequence[RivalMeasurement]) -> None:
    """The table of all sides, and which buffers a method leaves otherwise than eager does."""
    rows = [
        _row("eager", report.baseline, 1.0, None, ""),
        *(_rival_row(rival) for rival in rivals),
        _row("planned", report.optimized, report.step_memory_ratio, report.latency_overhead, _proven(report)),
    ]
    write("\n")
    columns = ("", "step peak", "of eager", "CPU time", "error")
    print_table(columns, rows, right=columns[1:3])
    for rival in rivals:
        if rival.buffers:
            some = ", ".join(rival.buffers[:2])
            count = f"{len(rival.buffers)} buffers end" if len(rival.buffers) > 1 else "1 buffer ends"
            write(f"{rival.method}: {count} differently from eager's: {some}{', ...' if rival.buffers[2:] else ''}\n")


def _rival_row(rival: RivalMeasurement) -> tuple[str, ...]:
    if rival.side is None or rival.step_memory_ratio is None:
        return rival.method, "", "", "", f"failed: {rival.failed}"
    error = f"{rival.max_rel_error:.2g}"
    return _row(rival.method, rival.side, rival.step_memory_ratio, rival.latency_overhead, error)


def _row(name: str, side: SideMeasurement, share: float, overhead: float | None, error: str) -> tuple[str, ...]:
    extra = "" if overhead is None else f" ({human_percent(overhead)})"
    return name, human_bytes(side.step_peak_bytes), f"{share:.1%}", f"{human_seconds(side.latency_s)}{extra}", error


def _proven(report: RunReport) -> str:
    if report.proof is None:
        return "not proven"
    return "proven" if report.proof.ok else "proof failed"


def _growth(side: SideMeasurement) -> str:
    return "unknown" if side.resident_growth_bytes is None else human_bytes(side.resident_growth_bytes)


def _time(side: SideMeasurement) -> str:
    return f"{human_seconds(side.latency_s)} (spread {human_seconds(side.latency_spread_s)})"


def proof_line(report: RunReport) -> str:
    """The proof in one line."""
    proof = report.proof
    if proof is None:
        return "not proven"
    compared = f"{proof.tensors} tensors at batch {proof.batch}, largest relative error {proof.max_rel_error:.2g}"
    if proof.ok:
        return f"proven equal to eager: {compared}"
    return f"PROOF FAILED: {compared}; {'; '.join(proof.failures[:3]) or 'no tensor named'}"
