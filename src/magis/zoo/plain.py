"""A small perceptron that needs nothing but torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from magis.zoo.workload import Sizes, Workload, ZooModel, with_toy


def mean_squared_error(model: Any, batch: tuple[Any, Any]) -> Any:
    """`F.mse_loss` for a batch `(x, target)`."""
    import torch.nn.functional as F

    x, target = batch
    return F.mse_loss(model(x), target)


def mlp(sizes: Sizes, width: int, layers: int) -> Workload:
    """[batch, width] to the same: linear with bias, BatchNorm, GELU and dropout 0 in every layer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    parts: list[Any] = []
    for _ in range(layers):
        parts += [nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.GELU(), nn.Dropout(0.0)]
        parts += [nn.Linear(4 * width, width)]
    shape = (sizes.batch, width)
    return nn.Sequential(*parts), mean_squared_error, (torch.randn(shape), torch.randn(shape))


MODELS: tuple[ZooModel, ...] = with_toy(
    ZooModel(
        "plain-mlp",
        "plain",
        "perceptron with bias, GELU and BatchNorm; needs only torch",
        Sizes(1024),
        partial(mlp, width=256, layers=4),
        least=Sizes(2),
    ),
    Sizes(64),
    partial(mlp, width=64, layers=2),
)
