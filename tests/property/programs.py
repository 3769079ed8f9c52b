"""Random programs: steps over a pool of tensors, as data, so that a failing one is printed and shrinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from builder import Recorded, record

Step = tuple[str, int, int]

_UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "transpose": torch.t,
    "flatten": lambda x: x.reshape(1, -1),
    "tail": lambda x: x[:, 1:],
    "none": lambda x: x[:, :0],
    "broadcast": lambda x: x[:, :1].expand(-1, 5) if x.shape[1] else x,
    "rows": lambda x: x.sum(1, keepdim=True),
    "column": lambda x: x.sum(0, keepdim=True),
    "clone": torch.clone,
    "twice": lambda x: torch.cat([x, x], 1),
    "halves": lambda x: x.chunk(2, 1),
    "columns": lambda x: x.split([x.shape[1]], 1),
    "norm": lambda x: torch.native_layer_norm(x, x.shape[1:], None, None, 1e-5) if x.numel() else x,
    "largest": lambda x: x.max(1, keepdim=True)[0] if x.numel() else x,
    "dropout": lambda x: torch.native_dropout(x, 0.4, True),
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "where": lambda x, y: torch.where(x > y, x, y),
    "product": lambda x, y: x.mm(y.t()),
}

steps = st.lists(
    st.tuples(st.sampled_from([*_UNARY, *_BINARY]), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=14
)
shapes = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=3)


@st.composite
def programs(draw: st.DrawFn) -> Recorded:
    """A recorded random program; some results are handed back, some inputs are overwritten at the end, some
    inputs share a storage."""
    return build(
        draw(shapes),
        draw(steps),
        draw(st.lists(st.integers(0, 40), min_size=1, max_size=4)),
        draw(st.lists(st.integers(0, 40), max_size=2)),
        draw(st.booleans()),
    )


def build(
    sizes: list[tuple[int, int]], todo: list[Step], results: list[int], writes: list[int], share: bool
) -> Recorded:
    """The program of given choices."""
    torch.manual_seed(0)
    inputs = [torch.randn(size) for size in sizes]
    if share:
        inputs.append(inputs[0][:, 1:])

    def code(*given: torch.Tensor) -> list[torch.Tensor]:
        pool = list(given)
        for name, first, second in todo:
            _step(pool, name, pool[first % len(pool)], pool[second % len(pool)])
        made = pool[len(given) :] or [given[0].neg()]
        handed_back = [made[i % len(made)] for i in results]
        kept = {t.untyped_storage()._cdata for t in handed_back}
        for i in writes:
            target = given[i % len(given)]
            if target.untyped_storage()._cdata not in kept:
                kept.add(target.untyped_storage()._cdata)  # written once
                target.mul_(0.5)
        return handed_back

    return record(code, inputs)


def _step(pool: list[torch.Tensor], name: str, x: torch.Tensor, y: torch.Tensor) -> None:
    if name in _UNARY:
        made = _UNARY[name](x)
    elif name == "product":
        made = _BINARY[name](x, y) if x.shape[1] == y.shape[1] else x
    else:
        made = _BINARY[name](x, y) if x.shape == y.shape else x
    for tensor in made if isinstance(made, (tuple, list)) else [made]:
        if tensor.dtype == torch.float32 and tensor.numel() <= 400 and all(tensor is not t for t in pool):
            pool.append(tensor)
