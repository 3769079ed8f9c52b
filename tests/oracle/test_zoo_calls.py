"""Every distinct operator call of every toy of the zoo, against real execution."""

from __future__ import annotations

import warnings

import pytest
import torch

from magis.capture.capture import capture
from magis.capture.workload import workload
from magis.ir.graph import Call
from magis.ops.registry import rule_for
from magis.zoo import registry as zoo
from oracle.run import case_for, check
from oracle.storage import storage_problems
from oracle.terms import term_problems

_checked: set[Call] = set()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in zoo.names() if name.endswith("-toy")])
def test_calls(name: str) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(workload(zoo.build(name), name)).graph
        calls = {graph.call(node): None for node in graph.nodes.values() if not node.is_input}
        missing = sorted({call.op for call in calls if not rule_for(call.op).known})
        assert not missing, f"no rule for {', '.join(missing)}"
        problems = [f"{call.op}: {problem}" for call in calls if call not in _checked for problem in _problems(call)]
        _checked.update(calls)
    assert not problems, "\n".join(problems)


def _problems(call: Call) -> list[str]:
    case = case_for(call)
    return [*check(case), *storage_problems(case), *term_problems(case)]
