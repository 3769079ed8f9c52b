"""The step that the search starts from: rewritten where that is faster and takes no more memory."""

from __future__ import annotations

import torch

from builder import Recorded, record
from magis.aten.infer import infer
from magis.ir.graph import Call
from magis.ir.structure import topological_order
from magis.rules.registry import rewrites, rules
from magis.schedule.incremental import Scheduled
from magis.search.replay import replay
from magis.search.rewriting import rewritten
from magis.search.state import MState


def scaled() -> Recorded:
    def code(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 8, -1)

    return record(code, [torch.randn(2, 40, 16), torch.randn(2, 40, 16)])


def state_of(recorded: Recorded, latency_s) -> MState:
    return MState.of(Scheduled.of(recorded.graph, topological_order(recorded.graph)), latency_s)


def passes(call: Call) -> float:
    """A second for all that makes a tensor with elements."""
    return float(any(spec and spec.alias_of is None and spec.numel > 1 for spec in call.outputs))


def test_what_is_faster_is_taken_and_can_be_replayed() -> None:
    base = state_of(scaled(), passes)
    told: list[Call] = []
    found = rewritten(base, passes, infer, told.extend)
    assert found.latency_s < base.latency_s
    assert found.history
    assert {name for name, _ in found.history} <= rewrites().keys() < rules().keys()
    assert set(told) >= {found.graph.call(n) for n in found.graph.nodes.values() if n.id not in base.graph.nodes}
    assert replay(base.program, found.history, infer).graph == found.graph


def test_what_is_slower_is_left() -> None:
    def plain(call: Call) -> float:
        return 5.0 if call.op.startswith("aten.baddbmm") else 1.0

    base = state_of(scaled(), plain)
    assert rewritten(base, plain, infer, lambda calls: None) is base
