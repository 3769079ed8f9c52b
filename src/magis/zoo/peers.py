"""Six workloads on which other memory methods were measured on a CPU: 1 to 6 s a step on two slow cores."""

from __future__ import annotations

from functools import partial
from typing import Any

from magis.zoo import huggingface as hf
from magis.zoo import monai_nets
from magis.zoo.workload import Sizes, ZooModel

_NARROW: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
_UNET, _UNETPP = (32, 64, 128, 256, 512, 32), (16, 32, 64, 128, 256, 16)
_TOY_UNET = (8, 16, 32, 64, 128, 8)

MODELS: tuple[ZooModel, ...] = (
    *hf.entries(
        ZooModel(
            "peer-bert",
            "peer",
            "BERT of 12 layers x 256, sequence classification",
            Sizes(8, seq=256),
            partial(hf.bert, **_NARROW),
        ),
        Sizes(8, seq=64),
        partial(hf.bert, **hf.TOY_BERT),
    ),
    *hf.entries(
        ZooModel(
            "peer-vit",
            "peer",
            "ViT of 12 layers x 256, image classification",
            Sizes(8, image=224),
            partial(hf.vit, **_NARROW),
            image_multiple=16,
        ),
        Sizes(4, image=64),
        partial(hf.vit, **hf.TOY_VIT),
        patch=8,
    ),
    *hf.entries(
        ZooModel("peer-resnet50", "peer", "ResNet-50 with BatchNorm, batch 8", Sizes(8, image=224), hf.resnet),
        Sizes(4, image=64),
        partial(hf.resnet, **hf.TOY_RESNET),
    ),
    *monai_nets.segmenters("peer-unet", "peer", "BasicUNet", Sizes(4, image=192), _UNET, 64, _TOY_UNET),
    *monai_nets.segmenters("peer-unetpp", "peer", "BasicUNetPlusPlus", Sizes(4, image=256), _UNETPP, 64, _TOY_UNET),
    *hf.entries(
        ZooModel(
            "peer-gpt2",
            "peer",
            "GPT-2 of 6 layers x 256, full vocabulary",
            Sizes(4, seq=256),
            partial(hf.gpt2, positions=256, n_embd=256, n_layer=6, n_head=4),
        ),
        Sizes(4, seq=64),
        partial(hf.gpt2, **hf.TOY_GPT2),
    ),
)
