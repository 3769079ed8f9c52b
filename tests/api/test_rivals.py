"""Methods done by hand: which blocks are checkpointed, how a batch is cut, and what is told of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from magis.api.eager import EagerStep, Snapshot, written_tensors
from magis.api.plan import plan
from magis.api.rivals import CheckpointStep, blocks, check_methods, deviation, rival_step
from magis.api.run import run_plan
from magis.backend.meters import storage_peak
from magis.capture.capture import capture
from magis.capture.workload import Workload
from magis.errors import MismatchError, UsageError


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Block(nn.Module):
    """Takes keywords and what is no tensor; one keyword is named like one of `checkpoint`'s."""

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, 4 * width), norm, nn.Linear(4 * width, width)
        self.calls = 0

    def forward(self, x, scale, *, debug, shift=None):
        self.calls += 1
        hidden = nn.functional.dropout(self.norm(self.up(x)).relu(), 0.2)
        return x + scale * self.down(hidden) + shift if debug == "on" else x


class Net(nn.Module):
    def __init__(self, width: int = 16, norm=lambda width: nn.Identity()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, norm(4 * width)) for _ in range(3))

    def forward(self, x, shift):
        for layer in self.layers:
            x = layer(x, 0.5, debug="on", shift=shift)
        return x


def _square(model, batch):
    return model(batch["x"], batch["shift"]).square().mean()


def _net(loss=_square, update=None, batch=24, **options):
    torch.manual_seed(0)
    return Workload(Net(**options), loss, {"x": torch.randn(batch, 16), "shift": torch.ones(16)}, update, "net")


def _without_dropout(monkeypatch):
    monkeypatch.setattr(nn.functional, "dropout", lambda x, p: x)


def _results(step):
    torch.manual_seed(1)
    return {name: tensor.clone() for name, tensor in step.results().items()}


def _prepared(made):
    snapshot = Snapshot(written_tensors(made, {}))

    def prepare():
        snapshot.restore()
        torch.manual_seed(1)

    return prepare


# ---- which blocks


def _same(found, expected):
    return [id(module) for module in found] == [id(module) for module in expected]


def test_blocks_are_the_children_of_a_repeated_list():
    net = Net()
    assert _same(blocks(net), net.layers)


def test_blocks_are_those_of_the_outermost_lists():
    stages = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    assert _same(blocks(nn.Sequential(nn.ReLU(), stages)), stages)


def test_a_list_of_lists_gives_what_is_called():
    inner = [nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])]
    assert _same(blocks(nn.ModuleList(inner)), [inner[0][0], inner[1][0], inner[1][1]])


def test_a_block_that_is_used_twice_is_one():
    shared = nn.Linear(4, 4)
    assert _same(blocks(nn.Sequential(shared, shared)), [shared])


def test_without_a_repeated_list_blocks_are_the_children_with_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Bilinear(4, 4, 4))
    assert _same(blocks(model), [model[0], model[2]])


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UsageError, match="no submodule with parameters"):
        CheckpointStep(Workload(nn.ReLU(), None, torch.ones(2), None, "relu"))


# ---- checkpoint


def test_checkpointing_computes_the_same_twice_in_less_memory():
    made = _net()
    eager = _results(EagerStep(made))
    eager_peak = storage_peak(EagerStep(made), made.model.parameters()).step_peak_bytes
    step = rival_step("checkpoint", made)
    before = [layer.calls for layer in made.model.layers]
    ours = _results(step)
    assert [layer.calls - called for layer, called in zip(made.model.layers, before)] == [2, 2, 2]
    assert eager.keys() == ours.keys() and all(torch.equal(ours[name], eager[name]) for name in eager)
    assert storage_peak(step, made.model.parameters()).step_peak_bytes < 0.8 * eager_peak
    EagerStep(made)()
    assert [layer.calls - called for layer, called in zip(made.model.layers, before)] == [5, 5, 5]  # 2 + 2 + 1


# ---- micro-batches


@pytest.mark.parametrize("parts", [1, 5, 24])
def test_gradients_add_up_to_the_whole_batches(parts, monkeypatch):
    _without_dropout(monkeypatch)
    made = _net()
    eager, ours = _results(EagerStep(made)), _results(rival_step(f"micro:{parts}", made))
    assert eager.keys() == ours.keys()
    for name in eager:
        torch.testing.assert_close(ours[name], eager[name], rtol=1e-4, atol=1e-6)


def test_each_piece_is_cut_from_the_batch_and_nothing_else(monkeypatch):
    _without_dropout(monkeypatch)
    seen = []

    def loss(model, batch):
        seen.append((tuple(batch["x"].shape), tuple(batch["shift"].shape)))
        return _square(model, batch)

    rival_step("micro:5", _net(loss))()
    assert seen == [((size, 16), (16,)) for size in (5, 5, 5, 5, 4)]


def _adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("update", [lambda model: "sgd-inplace", _adam], ids=["sgd", "adamw"])
def test_the_update_comes_once_after_the_last_piece(update, monkeypatch):
    _without_dropout(monkeypatch)
    weights = []
    for method in (None, "micro:3"):
        made = _net()
        made = Workload(made.model, made.loss_fn, made.batch, update(made.model), "net")
        (EagerStep(made) if method is None else rival_step(method, made))()
        assert all(parameter.grad is None for parameter in made.model.parameters())
        weights.append([parameter.detach() for parameter in made.model.parameters()])
    start = list(_net().model.parameters())
    for ours, eager, old in zip(weights[1], weights[0], start):
        change = (eager - old).abs().max()
        assert change > 0 and (ours - eager).abs().max() < 1e-3 * change


def test_outputs_of_an_inference_call_are_joined(monkeypatch):
    _without_dropout(monkeypatch)

    class Outputs(Net):
        def forward(self, x, shift):
            y = super().forward(x, shift)
            return {"y": y, "both": (y, 7), "shift": shift}

    made = Workload(Outputs(), None, _net().batch, None, "outputs")
    eager, ours = EagerStep(made)(), rival_step("micro:5", made)()
    torch.testing.assert_close(ours, eager)
    assert not ours["y"].requires_grad


# ---- what is told


def test_checkpointing_updates_running_statistics_twice():
    made = _net(norm=nn.BatchNorm1d)
    found = deviation("checkpoint", made, capture(made), _prepared(made))
    assert found.max_rel_error == 0.0
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert found.buffers == tuple(f"layers.{layer}.norm.{name}" for layer in range(3) for name in names)


def test_micro_batches_change_what_batch_norm_computes(monkeypatch):
    _without_dropout(monkeypatch)
    made = _net(norm=nn.BatchNorm1d)
    found = deviation("micro:4", made, capture(made), _prepared(made))
    assert found.max_rel_error > 0.05 and len(found.buffers) == 9


@pytest.mark.parametrize("update", [None, "sgd-inplace"])
def test_a_gradient_that_is_zero_by_mathematics_is_no_error(update, monkeypatch):
    """The bias in front of a norm over the examples' own values: rounding noise on both sides."""

    class Normed(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.GELU(), nn.Conv2d(8, 2, 3))

    torch.manual_seed(0)
    made = Workload(Normed(), lambda m, x: m(x).square().mean(), torch.randn(8, 3, 12, 12), update, "normed")
    eager, ours = (_results(step(Workload(made.model, made.loss_fn, made.batch)))["grad:0.bias"] for step in _BOTH)
    assert (ours - eager).norm() > 0.1 * eager.norm()  # or it would show nothing
    assert 0 < deviation("micro:4", made, capture(made), _prepared(made)).max_rel_error < 1e-5


_BOTH = (EagerStep, lambda made: rival_step("micro:4", made))


def test_dropout_masks_are_others_in_pieces_and_the_same_again_under_checkpointing():
    made = _net()
    assert deviation("checkpoint", made, capture(made), _prepared(made)).max_rel_error == 0.0
    assert deviation("micro:2", made, capture(made), _prepared(made)).max_rel_error > 0.1


def test_weights_are_not_changed_by_comparing():
    made = _net(update="sgd-inplace")
    prepare = _prepared(made)
    before = [parameter.clone() for parameter in made.model.parameters()]
    deviation("micro:2", made, capture(made), prepare)
    prepare()
    assert all(torch.equal(*pair) for pair in zip(before, made.model.parameters()))


def test_another_shape_than_eagers_is_no_number():
    made = Workload(nn.Linear(4, 2), None, torch.ones(8, 4), None, "linear")
    made.model.forward = lambda x: x.reshape(-1, 16)
    with pytest.raises(MismatchError, match=r"output:batch is \[1, 16\], eager's \[2, 16\]"):
        deviation("micro:2", made, capture(made), _prepared(made))


# ---- names


@pytest.mark.parametrize("method", ["micro:0", "micro:x", "micro:", "micro:-2", "micro:1.5", "foo", "", "Checkpoint"])
def test_what_is_no_method_is_refused(method):
    with pytest.raises(UsageError, match="pass checkpoint, or micro:K"):
        check_methods([method], 8)


def test_no_more_pieces_than_examples():
    with pytest.raises(UsageError, match="the batch has 8 examples, pass a K from 1 to 8"):
        check_methods(["micro:9"], 8)


def test_each_method_once():
    assert check_methods(["micro:08", "checkpoint", "micro:8", "checkpoint"], 8) == ("micro:8", "checkpoint")


# ---- all together

FACTORY = """
import torch
from torch import nn

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Tanh(), nn.Linear(256, 16)) for _ in range(4)
        )

    def forward(self, x):
        assert len(x) == 64, "only the whole batch"
        for layer in self.layers:
            x = x + layer(x)
        return x

def whole():
    return Whole(), lambda model, x: model(x).square().mean(), torch.randn(64, 16)
"""


def test_run_beside_methods_one_of_which_fails(tmp_path: Path) -> None:
    (tmp_path / "whole.py").write_text(FACTORY)
    report = run_plan(
        plan(f"{tmp_path}/whole.py:whole", device="rtx3090"), pairs=1, check=False, beside=["checkpoint", "micro:2"]
    )
    checkpointed, micro = report.beside
    assert (checkpointed.method, micro.method) == ("checkpoint", "micro:2")
    assert checkpointed.failed is None and checkpointed.side is not None
    assert checkpointed.max_rel_error == 0.0 and checkpointed.buffers == ()
    assert checkpointed.step_memory_ratio == checkpointed.side.step_peak_bytes / report.baseline.step_peak_bytes < 0.8
    assert checkpointed.latency_overhead == checkpointed.side.latency_s / report.baseline.latency_s - 1
    assert (micro.side, micro.max_rel_error, micro.step_memory_ratio, micro.latency_overhead) == (None,) * 4
    assert micro.failed == "AssertionError: only the whole batch"
