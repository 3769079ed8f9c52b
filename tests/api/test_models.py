"""Models by reference: the zoo, factories, sizes, and what happens on the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from magis.api.models import resolve
from magis.errors import CaptureError, UsageError
from magis.ir.fingerprint import digest

FACTORIES = """
import torch
from torch import nn

def loss(model, batch):
    return model(batch).square().mean()

def sized(batch=4, *, seq=8):
    return nn.Linear(seq, 2), loss, torch.randn(batch, seq)

def anything(**sizes):
    return nn.Linear(3, 2), loss, torch.randn(sizes["image"], 3)

def only_real():
    if torch.empty(1).is_meta:
        raise RuntimeError("no meta here")
    return nn.Linear(3, 2), loss, torch.randn(4, 3)

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.weight = nn.Linear(3, 3), torch.ones(3)

    def forward(self, x):
        if self.weight.is_meta:
            raise RuntimeError("only real")
        return self.inner(x) * self.weight

def odd():
    return Odd(), loss, torch.randn(4, 3)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return str(path)


def test_fake_allocates_nothing_and_real_is_real() -> None:
    source = resolve("plain-mlp-toy")
    fake, real = source.build(fake=True), source.build(fake=False)
    assert all(parameter.is_meta for parameter in fake.model.parameters())
    assert not any(parameter.is_meta for parameter in real.model.parameters())


def test_building_twice_gives_the_same_weights(file: str) -> None:
    source = resolve(f"{file}:sized", seed=3)
    first, second = (source.build(fake=False) for _ in range(2))
    other = resolve(f"{file}:sized", seed=4).build(fake=False)
    weights = [next(workload.model.parameters()) for workload in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_generator_after_building_depends_on_the_seed_alone() -> None:
    draws = []
    for seed in (5, 5, 6):
        resolve("plain-mlp-toy", seed=seed).build(fake=False)
        draws.append(torch.rand(1).item())
    assert draws[0] == draws[1] != draws[2]


def test_sizes_reach_the_factory(file: str) -> None:
    workload = resolve(f"{file}:sized", {"batch": 6, "seq": 5, "image": None}).build(fake=True)
    assert workload.batch.shape == (6, 5)
    assert resolve(f"{file}:anything", {"image": 7}).build(fake=True).batch_size == 7


def test_sizes_that_do_not_fit(file: str) -> None:
    with pytest.raises(UsageError, match="takes no 'image' argument: leave --image out"):
        resolve(f"{file}:sized", {"image": 7}).build(fake=True)
    with pytest.raises(UsageError, match="each at least 1"):
        resolve(f"{file}:sized", {"batch": 0})
    with pytest.raises(UsageError, match="has no image size"):
        resolve("plain-mlp-toy", {"image": 7}).build(fake=True)


def test_a_factory_that_cannot_be_built_on_meta(file: str) -> None:
    assert not resolve(f"{file}:only_real").build(fake=True).batch.is_meta


def test_a_model_that_cannot_be_captured_on_meta(file: str) -> None:
    assert len(resolve(f"{file}:odd").capture().graph.nodes) > 3


def test_fake_and_real_are_the_same_step(file: str) -> None:
    from magis.capture.capture import capture

    for source in (resolve(f"{file}:sized"), resolve("vit-toy")):
        assert digest(source.capture().graph) == digest(capture(source.build(fake=False)).graph)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("hf-brt", r"no model 'hf-brt'; did you mean hf-bert.*`magis models` lists them"),
        ("qqq", r"no model 'qqq'; `magis models` lists them; a model of your own"),
        ("net.py", r"'net.py' is a file: name the factory in it as net.py:factory"),
    ],
)
def test_unknown_references(reference: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(reference)


def test_a_factory_error_names_it(file: str) -> None:
    Path(file).write_text("def make():\n    raise ValueError('nothing there')\n")
    with pytest.raises(UsageError, match="raised ValueError: nothing there"):
        resolve(f"{file}:make").build(fake=True)


@pytest.mark.parametrize(
    ("version", "fits"), [("2.10.2", False), ("2.11.0+cpu", True), ("2.14.9", True), ("3.0", False)]
)
def test_only_tested_versions_of_torch(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magis.api.pytorch.torch_version", lambda: version)
    if not fits:
        with pytest.raises(UsageError, match=r"is not supported: install torch>=2.11,<2.15, or set MAGIS_ANY_TORCH=1"):
            resolve("plain-mlp-toy").build(fake=True)
        monkeypatch.setenv("MAGIS_ANY_TORCH", "1")
    assert resolve("plain-mlp-toy").build(fake=True).batch_size == 64


def test_a_zoo_model_that_cannot_be_captured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise CaptureError("no")

    monkeypatch.setattr("magis.capture.capture.capture", refuse)
    with pytest.raises(CaptureError):
        resolve("plain-mlp-toy").capture()
