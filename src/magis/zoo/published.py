"""The seven published networks and the larger `gpt3`, as in the evaluation of doi:10.1145/3620666.3651330.

Training step: forward, `mean((y - target)**2)`, backward, and every weight updated in place as soon as its
gradient exists.

In program order, everything live counted once per storage, the full sizes peak at 2.70 (resnet50), 12.98 (bert),
7.71 (vit), 8.58 (unet), 11.00 (unetpp), 28.86 (gptneo) and 55.27 GB (btlm), 1e9 bytes each: within 0.3 % of the
published baselines. Neither the order of U-Net++'s nodes nor the place of attention's scaling changes that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from magis.zoo.workload import Builder, Sizes, Workload, ZooModel, with_toy

UPDATE = "sgd-inplace"


def transformer(sizes: Sizes, layers: int, hidden: int, heads: int, dtype: str = "float32") -> Workload:
    """Transformer blocks on hidden states [batch, seq, hidden]."""
    import torch

    from magis.zoo import published_nets as nets

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    net = nets.Transformer(layers, hidden, heads).to(kind)
    shape = (sizes.batch, sizes.seq, hidden)
    batch = (torch.randn(shape, dtype=kind), torch.randn(shape, dtype=kind))
    return net, nets.squared_error, batch, UPDATE


def vision_transformer(sizes: Sizes, layers: int, patch: int, heads: int, classes: int) -> Workload:
    """Images [batch, 3, image, image], target [batch, tokens, classes]."""
    import torch

    from magis.zoo import published_nets as nets

    torch.manual_seed(0)
    side = sizes.image or patch
    net = nets.VisionTransformer(layers, patch, heads, classes)
    x = torch.randn(sizes.batch, 3, side, side)
    return net, nets.squared_error, (x, torch.randn(sizes.batch, (side // patch) ** 2, classes)), UPDATE


def resnet(sizes: Sizes, depths: tuple[int, ...], width: int, classes: int) -> Workload:
    """Images [batch, 3, image, image], target [batch, classes, 1, 1]."""
    import torch

    from magis.zoo import published_nets as nets

    torch.manual_seed(0)
    net = nets.ResNet(depths, width, classes)
    x = torch.randn(sizes.batch, 3, sizes.image, sizes.image)
    return net, nets.squared_error, (x, torch.randn(sizes.batch, classes, 1, 1)), UPDATE


def unet(sizes: Sizes, network: str, widths: tuple[int, ...]) -> Workload:
    """Images and targets [batch, 1, image, image]; `network` is UNet or UNetPlusPlus."""
    import torch

    from magis.zoo import published_nets as nets

    torch.manual_seed(0)
    net = getattr(nets, network)(widths)
    shape = (sizes.batch, 1, sizes.image, sizes.image)
    return net, nets.squared_error, (torch.randn(shape), torch.rand(shape)), UPDATE


_WIDTHS, _TOY_WIDTHS = (64, 128, 256, 512, 1024), (8, 16, 32, 64, 128)


def _published(
    name: str,
    description: str,
    sizes: Sizes,
    build: Builder,
    toy_sizes: Sizes,
    toy: Builder,
    toy_multiple: int | None = None,
    **limits: Any,
) -> tuple[ZooModel, ZooModel]:
    full = ZooModel(name, "published", description, sizes, build, **limits)
    return with_toy(full, toy_sizes, toy, image_multiple=toy_multiple or full.image_multiple)


def _blocks(
    name: str, description: str, sizes: Sizes, net: tuple[int, int, int], dtype: str, **limits: Any
) -> tuple[ZooModel, ZooModel]:
    layers, hidden, heads = net
    full = partial(transformer, layers=layers, hidden=hidden, heads=heads, dtype=dtype)
    toy = partial(transformer, layers=2, hidden=128, heads=4, dtype=dtype)
    return _published(name, description, sizes, full, Sizes(8, seq=64), toy, **limits)


def _unet(name: str, description: str, batch: int, network: str) -> tuple[ZooModel, ZooModel]:
    full, toy = (partial(unet, network=network, widths=widths) for widths in (_WIDTHS, _TOY_WIDTHS))
    return _published(name, description, Sizes(batch, image=256), full, Sizes(4, image=64), toy, image_multiple=16)


_TEXT, _IMAGES, _TOY_IMAGES = Sizes(32, seq=512), Sizes(64, image=224), Sizes(8, image=64)

MODELS: tuple[ZooModel, ...] = (
    *_published(
        "resnet50",
        "published ResNet-50: bottlenecks 3-4-6-3, no BatchNorm",
        _IMAGES,
        partial(resnet, depths=(3, 4, 6, 3), width=64, classes=1000),
        _TOY_IMAGES,
        partial(resnet, depths=(1, 2, 2, 1), width=16, classes=100),
    ),
    *_blocks("bert", "published BERT-base: 12 blocks of 768", _TEXT, (12, 768, 12), "float32"),
    *_published(
        "vit",
        "published ViT-base/16: 12 blocks of 768 on 16x16 patches",
        _IMAGES,
        partial(vision_transformer, layers=12, patch=16, heads=12, classes=1000),
        _TOY_IMAGES,
        partial(vision_transformer, layers=2, patch=8, heads=3, classes=100),
        image_multiple=16,
        toy_multiple=8,
    ),
    *_unet("unet", "published U-Net: five levels of 64 to 1024 channels", 32, "UNet"),
    *_unet("unetpp", "published U-Net++: a triangle of nodes, 64 to 1024 channels", 16, "UNetPlusPlus"),
    *_blocks("gptneo", "published GPT-Neo-1.3B: 24 blocks of 2048", _TEXT, (24, 2048, 16), "bfloat16"),
    *_blocks("btlm", "published BTLM-3B: 32 blocks of 2560", _TEXT, (32, 2560, 32), "bfloat16"),
    *_blocks(
        "gpt3",
        "GPT-3 of published blocks: 96 of 12288, fake only",
        Sizes(8, seq=2048),
        (96, 12288, 96),
        "bfloat16",
        fake_only=True,
    ),
)
