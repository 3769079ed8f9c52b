"""Ready-made workloads by name: the published networks, Hugging Face and MONAI models, each with a toy."""

from magis.zoo.registry import Sizes, ZooModel, build, model, names

__all__ = ["Sizes", "ZooModel", "build", "model", "names"]
