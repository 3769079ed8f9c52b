"""The command line's entry: commands, and the edge where every error becomes one line and an exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from magis import __version__
from magis.cli import bench, devices, dims, models, ops, plan, run, show, why
from magis.errors import InfeasibleError, MagisError, MismatchError, UsageError

DONE, FAILED, USAGE, LIMIT_NOT_MET, NOT_PROVEN, INTERRUPTED = 0, 1, 2, 3, 4, 130
TRACEBACK = "MAGIS_TRACEBACK"

app = typer.Typer(
    name="magis",
    help="The same PyTorch training step in less memory, proven to compute the same numbers.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"magis {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (models, devices, dims, plan, run, show, why):
    app.command(command.__name__.rpartition(".")[2])(command.command)
app.add_typer(ops.app, name="ops")
app.add_typer(bench.app, name="bench")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 done, 1 other error, 2 usage, 3 limit not met, 4 proof failed or
    missing, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if not _wants_traceback():
        _only_our_words()
    code = _exit_code(given)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    sys.exit(code)


def _exit_code(arguments: list[str]) -> int:
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="magis", standalone_mode=False)
    except BrokenPipeError:
        _forget_stdout()
        return DONE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except MagisError as error:
        return _failed(error, str(error), _CODES.get(type(error), FAILED))
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer's way of ending then
            _forget_stdout()
            return DONE
        return _failed(error, "the model's code ended the program (it called sys.exit)", FAILED)
    except Exception as error:  # noqa: BLE001 - the edge: whatever happens ends in one line
        return _unexpected(error)
    if code == INTERRUPTED:
        _say("interrupted")
    return code if isinstance(code, int) else DONE


_CODES: dict[type[MagisError], int] = {UsageError: USAGE, InfeasibleError: LIMIT_NOT_MET, MismatchError: NOT_PROVEN}


def _unexpected(error: Exception) -> int:
    if hasattr(error, "format_message"):  # of typer: an option or argument that is missing, unknown or unfit
        return _failed(error, f"{_sentence(error.format_message())}; {_help(error)}", USAGE)
    if isinstance(error, MemoryError):
        return _failed(error, "out of memory; try a smaller batch", FAILED)
    what = f"{type(error).__name__}: {error}"
    hint = f"set {TRACEBACK}=1 to see where, and report it"
    return _failed(error, f"a defect of magis, not of your model: {what[:200]}; {hint}", FAILED)


def _wants_traceback() -> bool:
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def _only_our_words() -> None:
    """Silences warnings of other packages, and the traceback that PyTorch logs for an error that it raises too."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True


def _failed(error: BaseException, message: str, code: int) -> int:
    if _wants_traceback():
        traceback.print_exception(error)
    _say(message)
    return code


def _say(message: str) -> None:
    """The error in one line, whatever it holds."""
    line = " ".join(message.split())
    print("error: " + "".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)


def _sentence(message: str) -> str:
    """Typer's message as ours: no capital, no full stop."""
    text = message.strip().rstrip(".")
    return text[:1].lower() + text[1:]


def _help(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"see `{context.command_path if context else 'magis'} --help`"


def _forget_stdout() -> None:
    """Nobody reads standard output any more: that is fine."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
