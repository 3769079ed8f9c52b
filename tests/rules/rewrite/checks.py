"""What the tests of rewrites share: apply a rule until it does not apply any more, and compare what steps compute."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map

from builder import Recorded, record
from magis import zoo
from magis.api.costs import cost_model
from magis.aten.infer import infer
from magis.backend.runtime import compile_routine
from magis.capture.capture import Captured, capture
from magis.capture.workload import Workload, workload
from magis.fission.tree import Program
from magis.ir.graph import Graph
from magis.ir.structure import topological_order
from magis.ir.verify import verify
from magis.lower.lower import lower
from magis.rules.base import Rule, Site
from magis.schedule.incremental import Scheduled
from magis.sim.estimate import Estimate
from magis.sim.simulate import simulate

COSTS = cost_model("rtx3090")
Matrix = torch.Tensor


def sites(rule: Rule, graph: Graph) -> list[Site]:
    """Where the rule would be tried."""
    scheduled = Scheduled.of(graph, topological_order(graph))
    return list(rule.sites(scheduled, lambda n: COSTS.latency_s(graph.call(graph.nodes[n]))))


def once(rule: Rule, graph: Graph, site: Site | None = None) -> Graph | None:
    """The graph rewritten at a site, the first that applies if none is given; None when there is none."""
    for where in sites(rule, graph) if site is None else [site]:
        change = rule.apply(Program(graph), where, infer)
        if change is not None:
            verify(change.program.graph)
            before, after = graph.nodes, change.program.graph.nodes
            assert {n for n in before if after.get(n) != before[n]} <= change.old_nodes
            assert {n for n in after if before.get(n) != after[n]} <= change.new_nodes
            return change.program.graph
    return None


def everywhere(rule: Rule, graph: Graph, most: int = 200) -> tuple[Graph, int]:
    """The graph rewritten until the rule applies nowhere, and how often that was."""
    for times in range(most):
        better = once(rule, graph)
        if better is None:
            return graph, times
        graph = better
    raise AssertionError("the rule applies again and again")


def operators(graph: Graph) -> list[str]:
    """The operators that launch something, without `aten.` and the overload."""
    nodes = [n for n in graph.nodes_in_order() if not n.is_input and COSTS.latency_s(graph.call(n)) > 0]
    return [n.op.split(".")[1] for n in nodes]


def estimate(graph: Graph) -> Estimate:
    """What the step costs in a plain order on a simulated device."""
    return simulate(lower(Program(graph), topological_order(graph), infer), COSTS.latency_s, COSTS.workspace_bytes)


def computed(graph: Graph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """All that the graph computes: what it hands back and what it leaves in its inputs."""
    step = compile_routine(lower(Program(graph), topological_order(graph), infer))
    with torch.no_grad():
        torch.manual_seed(1)
        returned = step(list(inputs))
    storages = {t.untyped_storage().data_ptr() for t in [*inputs, *returned] if t.numel()}
    before = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
    assert len(storages - before) >= len({id(t) for t in returned}) - len(before)
    return [t.detach().clone(memory_format=torch.preserve_format) for t in (*returned, *inputs)]


def assert_same(recorded: Recorded, graph: Graph, tolerance: float = 1e-9) -> None:
    """The rewritten graph computes what the recorded one does, results of the same type and layout."""
    expected = computed(recorded.graph, recorded.fresh_inputs())
    found = computed(graph, recorded.fresh_inputs())
    for a, b in zip(expected, found, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)


def rewritten(rule: Rule, code: Callable[..., object], *inputs: torch.Tensor, times: int | None = None) -> Graph:
    """The recorded code after the rule was applied everywhere; checked to compute the same."""
    recorded = record(code, inputs)
    graph, applied = everywhere(rule, recorded.graph)
    assert times is None or applied == times
    assert_same(recorded, graph)
    return graph


def matrices(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Random float64 tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def random_step(seed: int, size: int = 24) -> Recorded:
    """A random program of matrices in which rewrites find something: products, scales, sums, views, polynomials,
    an update in place; some results are handed back."""
    chosen = random.Random(seed)

    def code(*given: Matrix) -> tuple[Matrix, ...]:
        parameter, *batch = given
        values = [parameter.t(), *batch]
        for _ in range(size):
            values.append(_step(chosen, values))
        parameter.add_(values[-1], alpha=-0.1)
        results = [values[-2], *chosen.sample(values[4:], 2)]
        return tuple({id(t): t.clone() if t._base is not None else t for t in results}.values())

    return record(code, matrices((4, 4), (4, 4), (4, 4), (4, 4), seed=seed), ["parameter", *["batch"] * 3])


def _step(chosen: random.Random, values: list[Matrix]) -> Matrix:
    """One more 4x4 matrix, of the last ones as a rule."""
    x, y = (values[-1 - int(chosen.expovariate(0.7)) % len(values)] for _ in range(2))
    steps: list[Callable[[], Matrix]] = [
        lambda: x @ y,
        lambda: x @ y,
        lambda: torch.bmm(x.view(1, 4, 4), y.unsqueeze(0)).view(4, 4) if x.is_contiguous() else x @ y,
        lambda: torch.addmm(x, y, y, beta=chosen.choice([0, 1, 0.5]), alpha=chosen.choice([1, -2])),
        lambda: x * chosen.choice([0.5, -1.0, 1]),
        lambda: x / chosen.choice([2, 4.0]),
        lambda: -x,
        lambda: torch.add(x, y, alpha=chosen.choice([1, 1, 0.5])),
        lambda: x + y,
        lambda: torch.sub(x, y, alpha=chosen.choice([1, 2])),
        lambda: x.t(),
        lambda: x.t().clone(memory_format=torch.contiguous_format),
        lambda: x.reshape(2, 8).view(4, 4),
        lambda: x.tanh(),
        lambda: x.softmax(-1),
        lambda: x.sum(0, keepdim=True).expand(4, 4),
        lambda: x.pow(chosen.choice([1.0, 2, 3])).tanh(),
        lambda: x + chosen.choice([0, 1.0]),
        lambda: x.tanh() * y,
    ]
    return chosen.choice(steps)()


def toy(name: str) -> tuple[Workload, Captured]:
    """A captured step of a small model, in float64."""
    torch.manual_seed(0)
    made = workload(zoo.build(name), name)
    batch = tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, made.batch)
    double = Workload(made.model.double(), made.loss_fn, batch, made.update, name)
    return double, capture(double)


def assert_same_model(made: Workload, captured: Captured, graph: Graph) -> None:
    """The rewritten step gives the captured one's results, but for rounding."""
    inputs = captured.bind(made)
    saved = [t.detach().clone() for t in inputs]
    expected = computed(captured.graph, inputs)
    with torch.no_grad():
        for tensor, value in zip(inputs, saved):
            tensor.copy_(value)
    for a, b in zip(expected, computed(graph, inputs), strict=True):
        torch.testing.assert_close(
            b, a, rtol=1e-9, atol=1e-9 * max(1.0, float(a.double().abs().max())) if a.numel() else 0.0
        )
