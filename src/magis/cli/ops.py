"""`magis ops`: the operators with a rule; `magis ops missing MODEL`: those of a model without one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer

from magis.cli.options import Json, Model
from magis.cli.output import guarded_stdout, print_table, working, write, write_json

if TYPE_CHECKING:
    from magis.ops.rule import OpRule

app = typer.Typer(help="List the operators that have a rule, or those of a model that have none.")


@app.callback(invoke_without_command=True)
def command(context: typer.Context, as_json: Json = False) -> None:
    """List the operators that have a rule, or those of a model that have none."""
    if context.invoked_subcommand is not None:
        return
    from magis.ops.registry import rules

    found = [(op, family(rule), rule.random, rule.recomputable) for op, rule in rules().items()]
    if as_json:
        names = ("operator", "family", "random", "recomputable")
        write_json({"operators": [dict(zip(names, entry)) for entry in found]})
        return
    rows = [(op, kind, "random" if r else "", "" if again else "never recomputed") for op, kind, r, again in found]
    print_table(("operator", "family", "random numbers", "recomputation"), rows)
    write(f"\n{len(rows)} operators; any other works too: its cost is that of its bytes, it is never recomputed.\n")


def family(rule: OpRule) -> str:
    """The family that a rule belongs to: its file's name."""
    return type(rule).__module__.rpartition(".")[2].replace("_", " ")


@app.command()
def missing(model: Model, as_json: Json = False) -> None:
    """List a model's operators without a rule, with how often they run. Exit code 0: there are none."""
    from magis.api.models import resolve
    from magis.ops.registry import rule_for

    source = resolve(model)
    with guarded_stdout(as_json), working(f"capturing {model}"):
        graph = source.capture().graph
    operators = Counter(node.op for node in graph.nodes.values() if not node.is_input)
    unknown = [(op, count) for op, count in operators.items() if not rule_for(op).known]
    unknown.sort(key=lambda entry: (-entry[1], entry[0]))
    if as_json:
        write_json({"model": model, "operators": len(operators), "missing": dict(unknown)})
    elif not unknown:
        write(f"{model}: all {len(operators)} operators have a rule ({operators.total()} calls)\n")
    else:
        print_table(("operator", "calls"), [(op, str(count)) for op, count in unknown], right=("calls",))
        write(f"\n{model}: {len(unknown)} of {len(operators)} operators have no rule\n")
    if unknown:
        raise typer.Exit(1)
