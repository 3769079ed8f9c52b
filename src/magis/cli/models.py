"""`magis models`: the ready-made workloads."""

from __future__ import annotations

from magis.cli.options import Json
from magis.cli.output import print_table, write, write_json


def command(as_json: Json = False) -> None:
    """List the ready-made models and their sizes."""
    from magis import zoo

    entries = {name: zoo.model(name) for name in zoo.names()}
    if as_json:
        keys = ("name", "family", "sizes", "requires", "fake_only", "description")
        write_json({"models": [{key: getattr(entry, key) for key in keys} for entry in entries.values()]})
        return
    rows = []
    for name, entry in entries.items():
        sizes = [str(size or "") for size in (entry.sizes.batch, entry.sizes.seq, entry.sizes.image)]
        rows.append([name, *sizes, entry.requires or "", entry.description])
    print_table(("model", "batch", "seq", "image", "needs", "what it is"), rows, right=("batch", "seq", "image"))
    write("\nA model of your own is file.py:factory or package.module:factory, where factory() returns\n")
    write("(model, loss_fn, batch) or (model, loss_fn, batch, update).\n")
