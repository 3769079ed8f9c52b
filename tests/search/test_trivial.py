"""Plans that people make by hand: which blocks there are, and what recomputing them leaves in memory."""

from functools import cache

import pytest
import torch

from magis import zoo
from magis.capture.capture import capture
from magis.capture.workload import Workload, workload
from magis.fission.tree import Program
from magis.ir.graph import Graph, NodeId
from magis.ir.verify import verify
from magis.ops.registry import rule_for
from magis.rules.remat import Rematerialise
from magis.search.trivial import CHEAP, block_of, is_early, trivial_sites


def captured(made: Workload) -> Graph:
    return capture(made).graph


@cache
def toy(name: str) -> Graph:
    if (needed := zoo.model(name).requires) is not None:
        pytest.importorskip(needed)
    with torch.device("meta"):
        return captured(workload(zoo.build(name), name))


def model(net: torch.nn.Module) -> Graph:
    torch.manual_seed(0)
    return captured(Workload(net, lambda m, b: m(b).square().sum(), torch.randn(4, 8)))


class Nested(torch.nn.Module):
    """Two stages of two layers each."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2)) for _ in range(2)]
        self.stages = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:
                x = layer(x).tanh()
        return x


class Plain(torch.nn.Module):
    """No list at all."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.ModuleDict({"first": torch.nn.Linear(8, 8), "second": torch.nn.Linear(8, 8)})
        self.head = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body["second"](self.body["first"](x).tanh()).tanh())


def test_blocks_of_a_transformer_are_its_layers():
    blocks = set(block_of(toy("hf-bert-toy"), 0).values())
    assert {b for b in blocks if "layer" in b} == {"bert.encoder.layer.0", "bert.encoder.layer.1"}


@pytest.mark.parametrize("name", ["resnet50-toy", "unet-toy"])
def test_blocks_of_a_convolution_net_are_its_repeated_modules(name):
    blocks = set(block_of(toy(name), 0).values())
    assert {"resnet50-toy": {"stem", "head", "blocks.0"}, "unet-toy": {"down.4", "up.3", "head"}}[name] <= blocks
    assert len(blocks) == {"resnet50-toy": 8, "unet-toy": 11}[name]


def test_lists_within_lists():
    graph = model(Nested())
    assert set(block_of(graph, 0).values()) == {"stages.0", "stages.1"}
    assert set(block_of(graph, -1).values()) == {f"stages.{i}.{j}" for i in range(2) for j in range(2)}


def test_without_lists_the_children_are_the_blocks():
    assert set(block_of(model(Plain()), 0).values()) == {"body", "head"}


@pytest.mark.parametrize("name", ["hf-bert-toy", "resnet50-toy", "unet-toy", "plain-mlp-toy", "hf-bert-dropout-toy"])
def test_each_plan_applies_and_runs_again_only_what_it_says(name):
    graph = toy(name)
    plans = dict(trivial_sites(graph))
    assert "recompute cheap operators" in plans
    for plan, where in plans.items():
        segment = [graph.nodes[NodeId(n)] for n in where[1 : where[0] + 1]]
        assert all(is_early(node) for node in segment)
        assert not any(is_early(graph.nodes[NodeId(n)]) for n in where[where[0] + 1 :])
        if plan == "recompute cheap operators":
            owners = [node for node in segment if any(s and s.alias_of is None for s in node.outputs)]
            assert {rule_for(node.op).family for node in owners} <= CHEAP
        change = Rematerialise().apply(Program(graph), where)
        assert change is not None
        verify(change.program.graph)


def test_of_a_recomputed_block_only_its_result_is_kept():
    graph, layer = toy("hf-bert-toy"), "bert.encoder.layer.0"
    blocks = block_of(graph, 0)
    change = Rematerialise().apply(Program(graph), dict(trivial_sites(graph))["recompute each block"])
    assert change is not None
    after = change.program.graph
    late = [node for node in after.nodes.values() if not is_early(node) or node.id not in graph.nodes]
    kept = {after.root(value).node for node in late for value in node.inputs if value.node in graph.nodes}
    result = [n for n in blocks if any(blocks.get(u, layer) != layer for u in graph.users[n])]
    assert len([n for n in result if blocks[n] == layer]) == 1
    assert {n for n in kept if blocks.get(n) == layer} <= set(result)


def test_nothing_to_recompute_without_a_backward_pass():
    torch.manual_seed(0)
    graph = captured(Workload(Nested().eval(), None, torch.randn(4, 8)))
    assert list(trivial_sites(graph)) == []
