"""Swapping: copies to host memory and back, on links of their own. No kernel runs and no time passes for them where
operators run; see `magis.sim.links` for when they are done (paper section 5.2; ADR 10).

`swap.store(x)` stands in an order where the copy has to be complete: it began right after x was made, and x may go
from then on. `swap.load(h)` stands where the copy back begins; what reads its result waits for the end of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from magis.ir.graph import HOST, Call, TensorSpec
from magis.ops.arguments import output_at
from magis.ops.loop import Loop, elementwise
from magis.ops.rule import Kernel, OpRule

STORE, LOAD = "swap.store", "swap.load"


class Transfer(OpRule):
    """A copy of a whole tensor, in the same layout."""

    recomputable = False

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        return ()

    def loops(self, call: Call) -> Iterable[Loop]:
        yield from elementwise([call.inputs[0].shape], [output_at(call, 0).shape])


class Store(Transfer):
    """To the host."""

    ops = (STORE,)

    def types(self, call: Call) -> tuple[TensorSpec | None, ...]:
        return (stored(call.inputs[0]),)


class Load(Transfer):
    """Back to the device of the result."""

    ops = (LOAD,)

    def types(self, call: Call) -> tuple[TensorSpec | None, ...]:
        return (replace(stored(call.inputs[0]), device=output_at(call, 0).device),)


def stored(spec: TensorSpec) -> TensorSpec:
    """The type of a tensor's copy in host memory."""
    return replace(spec, storage_bytes=spec.nbytes, alias_of=None, writes=False, offset=0, device=HOST)
