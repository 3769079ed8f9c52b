"""Factories for tests of the command line: one good, the others each with one mistake."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        return self.down(hidden)


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def tiny(batch: int = 16) -> Any:
    return Tiny(), square, torch.randn(batch, 8)


def updated() -> Any:
    return Tiny(), square, torch.randn(16, 8), "sgd-inplace"


def talking() -> Any:
    print("hello from the factory")
    return Tiny(), square, torch.randn(16, 8)


def only_real() -> Any:
    weight = torch.ones(8, 8)
    assert weight.sum().item() == 64
    return Tiny(), square, torch.randn(16, 8)


def broken() -> Any:
    raise RuntimeError("no weights\nfor you")


def ends() -> Any:
    raise SystemExit(7)


def vector_loss() -> Any:
    return Tiny(), lambda model, batch: model(batch), torch.randn(16, 8)


class Asking(Tiny):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.down(hidden) * hidden.sum().item()


def asking() -> Any:
    return Asking(), square, torch.randn(16, 8)


def pair() -> Any:
    return Tiny(), square


def no_module() -> Any:
    return "model", square, torch.randn(16, 8)


def no_batch() -> Any:
    return Tiny(), square, []


def empty_batch() -> Any:
    return Tiny(), square, torch.randn(0, 8)


def misfit() -> Any:
    return Tiny(), square, torch.randn(16, 9)
