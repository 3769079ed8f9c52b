"""The zoo: names, sizes, messages, one real step of every toy, every full size without memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from magis import zoo
from magis.errors import UsageError

FULL = {
    "published": ("resnet50", "bert", "vit", "unet", "unetpp", "gptneo", "btlm", "gpt3"),
    "hf": (
        *("hf-bert", "hf-bert-dropout", "hf-bert-mlm", "hf-vit", "hf-resnet50"),
        *("hf-gpt2", "hf-gptneo", "hf-llama", "hf-qwen2"),
    ),
    "monai": ("monai-unet", "monai-unetpp"),
    "peer": ("peer-bert", "peer-vit", "peer-resnet50", "peer-unet", "peer-unetpp", "peer-gpt2"),
    "plain": ("plain-mlp",),
}
FULL_NAMES = [name for names in FULL.values() for name in names]
WIDTHS = (64, 128, 256, 512, 1024)
UNET_CONVS = (
    [(1, 64), *pairwise(WIDTHS), *((w, w) for w in WIDTHS)]
    + [(low + high, low) for low, high in pairwise(WIDTHS)]
    + [(w, w) for w in WIDTHS[:-1]]
    + [(64, 2)]
)
UNETPP_CONVS = [(1, 64), *pairwise(WIDTHS)] + [
    (WIDTHS[i + 1] + j * WIDTHS[i], WIDTHS[i]) for i in range(4) for j in range(1, 5 - i)
]

# Derived from the published shapes, and for Hugging Face the sizes of the models of that name.
PARAMETERS = {
    "bert": 12 * 12 * 768**2,
    "vit": 12 * 12 * 768**2 + 768 * 1000,
    "gptneo": 24 * 12 * 2048**2,
    "btlm": 32 * 12 * 2560**2,
    "gpt3": 96 * 12 * 12288**2,
    "resnet50": 25_557_032 - 53_120 - 1000,  # the usual one less BatchNorm and the last bias
    "unet": sum(9 * a * b for a, b in UNET_CONVS) + 2,
    "unetpp": sum(9 * a * b for a, b in UNETPP_CONVS) + 64,
    "hf-bert": 109_483_778,
    "hf-bert-dropout": 109_483_778,
    "hf-bert-mlm": 109_514_298,
    "hf-vit": 85_798_656 + 768 * 10 + 10,
    "hf-gpt2": 124_439_808,
    "hf-gptneo": 1_315_575_808,
    "hf-llama": 1_235_814_400,
    "hf-qwen2": 494_032_768,
    "hf-resnet50": 25_557_032 - 2048 * 1000 - 1000 + 2048 * 10 + 10,
}


def need(name: str) -> None:
    package = zoo.model(name).requires
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{name} needs {package}, which is not installed")


def on_meta(name: str, **sizes: int) -> tuple[Any, ...]:
    need(name)
    with torch.device("meta"):
        return zoo.build(name, **sizes)


def loss_of(workload: tuple[Any, ...]) -> Any:
    model, loss_fn, batch = workload[:3]
    return loss_fn(model, batch)


def test_names_are_complete() -> None:
    wanted = [each for name in FULL_NAMES for each in (name, f"{name}-toy")]
    assert sorted(zoo.names()) == sorted(wanted)


@pytest.mark.parametrize("family", FULL)
def test_families(family: str) -> None:
    for name in FULL[family]:
        for entry in (zoo.model(name), zoo.model(f"{name}-toy")):
            assert entry.family == family
            assert "\n" not in entry.description
            assert entry.fake_only is (entry.name == "gpt3")
            assert entry.sizes.batch % 4 == 0


def test_importing_the_zoo_imports_nothing_heavy() -> None:
    code = "import sys, magis.zoo; print({'torch', 'transformers', 'monai'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", [name for name in zoo.names() if name.endswith("-toy")])
def test_toy_step(name: str) -> None:
    need(name)
    workload = zoo.build(name)
    loss = loss_of(workload)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    gradients = [p.grad for p in workload[0].parameters() if p.grad is not None]
    assert gradients
    assert all(torch.isfinite(g).all() for g in gradients)
    assert any(g.any() for g in gradients)
    published = zoo.model(name).family == "published"
    assert workload[3:] == (("sgd-inplace",) if published else ())


@pytest.mark.parametrize("name", ["bert-toy", "plain-mlp-toy", "unet-toy"])
def test_building_is_deterministic(name: str) -> None:
    first, second = loss_of(zoo.build(name)), loss_of(zoo.build(name))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", FULL_NAMES)
def test_full_size_on_meta(name: str) -> None:
    model, _, batch, *_ = on_meta(name)
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
    assert all(t.is_meta for t in tensors)
    assert all(t.shape[0] == zoo.model(name).sizes.batch for t in tree_leaves(batch))
    if name in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", [n for n in zoo.names() if "gptneo" in n or "btlm" in n or "llama" in n])
def test_half_precision(name: str) -> None:
    model, *_ = on_meta(name)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", FULL_NAMES)
def test_no_dropout_but_where_named(name: str) -> None:
    model, *_ = on_meta(name)
    rates = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}
    rates |= {m.attention_dropout for m in model.modules() if hasattr(m, "attention_dropout")}
    assert rates <= ({0.1} if name == "hf-bert-dropout" else {0.0})


@pytest.mark.parametrize("name", ["hf-bert-mlm", "hf-gpt2", "hf-gptneo", "hf-llama", "hf-qwen2", "peer-gpt2"])
def test_language_models(name: str) -> None:
    model, _, batch, *_ = on_meta(name)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert batch["labels"] is not batch["input_ids"]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bert-toy", {"batch": 2, "seq": 7}),
        ("vit-toy", {"batch": 1, "image": 32}),
        ("resnet50-toy", {"batch": 1, "image": 33}),
        ("unet-toy", {"batch": 1, "image": 48}),
        ("unetpp-toy", {"batch": 2, "image": 32}),
        ("gptneo-toy", {"batch": 1, "seq": 1}),
        ("hf-bert-toy", {"batch": 1, "seq": 600}),
        ("hf-vit-toy", {"batch": 2, "image": 32}),
        ("hf-gpt2-toy", {"batch": 1, "seq": 1100}),
        ("hf-gptneo-toy", {"batch": 1, "seq": 2}),
        ("hf-llama-toy", {"batch": 1, "seq": 96}),
        ("hf-qwen2-toy", {"batch": 2, "seq": 32}),
        ("hf-resnet50-toy", {"batch": 2, "image": 32}),
        ("monai-unet-toy", {"batch": 1, "image": 32}),
        ("monai-unetpp-toy", {"batch": 1, "image": 32}),
        ("peer-gpt2-toy", {"batch": 1, "seq": 100}),
        ("plain-mlp-toy", {"batch": 2}),
    ],
)
def test_other_sizes_run(name: str, sizes: dict[str, int]) -> None:
    need(name)
    workload = zoo.build(name, **sizes)
    assert all(t.shape[0] == sizes["batch"] for t in tree_leaves(workload[2]))
    loss_of(workload).backward()


@pytest.mark.parametrize("name", ["hf-bert", "hf-gpt2", "hf-gptneo", "peer-gpt2"])
def test_positions_grow_with_the_sequence(name: str) -> None:
    model, *_ = on_meta(name, batch=1, seq=4096)
    assert model.config.max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("hf-brt", {}, "unknown model 'hf-brt': did you mean hf-bert or"),
        ("zzz", {}, "choose one of resnet50, "),
        ("resnet50", {"seq": 8}, "resnet50 has no seq size: leave --seq out"),
        ("hf-gpt2", {"image": 8}, "hf-gpt2 has no image size: leave --image out"),
        ("plain-mlp", {"seq": 8}, "plain-mlp has no seq size"),
        ("bert", {"batch": 0}, "--batch 0 is too small for bert: give at least 1"),
        ("bert", {"seq": -1}, "--seq -1 is too small"),
        ("hf-gpt2", {"seq": 1}, "give at least 2"),
        ("vit", {"image": 100}, "--image 100 does not fit vit: give a multiple of 16"),
        ("unet", {"image": 24}, "give a multiple of 16"),
        ("monai-unet", {"image": 16}, "give at least 32"),
        ("hf-resnet50-toy", {"batch": 1, "image": 32}, "give --batch 2 or --image above 32"),
        ("gpt3", {}, "take gpt3-toy"),
    ],
)
def test_usage_errors(name: str, sizes: dict[str, int], message: str) -> None:
    if name in zoo.names():
        need(name)
    with pytest.raises(UsageError) as caught:
        zoo.build(name, **sizes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "package"), [("hf-bert", "transformers"), ("monai-unet", "monai")])
def test_missing_package(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError) as caught:
        zoo.build(name)
    assert str(caught.value) == f"model {name} needs {package}: pip install 'magis[zoo]'"


def test_building_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("monai-unet-toy", "hf-gpt2-toy"):
        need(name)
        loss_of(zoo.build(name))
    assert capfd.readouterr() == ("", "")
