"""`magis ops`: the operators with a rule; `magis ops missing MODEL`: those of a model without one."""

from __future__ import annotations

from collections import Counter

import typer

from magis.cli.options import Model
from magis.cli.output import print_table, working, write

app = typer.Typer(help="List the operators that have a rule, or those of a model that have none.")


@app.callback(invoke_without_command=True)
def command(context: typer.Context) -> None:
    """List the operators that have a rule, or those of a model that have none."""
    if context.invoked_subcommand is not None:
        return
    from magis.ops.registry import rules

    rows = []
    for op, rule in rules().items():
        family = type(rule).__module__.rpartition(".")[2].replace("_", " ")
        rows.append([op, family, "random" if rule.random else "", "" if rule.recomputable else "never recomputed"])
    print_table(("operator", "family", "random numbers", "recomputation"), rows)
    write(f"\n{len(rows)} operators; any other works too: its cost is that of its bytes, it is never recomputed.\n")


@app.command()
def missing(model: Model) -> None:
    """List a model's operators without a rule, with how often they run. Exit code 0: there are none."""
    from magis.api.models import resolve
    from magis.ops.registry import rule_for

    source = resolve(model)
    with working(f"capturing {model}"):
        graph = source.capture().graph
    operators = Counter(node.op for node in graph.nodes.values() if not node.is_input)
    unknown = [(op, count) for op, count in operators.items() if not rule_for(op).known]
    if not unknown:
        write(f"{model}: all {len(operators)} operators have a rule ({operators.total()} calls)\n")
        return
    unknown.sort(key=lambda entry: (-entry[1], entry[0]))
    print_table(("operator", "calls"), [(op, str(count)) for op, count in unknown], right=("calls",))
    write(f"\n{model}: {len(unknown)} of {len(operators)} operators have no rule\n")
    raise typer.Exit(1)
