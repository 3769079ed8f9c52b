"""MONAI's 2-D U-Net and U-Net++: three channels in, four classes out, pixel-wise cross entropy."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from typing import Any

from magis.zoo.workload import Builder, Sizes, Workload, ZooModel, with_toy

CLASSES = 4


def segmentation_loss(model: Any, batch: tuple[Any, Any]) -> Any:
    """Cross entropy of [batch, classes, image, image] against class indices [batch, image, image]."""
    import torch.nn.functional as F

    x, labels = batch
    out = model(x)
    return F.cross_entropy(out[-1] if isinstance(out, list | tuple) else out, labels)


def unet(sizes: Sizes, network: str, features: tuple[int, ...]) -> Workload:
    """`network` is BasicUNet or BasicUNetPlusPlus; five encoder widths and the last decoder's."""
    import torch
    from monai.networks import nets

    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # the constructor prints its widths
        net = getattr(nets, network)(spatial_dims=2, in_channels=3, out_channels=CLASSES, features=features)
    batch, side = sizes.batch, sizes.image
    x = torch.randn(batch, 3, side, side)
    return net, segmentation_loss, (x, torch.randint(0, CLASSES, (batch, side, side)))


def segmenter(name: str, family: str, description: str, sizes: Sizes, build: Builder) -> ZooModel:
    """An entry with the limits of four poolings followed by an instance norm over at least 2x2 pixels."""
    return ZooModel(
        name, family, description, sizes, build, requires="monai", least=Sizes(1, image=32), image_multiple=16
    )


_FULL, _TOY = (64, 128, 256, 512, 1024, 64), (16, 32, 64, 128, 128, 16)

MODELS: tuple[ZooModel, ...] = (
    *with_toy(
        segmenter(
            "monai-unet",
            "monai",
            "MONAI BasicUNet, 64 to 1024 channels, segmentation",
            Sizes(32, image=256),
            partial(unet, network="BasicUNet", features=_FULL),
        ),
        Sizes(4, image=128),
        partial(unet, network="BasicUNet", features=_TOY),
    ),
    *with_toy(
        segmenter(
            "monai-unetpp",
            "monai",
            "MONAI BasicUNetPlusPlus, 64 to 1024 channels, segmentation",
            Sizes(16, image=256),
            partial(unet, network="BasicUNetPlusPlus", features=_FULL),
        ),
        Sizes(4, image=64),
        partial(unet, network="BasicUNetPlusPlus", features=_TOY),
    ),
)
