"""The package's public names."""

from __future__ import annotations

import pytest

import magis


def test_a_plan_in_one_call() -> None:
    plan = magis.plan("plain-mlp-toy", device="rtx3090", batch=32, seed=1)
    assert (plan.batch, plan.seed, plan.latency_source, plan.memory_ratio) == (32, 1, "simulated", 1.0)
    assert plan.source().sizes == {"batch": 32}


def test_every_name_is_there() -> None:
    assert all(getattr(magis, name) is not None for name in magis.__all__)
    assert set(magis.__all__) <= set(dir(magis))


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = magis.nothing
