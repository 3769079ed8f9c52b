"""PyTorch's layers and functions by the dozen, each in a step of its own, compared with eager bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stepping import Of, check, mean_loss
from torch import Tensor, nn

ROWS, IMAGES, SEQUENCES = (4, 8), (2, 4, 8, 8), (2, 5, 8)
INDICES = torch.tensor([1, 2, 3, 0])


def of_linear(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Of(lambda m, x: function(m.f(x)), f=nn.Linear(8, 8))


def of_convolution(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Of(lambda m, x: function(m.f(x)), f=nn.Conv2d(4, 4, 3, padding=1))


def activations() -> nn.Module:
    kinds = [
        nn.PReLU,
        nn.Softplus,
        nn.Hardswish,
        nn.ELU,
        nn.CELU,
        nn.SELU,
        nn.Mish,
        nn.LogSigmoid,
        nn.Softsign,
        nn.ReLU6,
    ]
    kinds += [nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.Hardtanh, nn.LeakyReLU, nn.Hardsigmoid]
    return nn.Sequential(nn.Linear(8, 8), *(kind() for kind in kinds), nn.GLU(), nn.Softmin(-1), nn.Threshold(0.1, 0.2))


def pads(y: Tensor) -> Tensor:
    return F.pad(F.pad(F.pad(y, (1, 1, 1, 1), "reflect"), (1, 1, 1, 1), "circular"), (1, 1, 1, 1), "replicate")


def reductions(y: Tensor) -> Tensor:
    plain = y.norm(dim=1) + y.norm(1, dim=1) + y.logsumexp(1) + y.std(1) + y.var(1) + y.prod(1) + y.amax(1)
    return plain + y.median(1).values + y.cumprod(1)[:, 0] + torch.linalg.svdvals(y).sum() + torch.cdist(y, y + 1).sum()


def rearrangements(y: Tensor) -> Tensor:
    turned = torch.roll(y, 1, 1) + y.flip(0) + y.tril() + y.triu(1) + torch.rot90(y, 2)
    return turned + y.repeat_interleave(2, 0)[:4] + y.repeat(2, 1)[:4] + torch.diag_embed(y[0])[:4]


def losses(y: Tensor) -> Tensor:
    ones, other = torch.ones(4, 8), y * 2
    pairs = F.huber_loss(y, ones) + F.l1_loss(y, other) + F.poisson_nll_loss(y, ones) + F.soft_margin_loss(y, ones)
    margins = F.triplet_margin_loss(y, y + 1, other) + F.margin_ranking_loss(y, other, ones)
    targets = torch.tensor([[1, 2, -1, 0, 0, 0, 0, 0]] * 4)
    multi = (
        F.multi_margin_loss(y, INDICES) + F.multilabel_margin_loss(y, targets) + F.multilabel_soft_margin_loss(y, ones)
    )
    weighted = F.cross_entropy(y, INDICES, weight=torch.arange(8.0), label_smoothing=0.1, reduction="sum")
    return pairs + margins + multi + weighted + F.cross_entropy(y, ones / 8)


def grouped_attention(m: Any, x: Tensor) -> Tensor:
    query, key = m.f(x).view(2, 5, 4, 2).transpose(1, 2), x.view(2, 5, 4, 2).transpose(1, 2)[:, :2]
    return F.scaled_dot_product_attention(query, key, key, enable_gqa=True)


def complex_numbers(m: Any, x: Tensor) -> Tensor:
    return torch.view_as_real(torch.complex(m.f(x), x) * torch.polar(x.abs(), x)).sum(-1)


def spectrum(m: Any, x: Tensor) -> Tensor:
    return torch.stft(x.flatten(1) * m.w, 8, window=torch.hann_window(8), return_complex=True).abs()


STEPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "activations": (activations, ROWS),
    "rms norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), ROWS),
    "bilinear": (lambda: Of(lambda m, x: m.b(x, x * 2), b=nn.Bilinear(8, 8, 3)), ROWS),
    "pixel shuffle": (lambda: of_convolution(lambda y: F.pixel_unshuffle(F.pixel_shuffle(y, 2), 2) + y), IMAGES),
    "unfold": (lambda: of_convolution(lambda y: F.fold(F.unfold(y, 3), (8, 8), 3)), IMAGES),
    "grid sample": (
        lambda: of_convolution(lambda y: F.grid_sample(y, torch.rand(2, 5, 5, 2) * 2 - 1, align_corners=False)),
        IMAGES,
    ),
    "local response norm": (lambda: of_convolution(nn.LocalResponseNorm(2)), IMAGES),
    "power pooling": (lambda: of_convolution(lambda y: F.lp_pool2d(y.abs() + 0.1, 2, 2)), IMAGES),
    "unpooling": (
        lambda: of_convolution(lambda y: F.max_unpool2d(*F.max_pool2d(y, 2, return_indices=True), 2)),
        IMAGES,
    ),
    "fractional pooling": (lambda: of_convolution(nn.FractionalMaxPool2d(2, output_size=3)), IMAGES),
    "adaptive pooling": (
        lambda: of_convolution(lambda y: F.adaptive_max_pool2d(y, 3) + F.adaptive_avg_pool2d(y, 3)),
        IMAGES,
    ),
    "pads": (lambda: of_convolution(pads), IMAGES),
    "same padding": (lambda: nn.Conv2d(4, 4, 3, padding="same"), IMAGES),
    "circular padding": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), IMAGES),
    "cubic": (lambda: of_convolution(lambda y: F.interpolate(y, scale_factor=1.5, mode="bicubic")), IMAGES),
    "area": (lambda: of_convolution(lambda y: F.interpolate(y, size=(4, 4), mode="area")), IMAGES),
    "pixel losses": (lambda: of_convolution(lambda y: F.cross_entropy(y, torch.ones(2, 8, 8).long())), IMAGES),
    "transformer": (lambda: Of(lambda m, x: m.t(x, x), t=nn.Transformer(8, 2, 1, 1, 16, batch_first=True)), SEQUENCES),
    "grouped attention": (lambda: Of(grouped_attention, f=nn.Linear(8, 8)), SEQUENCES),
    "rnn": (
        lambda: Of(lambda m, x: m.c(x)[0], c=nn.RNN(8, 8, 2, nonlinearity="relu", bidirectional=True, dropout=0.5)),
        SEQUENCES,
    ),
    "reductions": (lambda: of_linear(reductions), ROWS),
    "rearrangements": (lambda: of_linear(rearrangements), ROWS),
    "losses": (lambda: of_linear(losses), ROWS),
    "one hot": (lambda: of_linear(lambda y: y * F.one_hot(INDICES, 8)), ROWS),
    "buckets": (lambda: of_linear(lambda y: y * torch.bucketize(y.detach(), torch.tensor([0.0, 1.0]))), ROWS),
    "scatter reduce": (
        lambda: of_linear(lambda y: torch.zeros(4, 8).scatter_reduce(0, torch.zeros(4, 8).long(), y, "amax")),
        ROWS,
    ),
    "multinomial": (lambda: of_linear(lambda y: y * torch.multinomial(y.detach().softmax(-1), 8)), ROWS),
    "complex": (lambda: Of(complex_numbers, f=nn.Linear(8, 8)), ROWS),
    "complex parameter": (lambda: Of(lambda m, x: (x * m.w).abs(), w=nn.Parameter(torch.randn(8) * 1j)), ROWS),
    "spectrum": (lambda: Of(spectrum, w=nn.Parameter(torch.ones(40))), SEQUENCES),
    "hook on an activation": (lambda: of_linear(lambda y: tripled(y * 2)), ROWS),
}


def tripled(y: Tensor) -> Tensor:
    """A tensor whose gradient a hook multiplies."""
    y.register_hook(lambda gradient: gradient * 3)
    return y


@pytest.mark.parametrize("name", STEPS)
def test_step_equals_eager(name: str) -> None:
    build, shape = STEPS[name]
    check(build(), mean_loss, torch.randn(shape))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    check(nn.EmbeddingBag(10, 4, mode=mode), mean_loss, torch.tensor([[0, 1, 1], [5, 0, 9]]))


def test_gru_cell() -> None:
    """Eager works in place on slices, where some kernels round otherwise in the last bit."""
    check(Of(lambda m, x: m.c(x), c=nn.GRUCell(8, 8)), mean_loss, torch.randn(ROWS), atol=1e-7)
