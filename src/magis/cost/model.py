"""Latency of one operator: the interface of every cost model, and the analytic one (device model v1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from functools import lru_cache
from hashlib import sha256
from typing import ClassVar, Literal, Protocol

from magis.cost.device import MODEL_VERSION, DeviceSpec
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.registry import rule_for
from magis.ops.rule import Gemm, Kernel

Source = Literal["simulated", "measured"]

BANDWIDTH_SHARE = 0.85
"""Share of the peak bandwidth that a memory-bound kernel reaches."""
TILES = ((128, 128, 0.80), (128, 64, 0.70), (64, 64, 0.60))
"""Rows, columns and efficiency of the output tiles that a matrix product may use."""
SPLITS = (1, 2, 4, 8, 16, 32)
"""Into how many slices the summed dimension may be cut."""
MIN_SPLIT_TERMS = 32
"""Terms that a slice must keep, when there is more than one."""


class CostModel(Protocol):
    """What an operator call costs. Deterministic: the same call always gets the same answer."""

    @property
    def source(self) -> Source:
        """Label of every latency that rests on this model."""

    def latency_s(self, call: Call) -> float:
        """Seconds that the call takes; 0 for views."""

    def workspace_bytes(self, call: Call) -> int:
        """Bytes that the call allocates and frees while it runs, on top of its outputs."""

    def transfer_s(self, nbytes: int) -> float:
        """Seconds that a Store or a Load of that many bytes takes, on its own stream."""

    def table_hash(self) -> str:
        """Identifies the costs that were used, for the plan file."""


def short_hash(text: str) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a text."""
    return sha256(text.encode()).hexdigest()[:16]


class AnalyticCost:
    """Costs on a simulated device, by the fixed formula of device model v1:

        t(kernel) = launch + max(t_matrix, bytes / (bandwidth * 0.85))
        t_matrix  = least over tiles and split-K s of max(2*B*M*N*K / (peak * eff * fill),
                                                         extra(s) / (bandwidth * 0.85))

    A call costs the sum over its kernels. A kernel with several products pays for each in turn; in a
    fused kernel (attention) the intermediate results stay on the chip, so its products are not cut along
    the summed dimension: partial sums would have to leave it. The bytes are counted once (ADR 4).
    """

    source: ClassVar[Source] = "simulated"

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self._bytes_per_s = device.bandwidth_bytes_per_s * BANDWIDTH_SHARE
        self._latency_s: dict[Call, float] = {}

    def latency_s(self, call: Call) -> float:
        """Seconds that the call takes, its launches included; 0 for views."""
        known = self._latency_s.get(call)
        if known is None:
            known = self._latency_s[call] = self.kernels_s(rule_for(call.op).kernels(call))
        return known

    def kernels_s(self, kernels: Sequence[Kernel]) -> float:
        """Seconds that kernels take, one after the other."""
        return sum(self.kernel_s(kernel) for kernel in kernels) if kernels else 0.0

    def kernel_s(self, kernel: Kernel) -> float:
        """Seconds of one launch."""
        matrix_s = sum(self.gemm_s(gemm, kernel.dtype, kernel.fused) for gemm in kernel.gemms)
        return self.device.launch_s + max(matrix_s, kernel.nbytes / self._bytes_per_s)

    def gemm_s(self, gemm: Gemm, dtype: DType, fused: bool = False) -> float:
        """t_matrix of a batch of matrix products, launch and operand bytes left out; see `fastest_gemm_s`."""
        peak = self.device.peak_flops(dtype)
        splits = SPLITS[:1] if fused else SPLITS
        return fastest_gemm_s(gemm, peak, self._bytes_per_s, self.device.sms, splits)

    def transfer_s(self, nbytes: int) -> float:
        """Seconds of a Store or a Load: bytes / link + 10 us."""
        return nbytes / self.device.link_bytes_per_s + self.device.transfer_launch_s

    def workspace_bytes(self, call: Call) -> int:
        """Bytes that follow from the operator's definition; a simulated device has no other."""
        return rule_for(call.op).workspace_bytes(call)

    def table_hash(self) -> str:
        """Hash of the model's version and of the device's constants: every cost follows from them."""
        return short_hash(repr((MODEL_VERSION, astuple(self.device))))


@lru_cache(maxsize=1 << 18)
def fastest_gemm_s(gemm: Gemm, peak: float, bytes_per_s: float, sms: int, splits: tuple[int, ...]) -> float:
    """The least time over tiles and splits of `batch` products [m,k] x [k,n].

    `peak` is in FLOP/s, `bytes_per_s` the bandwidth that is reached. Splitting the k terms in s fills more
    multiprocessors, but writes and reads s partial results of 4 bytes an element."""
    outputs = gemm.batch * gemm.m * gemm.n
    if not outputs * gemm.k:
        return 0.0
    least = float("inf")
    for tile_m, tile_n, efficiency in TILES:
        rows, columns = -(-gemm.m // tile_m), -(-gemm.n // tile_n)
        used = (gemm.m * gemm.n) / (rows * tile_m * columns * tile_n)
        rate = peak * efficiency * used
        for split in splits:
            if split > 1 and gemm.k < split * MIN_SPLIT_TERMS:
                break
            tiles = gemm.batch * rows * columns * split
            waves = -(-tiles // sms)
            busy_s = gemm.flops / (rate * (tiles / (waves * sms)))
            extra_s = split * outputs * 8 / bytes_per_s if split > 1 else 0.0
            least = min(least, max(busy_s, extra_s))
    return least
