"""Loops of random calls of every family of operators: none is wrong, none is missing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from oracle.generated import calls, families
from oracle.loop_child import LoopChild
from oracle.loops import loop_problems
from oracle.run import Case

MOST_CANDIDATES = 60
"""Of one call, in the search for missing loops."""


@pytest.fixture(scope="module")
def child() -> Iterator[LoopChild]:
    with LoopChild() as made:
        yield made


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """PyTorch warns of beta and deprecated operators; one thread keeps small runs short."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", families())
def test_a_few_calls(family: str, child: LoopChild) -> None:
    _check(family, 10, child)


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_many_calls(family: str, child: LoopChild) -> None:
    _check(family, 200, child)


def _check(family: str, count: int, child: LoopChild) -> None:
    problems: dict[str, None] = {}
    for case in calls(family, count, child):
        found = loop_problems(case)[:1] or child.missing(case, most=MOST_CANDIDATES)
        problems.update({f"{problem}\n    {_written(case)}": None for problem in found})
    assert not problems, "\n".join(problems)


def _written(case: Case) -> str:
    """The call, to be made again."""
    inputs = [f"{spec.dtype.value}{list(spec.shape)} {list(spec.strides)}" for spec in case.call.inputs]
    return f"{case.call.op} {case.call.args} {dict(case.call.kwargs)} {inputs}"
