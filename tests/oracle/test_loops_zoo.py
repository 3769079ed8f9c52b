"""Loops of every distinct operator call of every toy of the zoo, and of a network outside it, against execution."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from magis.backend.operands import index_bound
from magis.capture.capture import capture
from magis.capture.workload import workload
from magis.ir.graph import Call, Graph
from magis.zoo import registry as zoo
from oracle.loop_child import LoopChild
from oracle.loops import loop_problems
from oracle.run import Case, case_for

MOST_CANDIDATES = 60
"""Of one call, in the search for missing loops."""

_checked: set[Call] = set()


@pytest.fixture(scope="module")
def child() -> Iterator[LoopChild]:
    with LoopChild() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.names() if name.endswith("-toy")])
def test_loops(name: str, child: LoopChild) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problems = _problems(capture(workload(zoo.build(name), name)).graph, child)
    assert not problems, "\n".join(problems)


def _problems(graph: Graph, child: LoopChild) -> list[str]:
    calls = {graph.call(node): None for node in graph.nodes.values() if not node.is_input}
    new = [call for call in calls if call not in _checked]
    _checked.update(new)
    return list(dict.fromkeys(problem for call in new for problem in _of_call(call, child)))


def _of_call(call: Call, child: LoopChild) -> list[str]:
    case = _case(call)
    return loop_problems(case) or child.missing(case, most=MOST_CANDIDATES)


def _case(call: Call) -> Case:
    return case_for(call, tuple(index_bound(call, number) for number in range(len(call.inputs))))
