"""`magis models`: the ready-made workloads."""

from __future__ import annotations

from magis.cli.output import print_table, write


def command() -> None:
    """List the ready-made models and their sizes."""
    from magis import zoo

    rows = []
    for name in zoo.names():
        entry = zoo.model(name)
        sizes = [str(size or "") for size in (entry.sizes.batch, entry.sizes.seq, entry.sizes.image)]
        rows.append([name, *sizes, entry.requires or "", entry.description])
    print_table(("model", "batch", "seq", "image", "needs", "what it is"), rows, right=("batch", "seq", "image"))
    write("\nA model of your own is file.py:factory or package.module:factory, where factory() returns\n")
    write("(model, loss_fn, batch) or (model, loss_fn, batch, update).\n")
