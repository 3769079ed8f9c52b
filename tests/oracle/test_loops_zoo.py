"""Loops of every distinct operator call of every toy of the zoo, and of a network outside it, against execution."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Outsider(nn.Module):
    """A network of operators that the zoo has not, on images of [batch, 6, 12, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(6, 12, 3, padding=1, groups=3, padding_mode="circular")
        self.depthwise = nn.Conv2d(12, 24, 3, stride=2, groups=12)
        self.norm = nn.GroupNorm(4, 24)
        self.prelu = nn.PReLU(24)
        self.instance = nn.InstanceNorm2d(6, affine=True)
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2, groups=2)
        self.smooth = nn.Upsample(scale_factor=1.5, mode="bilinear", align_corners=False)
        self.rows = nn.Linear(12, 7)
        self.bilinear = nn.Bilinear(7, 7, 5)
        self.register_buffer("places", torch.tensor([3, 0, 4, 0, 2, 1, 3]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.prelu(self.norm(self.depthwise(F.pad(self.grouped(x), (1, 2, 0, 1), "reflect"))))
        y = self.smooth(F.max_pool2d(F.elu(self.up(y)), 2)) + F.avg_pool2d(y[:, 12:, :9, :7], 2, 1).mean()
        shuffled = self.instance(
            F.pad(F.pixel_shuffle(F.pad(y, (0, 1, 1, 0), "replicate"), 2).repeat(1, 2, 1, 1), (1, -1))
        )
        rows = self.rows(y.flatten(2).transpose(1, 2).softmax(-1))
        scores = torch.einsum("bnc,bmc->bnm", F.normalize(rows, dim=-1), torch.cumsum(rows, 1)).tril()
        best, where = scores.topk(3, dim=1)
        picked = rows.gather(1, where[..., :7]) * best[..., :7]
        placed = torch.zeros(x.shape[0], 5, 7).index_add(1, self.places[:3], picked)
        placed = placed.scatter_add(1, where[:, :, :7] % 5, picked).cumprod(0) + torch.logsumexp(rows, 1, keepdim=True)
        near = F.cosine_similarity(placed, picked[:, :1], dim=-1)
        mixed = self.bilinear(placed, placed.flip(1).roll(1, 2)) * near[..., None]
        halves = F.glu(torch.cat([mixed / mixed.std(1, keepdim=True), mixed.amax(1, keepdim=True)], 1), 1)
        return halves.square().sum((1, 2)) + shuffled.abs().mean((1, 2, 3)) + F.unfold(y, 2).var((1, 2))


def _mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_loops_of_a_network_outside_the_zoo(child: LoopChild) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(workload((Outsider(), _mean, torch.randn(5, 6, 12, 10)), "outsider")).graph
        problems = _problems(graph, child)
    assert not problems, "\n".join(problems)
