"""The meters against byte counts known by construction."""

from __future__ import annotations

import pytest
import torch

from magis.backend.meters import MemoryMeasurement, allocator_peak, cpu_time_s, storage_peak

KIB = 256  # elements of a float32 tensor of 1 KiB


def test_temporaries_count_while_they_live() -> None:
    x = torch.ones(KIB)

    def step() -> torch.Tensor:
        a = x.exp()  # 1
        b = a.neg()  # 2
        del a
        c = b.exp()  # 2
        del b
        return torch.cat([c, c, c])  # 4

    assert storage_peak(step, [x]) == MemoryMeasurement(4096, 1024, "storages")
    assert storage_peak(step, [x]).peak_bytes == 5120


def test_views_of_what_lives_cost_nothing() -> None:
    x = torch.ones(KIB)

    def step() -> object:
        return [x[i:].view(-1, 1).expand(-1, 7) for i in range(1, 5)], x.exp()[:3]

    assert storage_peak(step, [x]).step_peak_bytes == 1024


def test_a_view_keeps_its_storage() -> None:
    def step() -> None:
        view = torch.ones(KIB)[:1]
        torch.ones(KIB)
        del view
        torch.ones(KIB)

    assert storage_peak(step, []).step_peak_bytes == 2048


def test_residents_count_once_a_storage_and_never_in_the_step() -> None:
    w = torch.ones(KIB)

    def step() -> None:
        w.add_(1)
        w[:4].mul_(2)

    assert storage_peak(step, [w, w.t(), w[5:]]) == MemoryMeasurement(0, 1024, "storages")


def test_what_was_there_unannounced_is_resident() -> None:
    w = torch.ones(KIB)
    assert storage_peak(lambda: w[1:] + 1, []) == MemoryMeasurement(1020, 1024, "storages")


def test_operators_called_without_their_python_frame_are_seen() -> None:
    x = torch.ones(KIB)
    op = torch.ops.aten.exp.default._op
    assert storage_peak(lambda: op(x), [x]).step_peak_bytes == 1024


def test_autograd_is_seen() -> None:
    w = torch.ones(KIB, requires_grad=True)
    # exp saves its result, the loss is 4 bytes, the seed 4; backward makes one product of 1 KiB
    peak = storage_peak(lambda: torch.autograd.grad(w.exp().sum(), w), [w]).step_peak_bytes
    assert peak == 2048 + 8


def test_several_results_and_none() -> None:
    x = torch.ones(KIB)
    mean, rstd = torch.zeros(1), torch.ones(1)
    op = torch.ops.aten.native_layer_norm_backward.default

    def step() -> object:
        return op(x[None], x[None], [KIB], mean, rstd, None, None, [True, False, False])

    assert storage_peak(step, [x, mean, rstd]).step_peak_bytes == 1024


def test_resized_storages() -> None:
    def step() -> None:
        x = torch.empty(0)
        x.resize_(KIB)
        x.resize_(2 * KIB)
        y = torch.ones(KIB)
        x.untyped_storage().resize_(0)
        x.resize_(0)
        torch.cat([y, y, y])

    assert storage_peak(step, []).step_peak_bytes == 4096


def test_empty_tensors() -> None:
    assert storage_peak(lambda: torch.ones(0).exp(), []).step_peak_bytes == 0


def test_nothing_outlives_the_measurement() -> None:
    x = torch.ones(KIB)
    kept: list[torch.Tensor] = []
    storage_peak(lambda: kept.append(x.exp()), [x])
    kept.clear()  # finalizers of a finished meter fire without harm
    assert storage_peak(lambda: x.exp(), [x]).step_peak_bytes == 1024


def test_allocator_sees_workspace_and_not_what_was_there() -> None:
    x = torch.ones(64, KIB)
    found = allocator_peak(lambda: (x.exp() + 1).sum())
    assert found.meter == "allocator"
    assert 2 * 65536 <= found.step_peak_bytes <= 2 * 65536 + 4096


def test_allocator_warms_up(capfd: pytest.CaptureFixture[str]) -> None:
    calls = []
    allocator_peak(lambda: calls.append(torch.ones(3)), warm_ups=2)
    assert len(calls) == 3
    assert capfd.readouterr().err == ""


def test_cpu_time() -> None:
    assert cpu_time_s(lambda: sum(range(200_000))) > cpu_time_s(lambda: None) >= 0
