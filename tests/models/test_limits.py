"""Real models under limits: proven, as small as predicted, and never worse than what people do by hand."""

import functools
from itertools import pairwise

import pytest
import torch

from magis import zoo
from magis.api.costs import cost_model
from magis.api.limits import Limits, budget, limits
from magis.api.planning import Planned, plan_step
from magis.api.prove import exact_results, prove
from magis.aten.infer import infer
from magis.backend.meters import storage_peak
from magis.backend.runtime import CompiledStep, compile_routine
from magis.capture.capture import Captured, capture
from magis.capture.workload import Workload, workload
from magis.lower.lower import lower
from magis.search.objective import Objective
from magis.sim.timeline import timeline

pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
COSTS = cost_model("rtx3090")
QUICK = ("plain-mlp-toy", "hf-bert-dropout-toy", "resnet50-toy", "unet-toy", "hf-gpt2-toy", "vit-toy")
REST = [name for name in zoo.names() if name.endswith("-toy") and name not in QUICK]
TIGHTER = [limits(memory=share) for share in (0.9, 0.7, 0.5)]
LIMITS = [*TIGHTER, limits(max_slowdown=1.10)]


def planned(captured: Captured, wanted: Limits, iterations: int = 60) -> Planned:
    return plan_step(captured.graph, captured.schedule, COSTS, wanted, budget(None, iterations))


def compiled(found: Planned) -> CompiledStep:
    return compile_routine(lower(found.program, found.schedule, infer))


def measured_peak(found: Planned, inputs: list[torch.Tensor]) -> int:
    step = compiled(found)
    with torch.no_grad():
        return storage_peak(lambda: step(list(inputs)), inputs).peak_bytes


def predicted_peak(found: Planned) -> int:
    """Without what kernels allocate for themselves, which storages do not show."""
    return timeline(lower(found.program, found.schedule, infer)).peak_bytes


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_limits(name):
    if (needed := zoo.model(name).requires) is not None:
        pytest.importorskip(needed)
    torch.manual_seed(0)
    made = workload(zoo.build(name), name)
    captured, exact = capture(made), exact_results(made)
    found = [planned(captured, wanted) for wanted in LIMITS]
    for plan in found:
        proof = prove(made, captured, compiled(plan), reference=exact)
        assert proof.failures == ()
        assert proof.ok
    assert predicted_peak(found[2]) == measured_peak(found[2], captured.bind(made))
    for wanted, plan in zip(LIMITS, found):
        _as_good_as_by_hand(plan, wanted)
    for wide, tight in pairwise(found[: len(TIGHTER)]):
        # two missed limits whose searches were cut short may end some bytes apart
        assert tight.optimized.peak_bytes <= 1.0001 * wide.optimized.peak_bytes
        assert not tight.met or tight.optimized.latency_s >= 0.99 * wide.optimized.latency_s


def _as_good_as_by_hand(plan: Planned, wanted: Limits) -> None:
    slowest = None if wanted.max_slowdown is None else wanted.max_slowdown * plan.baseline.latency_s
    objective = Objective(slowest, plan.peak_limit_bytes)
    starts = [(start.latency_s, start.peak_bytes) for start in plan.found.starts]
    assert len(starts) >= 2
    assert plan.met == objective.met(plan.optimized.latency_s, plan.optimized.peak_bytes)
    assert plan.met or not any(objective.met(*start) for start in starts)
    assert plan.met or plan.optimized.peak_bytes <= min(peak for _, peak in starts)


EVERY = [limits(memory=0.8), limits(memory=0.6), limits(memory=0.3), limits(max_slowdown=1.1), limits(max_slowdown=3.0)]


def results(made: Workload, wanted: Limits) -> tuple[dict[str, torch.Tensor], Planned]:
    """What one planned step returns, by name; what it writes is in the model afterwards."""
    captured = capture(made)
    found = planned(captured, wanted, 30)
    torch.manual_seed(7)
    with torch.no_grad():
        returned = compiled(found)(captured.bind(made))
    return dict(zip(captured.graph.output_names, returned, strict=True)), found


class Dropped(torch.nn.Module):
    """`x * w` through four dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w
        for _ in range(4):
            y = torch.nn.functional.dropout(y, 0.3)
        return y


@pytest.mark.parametrize("wanted", EVERY)
def test_masks_of_the_backward_pass_are_those_of_the_forward_pass(wanted):
    """The loss is linear in w, so the gradient gives it back: with other masks it would not."""
    torch.manual_seed(0)
    made = Workload(Dropped(), lambda m, b: m(b).sum(), torch.rand(256, 64))
    found, plan = results(made, wanted)
    weight = made.model.w.detach()
    assert torch.allclose((weight * found["grad:w"]).sum(), found["loss"], rtol=1e-4)
    assert (plan.found.best.history != ()) == (plan.optimized.peak_bytes < plan.baseline.peak_bytes)
    assert plan.optimized.peak_bytes <= plan.baseline.peak_bytes


class Normed(torch.nn.Module):
    """A convolution and a batch norm, called `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.conv, self.norm = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.relu(self.norm(self.conv(x)))
        return x


@functools.cache
def eager_statistics(times: int) -> dict[str, torch.Tensor]:
    made = normed(times)
    made.loss_fn(made.model, made.batch).backward()
    return {name: buffer.clone() for name, buffer in made.model.named_buffers()}


def normed(times: int) -> Workload:
    torch.manual_seed(0)
    return Workload(Normed(times), lambda m, b: m(b).square().mean(), torch.randn(8, 4, 16, 16))


@pytest.mark.parametrize("wanted", EVERY)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_statistics_are_updated_once_a_call(times, wanted):
    made = normed(times)
    _, plan = results(made, wanted)
    assert plan.optimized.peak_bytes < plan.baseline.peak_bytes or wanted.max_slowdown == 1.1
    buffers = dict(made.model.named_buffers())
    assert buffers["norm.num_batches_tracked"].item() == times
    for name, expected in eager_statistics(times).items():
        assert torch.allclose(buffers[name], expected, rtol=1e-5), name


@pytest.mark.parametrize("wanted", EVERY)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.5),
        lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        lambda parameters: "sgd-inplace",
    ],
)
def test_nothing_is_computed_again_with_updated_weights(optimizer, wanted):
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    net = torch.nn.Sequential(*layers)
    made = Workload(net, lambda m, b: m(b).square().mean(), torch.randn(256, 64), optimizer(net.parameters()))
    captured = capture(made)
    found = planned(captured, wanted, 30)
    proof = prove(made, captured, compiled(found))
    assert proof.failures == ()
    assert found.found.best.history or wanted.max_slowdown == 1.1
