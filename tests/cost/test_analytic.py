from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.cost.device import DEVICES, DeviceSpec, device
from magis.cost.model import AnalyticCost, CostModel
from magis.ir.args import Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.rule import Gemm, Kernel, dense

RTX = AnalyticCost(DEVICES["rtx3090"])
sizes = st.integers(1, 5000)
gemms = st.builds(Gemm, st.integers(1, 64), sizes, sizes, sizes)
dtypes = st.sampled_from([DType.F32, DType.BF16, DType.F64])
devices = st.sampled_from(list(DEVICES.values()))


def pointwise(*shape: int) -> Call:
    return Call("test.unknown.default", (Slot(0),), (), (dense(shape),), (dense(shape),))


def by_the_book(b: int, m: int, n: int, k: int, peak: float, bandwidth: float, sms: int) -> float:
    """t_matrix, written again straight from the text of device model v1."""
    found = []
    for tm, tn, eff in [(128, 128, 0.80), (128, 64, 0.70), (64, 64, 0.60)]:
        for s in [1, 2, 4, 8, 16, 32]:
            if s != 1 and k / s < 32:
                continue
            tiles = b * ceil(m / tm) * ceil(n / tn) * s
            waves = ceil(tiles / sms)
            fill = (m * n) / (ceil(m / tm) * tm * ceil(n / tn) * tn) * tiles / (waves * sms)
            extra = 0 if s == 1 else s * b * m * n * 8
            found.append(max(2 * b * m * n * k / (peak * eff * fill), extra / (bandwidth * 0.85)))
    return min(found)


@given(gemms, dtypes, devices)
def test_the_time_of_a_product_is_the_formula(gemm: Gemm, dtype: DType, spec: DeviceSpec) -> None:
    peak = spec.peak_flops_bf16 if dtype is DType.BF16 else spec.peak_flops_fp32
    expected = by_the_book(gemm.batch, gemm.m, gemm.n, gemm.k, peak, spec.bandwidth_bytes_per_s, spec.sms)
    assert AnalyticCost(spec).gemm_s(gemm, dtype) == pytest.approx(expected, rel=1e-12)


def test_a_memory_bound_kernel_by_hand() -> None:
    # 2 * 4 MiB at 936 GB/s * 0.85 = 795.6 GB/s, after a launch of 5 us
    assert RTX.latency_s(pointwise(1024, 1024)) == pytest.approx(5e-6 + 8388608 / 795.6e9)


def test_one_full_wave_of_products_by_hand() -> None:
    # 82 tiles of 128 x 128 on 82 SMs: fill 1, so 2*128*(82*128)*4096 FLOP at 35.6e12 * 0.80
    assert RTX.gemm_s(Gemm(1, 128, 82 * 128, 4096), DType.F32) == pytest.approx(11005853696 / 28.48e12)
    # one tile more takes a second wave at (128,128,.80); (64,64,.60) needs 332 tiles, 5 waves of 82
    slow = 2 * 128 * 83 * 128 * 4096
    assert RTX.gemm_s(Gemm(1, 128, 83 * 128, 4096), DType.F32, fused=True) == pytest.approx(
        min(slow / (28.48e12 * 83 / 164), slow / (35.6e12 * 0.7 * 166 / 246), slow / (35.6e12 * 0.6 * 332 / 410))
    )


def test_splitting_the_sum_fills_the_device_by_hand() -> None:
    # One output tile, K = 65536, s = 32: 32 of 82 SMs; or 128 tiles of (64,64) in 2 waves of 82.
    flops = 2 * 128 * 128 * 65536
    by_128, by_64 = flops / (28.48e12 * 32 / 82), flops / (35.6e12 * 0.6 * 128 / 164)
    by_64_s16 = flops / (35.6e12 * 0.6 * 64 / 82)
    by_128_64 = flops / (35.6e12 * 0.7 * 64 / 82)
    assert RTX.gemm_s(Gemm(1, 128, 128, 65536), DType.F32) == pytest.approx(min(by_128, by_64, by_64_s16, by_128_64))
    assert RTX.gemm_s(Gemm(1, 128, 128, 65536), DType.F32, fused=True) > 10 * by_128_64


def test_a_kernel_takes_the_longer_of_its_products_and_its_bytes() -> None:
    gemm = Gemm(1, 4096, 4096, 4096)
    matrix_s = RTX.gemm_s(gemm, DType.F32)
    assert RTX.kernel_s(Kernel(10, (gemm,))) == pytest.approx(5e-6 + matrix_s)
    assert RTX.kernel_s(Kernel(10**10, (gemm,))) == pytest.approx(5e-6 + 1e10 / 795.6e9)
    assert RTX.kernel_s(Kernel(10, (gemm, gemm))) == pytest.approx(5e-6 + 2 * matrix_s)
    assert RTX.kernels_s((Kernel(10, (gemm,)), Kernel(0))) == pytest.approx(10e-6 + matrix_s)


def test_fused_attention_by_hand() -> None:
    # b * heads = 96, 1024 queries and keys, 64 wide, bf16; both products, q, k, v, out once, one launch.
    scores, mixed = Gemm(96, 1024, 1024, 64), Gemm(96, 1024, 64, 1024)
    kernel = Kernel(4 * 96 * 1024 * 64 * 2, (scores, mixed), DType.BF16, fused=True)
    flops = 2 * 96 * 1024 * 1024 * 64
    first = flops / (71e12 * 0.80 * 6144 / (75 * 82))
    second = min(
        flops / (71e12 * 0.80 * 0.5 * 768 / (10 * 82)),
        flops / (71e12 * 0.70 * 768 / (10 * 82)),
        flops / (71e12 * 0.60 * 1536 / (19 * 82)),
    )
    assert RTX.kernel_s(kernel) == pytest.approx(5e-6 + first + second)


def test_views_and_empty_products_cost_nothing() -> None:
    assert RTX.kernels_s(()) == 0.0
    assert RTX.gemm_s(Gemm(1, 0, 8, 8), DType.F32) == 0.0
    assert RTX.gemm_s(Gemm(4, 8, 8, 0), DType.F32) == 0.0


def test_transfers_take_the_link_and_ten_microseconds() -> None:
    assert RTX.transfer_s(12_000_000) == pytest.approx(1e-3 + 10e-6)


@given(gemms, dtypes, st.integers(1, 10**10), st.booleans())
def test_a_faster_device_is_never_slower(gemm: Gemm, dtype: DType, nbytes: int, fused: bool) -> None:
    kernel = Kernel(nbytes, (gemm,), dtype, fused)
    assert AnalyticCost(DEVICES["h200"]).kernel_s(kernel) <= AnalyticCost(DEVICES["h100"]).kernel_s(kernel)
    half = replace(kernel, dtype=DType.BF16)
    assert RTX.kernel_s(half) <= RTX.kernel_s(kernel)


@given(gemms, st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 5000))
def test_more_work_never_takes_less_time(gemm: Gemm, nbytes: int, more_bytes: int, more: int) -> None:
    kernel = Kernel(nbytes, (gemm,))
    assert RTX.kernel_s(replace(kernel, nbytes=nbytes + more_bytes)) >= RTX.kernel_s(kernel)
    longer = replace(kernel, gemms=(replace(gemm, m=gemm.m + more, batch=gemm.batch),))
    assert RTX.kernel_s(longer) >= RTX.kernel_s(kernel) * (1 - 1e-12)
    assert RTX.kernel_s(replace(kernel, fused=True)) >= RTX.kernel_s(kernel)
    assert RTX.kernel_s(kernel) >= RTX.device.launch_s + gemm.flops / (RTX.device.peak_flops_fp32 * 0.80)


@given(gemms, st.sampled_from([2, 4, 8]))
def test_running_in_parts_never_takes_less_time(gemm: Gemm, parts: int) -> None:
    whole = replace(gemm, m=gemm.m * parts)
    assert parts * RTX.gemm_s(gemm, DType.F32, fused=True) >= RTX.gemm_s(whole, DType.F32, fused=True) * (1 - 1e-12)


def test_a_call_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = AnalyticCost(DEVICES["h100"])
    first = cost.latency_s(pointwise(8, 8))
    monkeypatch.setattr(cost, "kernels_s", lambda kernels: pytest.fail("worked out again"))
    assert cost.latency_s(pointwise(8, 8)) == first


def test_the_hash_follows_from_the_device() -> None:
    hashes = {name: AnalyticCost(device(name)).table_hash() for name in DEVICES}
    assert len(set(hashes.values())) == len(DEVICES)
    assert hashes["h100"] == AnalyticCost(device("h100")).table_hash()


def test_it_is_a_cost_model() -> None:
    model: CostModel = RTX
    assert model.source == "simulated"
    assert model.workspace_bytes(pointwise(4)) == 0
