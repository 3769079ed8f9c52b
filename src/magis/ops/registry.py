"""Finds the rule of an operator. Every module of this package is imported once; a duplicate is an error."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

import magis.ops
from magis.ops.rule import OpRule, UnknownOp

UNKNOWN = UnknownOp()


def _subclasses(kind: type[OpRule]) -> list[type[OpRule]]:
    found = []
    for sub in kind.__subclasses__():
        found += [sub, *_subclasses(sub)]
    return found


@cache
def rules() -> Mapping[str, OpRule]:
    """Every described operator overload and its rule, by name."""
    for module in pkgutil.iter_modules(magis.ops.__path__, "magis.ops."):
        importlib.import_module(module.name)
    found: dict[str, OpRule] = {}
    for kind in _subclasses(OpRule):
        rule = kind()
        for op in kind.__dict__.get("ops", ()):
            if op in found:
                raise ValueError(f"{op} is described by {type(found[op]).__name__} and by {kind.__name__}")
            found[op] = rule
    return dict(sorted(found.items()))


def rule_for(op: str) -> OpRule:
    """The rule of an operator overload, such as `aten.mm.default`; `UNKNOWN` when there is none."""
    return rules().get(op, UNKNOWN)
