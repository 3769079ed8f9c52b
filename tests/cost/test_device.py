from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from magis.cost.device import DEVICES, device
from magis.errors import UsageError
from magis.ir.dtype import DType

GOOD = {
    "peak_tflops_fp32": "82.6",
    "peak_tflops_bf16": "165.2",
    "bandwidth_gb_s": "1008",
    "sms": "128",
    "memory_gib": "24",
    "launch_us": "5",
    "link_gb_s": "25",
}


def write(folder: Path, **changes: str | None) -> str:
    path = folder / "my-gpu.toml"
    lines = [f"{key} = {value}" for key, value in {**GOOD, **changes}.items() if value is not None]
    path.write_text("\n".join(lines))
    return str(path)


def test_presets_are_the_table_of_device_model_v1() -> None:
    rows = {
        spec.name: (
            spec.peak_flops(DType.F32) / 1e12,
            spec.peak_flops(DType.BF16) / 1e12,
            spec.bandwidth_bytes_per_s / 1e9,
            spec.sms,
            spec.memory_bytes / 2**30,
            spec.launch_s * 1e6,
            spec.link_bytes_per_s / 1e9,
            spec.transfer_launch_s * 1e6,
        )
        for spec in DEVICES.values()
    }
    assert rows == {
        "rtx3090": pytest.approx((35.6, 71, 936, 82, 24, 5, 12, 10)),
        "a100-80g": pytest.approx((156, 312, 2039, 108, 80, 5, 24, 10)),
        "h100": pytest.approx((495, 990, 3350, 132, 80, 5, 50, 10)),
        "h200": pytest.approx((495, 990, 4800, 132, 141, 5, 50, 10)),
    }


def test_half_precision_has_its_own_peak_and_every_other_type_the_fp32_one() -> None:
    spec = device("rtx3090")
    assert {spec.peak_flops(t) for t in (DType.F16, DType.BF16)} == {71e12}
    assert {spec.peak_flops(t) for t in (DType.F32, DType.F64, DType.I8, DType.C64)} == {35.6e12}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rtx3900", "did you mean rtx3090"),
        ("A100", "did you mean a100-80g"),
        ("??", "known: rtx3090"),
        ("", "known"),
    ],
)
def test_an_unknown_name_is_answered_with_close_ones(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        device(name)
    assert "\n" not in str(caught.value)


def test_the_cpu_is_not_simulated() -> None:
    with pytest.raises(UsageError, match="measured"):
        device("cpu")


def test_a_device_from_a_file(tmp_path: Path) -> None:
    spec = device(write(tmp_path))
    assert spec.name == "my-gpu"
    assert spec.peak_flops(DType.F32) == pytest.approx(82.6e12)
    assert (spec.sms, spec.memory_bytes, spec.link_bytes_per_s) == (128, 24 * 2**30, 25e9)
    assert device(write(tmp_path, name='"lab 3"')).name == "lab 3"
    assert device(write(tmp_path, launch_us="0")).launch_s == 0


def test_a_file_with_the_numbers_of_a_preset_is_that_preset(tmp_path: Path) -> None:
    written = device(
        write(
            tmp_path,
            peak_tflops_fp32="495",
            peak_tflops_bf16="990",
            bandwidth_gb_s="3350",
            sms="132",
            memory_gib="80",
            link_gb_s="50",
        )
    )
    assert dataclasses.replace(written, name="h100") == DEVICES["h100"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sms": None}, "missing key 'sms'"),
        ({"launch_us": "-1"}, "'launch_us' must be a number, 0 or more, not -1"),
        ({"link_gb_s": "0"}, "'link_gb_s' must be a number, above 0, not 0"),
        ({"bandwidth_gb_s": "nan"}, "'bandwidth_gb_s'"),
        ({"memory_gib": '"24"'}, "'memory_gib'"),
        ({"sms": "true"}, "'sms'"),
        ({"sms": "82.5"}, "'sms' must be a whole number"),
        ({"name": "3"}, "'name'"),
        ({"name": '"a\\nb"'}, "'name'"),
        ({"bandwith_gb_s": "3"}, "unknown key 'bandwith_gb_s' .did you mean bandwidth_gb_s"),
        ({"sms": "[[["}, "no valid TOML"),
    ],
)
def test_a_wrong_file_is_answered_with_the_key(tmp_path: Path, changes: dict[str, str | None], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        device(write(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert "my-gpu.toml" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        device(str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no valid TOML"):
        device(str(tmp_path / "binary.toml"))
