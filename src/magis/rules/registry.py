"""Finds the rules. Every module of this package is imported once; two rules of one name are an error."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from functools import cache

import magis.rules
from magis.rules.base import Rule


@cache
def rules() -> Mapping[str, Rule]:
    """Every rule, by name."""
    found: dict[str, Rule] = {}
    for module in pkgutil.walk_packages(magis.rules.__path__, "magis.rules."):
        members = vars(importlib.import_module(module.name)).values()
        for kind in members:
            own = inspect.isclass(kind) and kind.__module__ == module.name
            if not own or not hasattr(kind, "apply") or not isinstance(getattr(kind, "name", None), str):
                continue
            if kind.name in found:
                raise ValueError(f"two rules are called {kind.name!r}")
            found[kind.name] = kind()
    return dict(sorted(found.items()))


def rewrites() -> Mapping[str, Rule]:
    """The rules that are identities of arithmetic, by name."""
    return {name: rule for name, rule in rules().items() if type(rule).__module__.startswith("magis.rules.rewrite.")}
