"""The modules of the published networks (doi:10.1145/3620666.3651330): no biases, no BatchNorm, no dropout,
LayerNorm without affine part, ReLU everywhere, attention scores materialised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def squared_error(model: Any, batch: tuple[Any, Any]) -> Any:
    """`mean((y - target)**2)` for a batch `(x, target)`."""
    x, target = batch
    return ((model(x) - target) ** 2).mean()


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Any:
    """A convolution without bias that keeps the size at stride 1."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):  # type: ignore[misc]
    """Pre-norm transformer block on [batch, tokens, hidden]; scores are [batch, heads, tokens, tokens]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        batch, tokens, hidden = x.shape
        y = F.layer_norm(x, (hidden,))
        q, k, v = (
            project(y).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(hidden / self.heads)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, hidden)
        x = x + self.out(mixed)
        return x + self.down(F.relu(self.up(F.layer_norm(x, (hidden,)))))


class Transformer(nn.Module):  # type: ignore[misc]
    """Blocks alone, [batch, tokens, hidden] to the same: no embedding, no causal mask, no head."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))

    def forward(self, x: Any) -> Any:
        return self.blocks(x)


class VisionTransformer(nn.Module):  # type: ignore[misc]
    """[batch, 3, side, side] cut into patches whose pixels are the hidden state, blocks, a projection.

    Every token is projected: the output is [batch, (side / patch)**2, classes].
    """

    def __init__(self, layers: int, patch: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patch = patch
        hidden = 3 * patch * patch
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))
        self.head = nn.Linear(hidden, classes, bias=False)

    def forward(self, x: Any) -> Any:
        batch, channels, side, _ = x.shape
        n = side // self.patch
        x = x.reshape(batch, channels, n, self.patch, n, self.patch).permute(0, 2, 4, 1, 3, 5)
        return self.head(self.blocks(x.reshape(batch, n * n, -1)))


class Bottleneck(nn.Module):  # type: ignore[misc]
    """1x1, 3x3 with the stride, 1x1 to four times the width; ReLU after the first two and after the sum."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = conv(inputs, width, 1)
        self.spatial = conv(width, width, 3, stride)
        self.expand = conv(width, 4 * width, 1)
        changes = stride != 1 or inputs != 4 * width
        self.shortcut = conv(inputs, 4 * width, 1, stride) if changes else nn.Identity()

    def forward(self, x: Any) -> Any:
        y = F.relu(self.reduce(x))
        y = self.expand(F.relu(self.spatial(y)))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):  # type: ignore[misc]
    """[batch, 3, side, side] to [batch, classes, 1, 1]; bottlenecks of `width` doubling at every stage."""

    def __init__(self, depths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = conv(3, width, 7, 2)
        blocks, inputs = [], width
        for stage, depth in enumerate(depths):
            inner = width * 2**stage
            for i in range(depth):
                blocks.append(Bottleneck(inputs, inner, 2 if stage and not i else 1))
                inputs = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = conv(inputs, classes, 1)

    def forward(self, x: Any) -> Any:
        x = F.avg_pool2d(F.relu(self.stem(x)), 3, 2, padding=1)
        return self.head(self.blocks(x).mean((2, 3), keepdim=True))


class TwoConv(nn.Module):  # type: ignore[misc]
    """Two 3x3 convolutions, each followed by ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = conv(inputs, outputs, 3)
        self.second = conv(outputs, outputs, 3)

    def forward(self, x: Any) -> Any:
        return F.relu(self.second(F.relu(self.first(x))))


class UNet(nn.Module):  # type: ignore[misc]
    """[batch, 1, side, side] to the same: two convolutions a level, nearest upsampling, skips joined."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(TwoConv, (1, *widths), widths))
        pairs = zip(widths[-2::-1], widths[:0:-1], strict=True)
        self.up = nn.ModuleList(TwoConv(skip + below, skip) for skip, below in pairs)
        self.mask = conv(widths[0], 2, 3)
        self.head = conv(2, 1, 1)

    def forward(self, x: Any) -> Any:
        skips = []
        for level, block in enumerate(self.down):
            x = block(F.avg_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat((skips.pop(), F.interpolate(x, scale_factor=2, mode="nearest")), 1))
        return torch.sigmoid(self.head(F.relu(self.mask(x))))


class UNetPlusPlus(nn.Module):  # type: ignore[misc]
    """[batch, 1, side, side] to the same; one 3x3 convolution and ReLU in each node of the triangle.

    Node (i, j) of level i reads the upsampled node (i + 1, j - 1) and nodes (i, 0) to (i, j - 1).
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.levels = len(widths)
        self.nodes = nn.ModuleDict()
        for level, width in enumerate(widths):
            self.nodes[f"{level}_0"] = conv(widths[level - 1] if level else 1, width, 3)
            for j in range(1, self.levels - level):
                self.nodes[f"{level}_{j}"] = conv(widths[level + 1] + j * width, width, 3)
        self.head = conv(widths[0], 1, 1)

    def forward(self, x: Any) -> Any:
        rows: list[list[Any]] = []
        for diagonal in range(self.levels):
            inputs = F.avg_pool2d(rows[-1][0], 2) if diagonal else x
            rows.append([F.relu(self.nodes[f"{diagonal}_0"](inputs))])
            for level in range(diagonal - 1, -1, -1):
                below = F.interpolate(rows[level + 1][-1], scale_factor=2, mode="nearest")
                joined = torch.cat((*rows[level], below), 1)
                rows[level].append(F.relu(self.nodes[f"{level}_{diagonal - level}"](joined)))
        return torch.sigmoid(self.head(rows[0][-1]))
