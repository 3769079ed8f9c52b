"""Scheduling of captured training steps."""

from __future__ import annotations

import pytest
import torch

from magis import zoo
from magis.capture.capture import capture
from magis.capture.workload import workload
from magis.fission.tree import Program
from magis.ir.edit import GraphEdit
from magis.ir.graph import Value
from magis.ir.verify import verify
from magis.lower.lower import lower
from magis.schedule.flat import flatten
from magis.schedule.incremental import Scheduled, full_schedule
from magis.sim.timeline import timeline


@pytest.mark.parametrize("name", ["plain-mlp-toy", "bert-toy"])
def test_a_captured_step(name: str) -> None:
    with torch.device("meta"):
        captured = capture(workload(zoo.build(name)))
    graph = captured.graph
    state = Scheduled.of(graph, captured.schedule)
    assert state.peak_bytes == timeline(lower(Program(graph), captured.schedule)).peak_bytes
    order, report = full_schedule(graph, captured.schedule)
    verify(graph, order)
    assert timeline(lower(Program(graph), order)).peak_bytes == report.peak_bytes <= state.peak_bytes
    for node in graph.nodes.values():
        readers = graph.users[node.id]
        if node.is_input or node.writes or len(readers) < 2 or node.id % 7:
            continue
        edit = GraphEdit(graph)
        copy = edit.copy(node.id, "copy of")
        for output in range(len(node.outputs)):
            edit.redirect(readers[-1], Value(node.id, output), Value(copy, output))
        changed = edit.finish()
        better, report = state.after_edit(changed, edit.old_nodes, edit.new_nodes)
        verify(changed, better.schedule)
        found = timeline(lower(Program(changed), better.schedule))
        assert found.peak_bytes == better.peak_bytes == report.peak_bytes <= report.given_peak_bytes
        assert flatten(changed).before == better.flat.before
