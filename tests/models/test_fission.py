"""Real models in parts: proven against float64, and exactly as small as predicted."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch

from magis import zoo
from magis.api.costs import cost_model
from magis.api.limits import Splits, splits
from magis.api.lowering import lowered
from magis.api.planning import plan_step
from magis.api.prove import exact_results, prove
from magis.api.splits import split_by_hand
from magis.backend.meters import storage_peak
from magis.backend.runtime import compile_routine
from magis.capture.capture import Captured, capture
from magis.capture.workload import Workload, workload
from magis.errors import UsageError
from magis.fission.tree import Program
from magis.ir.graph import Value
from magis.ir.verify import verify
from magis.lower.routine import expand
from magis.sim.simulate import simulate
from magis.sim.timeline import no_latency

pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
COSTS = cost_model("rtx3090")
QUICK = ("hf-gpt2-toy", "plain-mlp-toy", "gptneo-toy")
TOYS = [name for name in zoo.names() if name.endswith("-toy")]
ALL = 10**8


@functools.lru_cache(maxsize=2)
def made(name: str) -> tuple[Workload, Captured, dict[str, torch.Tensor]]:
    if (needed := zoo.model(name).requires) is not None:
        pytest.importorskip(needed)
    torch.manual_seed(0)
    given = workload(zoo.build(name), name)
    return given, capture(given), exact_results(given)


def proven_share(name: str, wanted: Splits) -> tuple[float, Program]:
    """Proves the split step, checks its peak, and gives its step peak as a share of the unsplit step's."""
    given, captured, exact = made(name)
    found = plan_step(captured.graph, captured.schedule, COSTS, splits=wanted)
    assert found.program.enabled
    verify(found.program.graph, found.schedule)
    routine = lowered(found.program, found.schedule)
    step = compile_routine(routine)
    proof = prove(given, captured, step, reference=exact)
    assert proof.failures == ()
    inputs = captured.bind(given)
    with torch.no_grad():
        measured = storage_peak(lambda: step(list(inputs)), inputs)
    predicted = simulate(routine, no_latency)
    assert measured.peak_bytes == predicted.peak_bytes
    assert simulate(expand(routine), no_latency) == predicted
    whole = simulate(lowered(Program(captured.graph), captured.schedule), no_latency)
    return predicted.step_peak_bytes / whole.step_peak_bytes, found.program


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TOYS])
def test_whole_step_along_the_batch(name: str) -> None:
    for parts in (2, 3, ALL):
        proven_share(name, splits([f"batch={parts}"]))


@pytest.mark.parametrize(("name", "most"), [("hf-bert-toy", 0.37), ("monai-unet-toy", 0.31)])
def test_a_quarter_of_the_batch_takes_little_more_than_a_quarter(name: str, most: float) -> None:
    share, _ = proven_share(name, splits(["batch=4"]))
    assert share <= most


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("hf-bert-toy", ["heads=2"]),
        ("hf-bert-toy", ["hidden=5@bert.encoder.layer.0"]),
        ("hf-bert-toy", ["sequence=4"]),
        ("hf-gpt2-toy", ["sequence=3"]),
        ("hf-gpt2-toy", ["vocabulary=3"]),
        ("hf-gpt2-toy", ["batch=2", "vocabulary=7"]),
        ("hf-resnet50-toy", ["channels=3"]),
        ("hf-bert-toy", ["batch=4", "heads=2"]),
        ("hf-gpt2-toy", ["batch=3", "sequence=5"]),
        ("hf-bert-toy", ["hidden=4@bert.encoder.layer.0", "heads=2@bert.encoder.layer.1"]),
        ("hf-bert-dropout-toy", ["batch=3", "heads=4"]),
    ],
)
def test_other_dimensions(name: str, wanted: list[str]) -> None:
    _, program = proven_share(name, splits(wanted))
    names = [request.partition("=")[0] for request in wanted]
    assert {region.dimension for root in program.enabled for region in root.walk()} == set(names)
    if len(wanted) == 2 and "@" not in wanted[1]:
        assert any(root.children for root in program.enabled)


def test_channels_run_through_a_batch_norm_in_training() -> None:
    _, captured, _ = made("hf-resnet50-toy")
    program, _ = split_by_hand(captured.graph, splits(["channels=2"]))
    ops = {captured.graph.nodes[n].op for root in program.enabled for n in root.region if n in captured.graph.nodes}
    assert any("batch_norm" in op for op in ops)
    program, _ = split_by_hand(captured.graph, splits(["batch=2"]))
    for root in program.enabled:
        ops = {program.graph.nodes[n].op for n in root.region}
        assert not any("batch_norm" in op for op in ops)  # its statistics mix the samples


class Net(torch.nn.Module):
    """A U-Net of three levels without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 12, 16)
        self.down = torch.nn.ModuleList(
            torch.nn.Conv2d(a, b, 3, padding=1, stride=1 if i == 0 else 2) for i, (a, b) in enumerate(pairwise(widths))
        )
        self.up = torch.nn.ModuleList(
            torch.nn.ConvTranspose2d(b, a, 3, stride=2, padding=1, output_padding=1) for a, b in pairwise(widths[1:])
        )
        self.pool = torch.nn.MaxPool2d(3, 1, 1)
        self.mix = torch.nn.ModuleList(torch.nn.Conv2d(2 * w, w, 3, padding=2, dilation=2) for w in widths[1:-1])
        self.head = torch.nn.Conv2d(widths[1], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = []
        for layer in self.down:
            x = torch.relu(layer(x))
            levels.append(x)
        x = self.pool(levels.pop())
        for layer, mix in zip(reversed(self.up), reversed(self.mix)):
            x = torch.relu(mix(torch.cat([layer(x), levels.pop()], 1)))
        return self.head(x)


@pytest.mark.parametrize("parts", [2, 5, 16])
def test_height_of_a_u_net_with_a_halo(parts: int) -> None:
    torch.manual_seed(0)
    given = workload((Net().eval(), None, torch.randn(2, 3, 64, 40)), "u-net")
    captured = capture(given)
    found = plan_step(captured.graph, captured.schedule, COSTS, splits=splits([f"height={parts}"]))
    (region,) = found.program.enabled
    assert region.halo
    assert region.dimension == "height"
    routine = lowered(found.program, found.schedule)
    step = compile_routine(routine)
    assert prove(given, captured, step, reference=exact_results(given)).failures == ()
    inputs = captured.bind(given)
    with torch.no_grad():
        measured = storage_peak(lambda: step(list(inputs)), inputs)
    assert measured.peak_bytes == simulate(routine, no_latency).peak_bytes
    assert found.optimized.step_peak_bytes < found.baseline.step_peak_bytes


def cross_entropy(**options: object) -> tuple[torch.nn.Module, object, object]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.GELU(), torch.nn.Linear(16, 7))
    labels = torch.tensor([0, -100, 3, -100, -100, 6, 2, 1, -100])  # a part of three has none that counts
    labels[3:6] = -100
    loss = torch.nn.CrossEntropyLoss(**options)  # type: ignore[arg-type]
    return model, lambda m, batch: loss(m(batch[0]), batch[1]), (torch.randn(9, 5), labels)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"weight": torch.linspace(0.5, 2, 7)},
        {"weight": torch.linspace(0.5, 2, 7), "label_smoothing": 0.2},
        {"reduction": "sum"},
    ],
)
@pytest.mark.parametrize("parts", [2, 3, 9])
def test_losses_are_those_of_the_whole_batch(options: dict[str, object], parts: int) -> None:
    given = workload(cross_entropy(**options), "loss")  # type: ignore[arg-type]
    captured = capture(given)
    found = plan_step(captured.graph, captured.schedule, COSTS, splits=splits([f"batch={parts}"]))
    region = max(found.program.enabled, key=lambda f: len(f.region))
    ops = {found.program.graph.nodes[n].op for n in region.region}
    assert any("nll_loss_backward" in op for op in ops)  # forward and backward in one region
    step = compile_routine(lowered(found.program, found.schedule))
    assert prove(given, captured, step).failures == ()


def test_along_a_tied_vocabulary_no_tensor_of_all_logits_is_kept_but_one() -> None:
    _, captured, _ = made("hf-gpt2-toy")
    program, _ = split_by_hand(captured.graph, splits(["vocabulary=4"]))
    (logits,) = {v for n in program.graph.nodes.values() if "amax" in n.op for v in n.inputs}
    whole = program.graph.spec(logits).nbytes
    parts = {n for root in program.enabled for n in root.region}
    makers = [n for n in program.graph.nodes.values() if not n.is_input and n.id not in parts]
    large = {n.id for n in makers for spec in n.outputs if spec is not None and spec.storage_bytes >= whole}
    assert large == {program.graph.root(logits).node}
    ops = {program.graph.nodes[n].op.split(".")[1] for n in parts}
    assert {"mm", "exp", "sum"} <= ops  # the loss and the head's gradients
    assert not any("_log_softmax" in n.op for n in program.graph.nodes.values())


def test_a_skipped_part_fails_the_proof() -> None:
    given, captured, exact = made("hf-bert-toy")
    found = plan_step(captured.graph, captured.schedule, COSTS, splits=splits(["batch=4"]))
    routine = lowered(found.program, found.schedule)
    source = compile_routine(routine).source
    assert "in range(3)" in source
    from magis.backend.codegen import generate

    broken = generate(routine)
    names = dict(broken.names)
    exec(compile(broken.text.replace("in range(3)", "in range(2)"), "broken", "exec"), names)
    step = names["step"]
    assert not prove(given, captured, step, reference=exact).ok  # type: ignore[arg-type]


def test_half_precision_sums_are_kept_in_float32_unless_told_otherwise() -> None:
    _, captured, _ = made("gptneo-toy")
    peaks = {}
    for accumulate in ("float32", "same"):
        found = plan_step(captured.graph, captured.schedule, COSTS, splits=splits(["batch=2"], accumulate))
        peaks[accumulate] = found.optimized.peak_bytes
        assert all(region.wide == (accumulate == "float32") for region in found.program.enabled)
    assert captured.graph.spec(Value(captured.graph.inputs[0].id)).dtype.nbytes == 2
    assert peaks["same"] < peaks["float32"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("depth=2", "there is no dimension 'depth'; there are: batch"),
        ("heads=2@decoder", "no operator belongs to a module 'decoder'"),
        ("batch=1", "is no split"),
        ("batch", "is no split"),
        ("vocabulary=2@bert.pooler", "cannot be split"),
    ],
)
def test_splits_that_cannot_be(request_: str, words: str) -> None:
    _, captured, _ = made("hf-bert-toy")
    with pytest.raises(UsageError, match=words):
        split_by_hand(captured.graph, splits([request_]))
