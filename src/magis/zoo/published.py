"""The seven published networks and the larger `gpt3`, as in the evaluation of doi:10.1145/3620666.3651330.

Training step: forward, `mean((y - target)**2)`, backward, and every weight updated in place as soon as its
gradient exists.

In program order, everything live counted once per storage, the full sizes peak at 2.70 (resnet50), 12.98 (bert),
7.71 (vit), 8.58 (unet), 11.00 (unetpp), 28.86 (gptneo) and 55.27 GB (btlm), 1e9 bytes each: within 0.3 % of the
published baselines. Neither the order of U-Net++'s nodes nor the place of attention's scaling changes that.
"""

from __future__ import annotations

from functools import partial

from magis.zoo.workload import Sizes, Workload, ZooModel, with_toy

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


def _blocks(
    name: str, description: str, sizes: Sizes, net: tuple[int, int, int], dtype: str, fake_only: bool = False
) -> tuple[ZooModel, ...]:
    layers, hidden, heads = net
    full = ZooModel(
        name,
        "published",
        description,
        sizes,
        partial(transformer, layers=layers, hidden=hidden, heads=heads, dtype=dtype),
        fake_only=fake_only,
    )
    toy = partial(transformer, layers=2, hidden=128, heads=4, dtype=dtype)
    return with_toy(full, Sizes(8, seq=64), toy)


MODELS: tuple[ZooModel, ...] = (
    *with_toy(
        ZooModel(
            "resnet50",
            "published",
            "published ResNet-50: bottlenecks 3-4-6-3, no BatchNorm",
            Sizes(64, image=224),
            partial(resnet, depths=(3, 4, 6, 3), width=64, classes=1000),
        ),
        Sizes(8, image=64),
        partial(resnet, depths=(1, 2, 2, 1), width=16, classes=100),
    ),
    *_blocks("bert", "published BERT-base: 12 blocks of 768", Sizes(32, seq=512), (12, 768, 12), "float32"),
    *with_toy(
        ZooModel(
            "vit",
            "published",
            "published ViT-base/16: 12 blocks of 768 on 16x16 patches",
            Sizes(64, image=224),
            partial(vision_transformer, layers=12, patch=16, heads=12, classes=1000),
            image_multiple=16,
        ),
        Sizes(8, image=64),
        partial(vision_transformer, layers=2, patch=8, heads=3, classes=100),
        image_multiple=8,
    ),
    *with_toy(
        ZooModel(
            "unet",
            "published",
            "published U-Net: five levels of 64 to 1024 channels",
            Sizes(32, image=256),
            partial(unet, network="UNet", widths=_WIDTHS),
            image_multiple=16,
        ),
        Sizes(4, image=64),
        partial(unet, network="UNet", widths=_TOY_WIDTHS),
    ),
    *with_toy(
        ZooModel(
            "unetpp",
            "published",
            "published U-Net++: a triangle of nodes, 64 to 1024 channels",
            Sizes(16, image=256),
            partial(unet, network="UNetPlusPlus", widths=_WIDTHS),
            image_multiple=16,
        ),
        Sizes(4, image=64),
        partial(unet, network="UNetPlusPlus", widths=_TOY_WIDTHS),
    ),
    *_blocks("gptneo", "published GPT-Neo-1.3B: 24 blocks of 2048", Sizes(32, seq=512), (24, 2048, 16), "bfloat16"),
    *_blocks("btlm", "published BTLM-3B: 32 blocks of 2560", Sizes(32, seq=512), (32, 2560, 32), "bfloat16"),
    *_blocks(
        "gpt3",
        "GPT-3 of published blocks: 96 of 12288, fake only",
        Sizes(8, seq=2048),
        (96, 12288, 96),
        "bfloat16",
        fake_only=True,
    ),
)
