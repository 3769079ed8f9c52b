"""MONAI's 2-D U-Net and U-Net++: three channels in, four classes out, pixel-wise cross entropy."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from typing import Any

from magis.zoo.workload import Sizes, Workload, ZooModel, with_toy

CLASSES = 4
Features = tuple[int, int, int, int, int, int]


def segmentation_loss(model: Any, batch: tuple[Any, Any]) -> Any:
    """Cross entropy of [batch, classes, image, image] against class indices [batch, image, image]."""
    import torch.nn.functional as F

    x, labels = batch
    out = model(x)
    return F.cross_entropy(out[-1] if isinstance(out, list | tuple) else out, labels)


def unet(sizes: Sizes, network: str, features: Features) -> Workload:
    """`network` is BasicUNet or BasicUNetPlusPlus; five encoder widths and the last decoder's."""
    import torch
    from monai.networks import nets

    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # the constructor prints its widths
        net = getattr(nets, network)(spatial_dims=2, in_channels=3, out_channels=CLASSES, features=features)
    batch, side = sizes.batch, sizes.image
    x = torch.randn(batch, 3, side, side)
    return net, segmentation_loss, (x, torch.randint(0, CLASSES, (batch, side, side)))


def segmenters(
    name: str,
    family: str,
    network: str,
    sizes: Sizes,
    features: Features,
    toy_image: int,
    toy: Features,
    note: str = "",
) -> tuple[ZooModel, ZooModel]:
    """A network and its toy of batch 4, with the limits of four poolings followed by an instance norm over at least
    2x2 pixels; `note` ends the description."""
    full = ZooModel(
        name,
        family,
        f"MONAI {network}, {features[0]} to {features[4]} channels{note}",
        sizes,
        partial(unet, network=network, features=features),
        requires="monai",
        least=Sizes(1, image=32),
        image_multiple=16,
    )
    return with_toy(full, Sizes(4, image=toy_image), partial(unet, network=network, features=toy))


_FULL, _TOY = (64, 128, 256, 512, 1024, 64), (16, 32, 64, 128, 128, 16)
_NOTE = ", segmentation"

MODELS: tuple[ZooModel, ...] = (
    *segmenters("monai-unet", "monai", "BasicUNet", Sizes(32, image=256), _FULL, 128, _TOY, _NOTE),
    *segmenters("monai-unetpp", "monai", "BasicUNetPlusPlus", Sizes(16, image=256), _FULL, 64, _TOY, _NOTE),
)
