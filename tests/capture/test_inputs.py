"""Batches of every structure, inference calls, and what they hand back."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from stepping import Of, check, eager, mean_loss
from torch import Tensor, nn

X = torch.randn(4, 8)


@dataclass
class Sample:
    """A batch as a dataclass, with something that is no tensor."""

    x: Tensor
    scale: float
    target: Tensor | None = None


class Pair(NamedTuple):
    """A batch as a named tuple."""

    x: Tensor
    y: Tensor


def names(graph: Any) -> list[str]:
    return [node.name for node in graph.inputs if node.kind == "batch"]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def test_tensor() -> None:
    captured = check(linear(), mean_loss, X)
    assert names(captured.graph) == ["batch"]


def test_tuple_with_literals() -> None:
    captured = check(linear(), lambda m, b: (m(b[0]) * b[1] - b[3][0]).square().mean(), (X, 2, None, [X + 1, "mean"]))
    assert names(captured.graph) == ["0", "3.0"]


def test_nested_dict() -> None:
    def loss(m: Any, b: Any) -> Tensor:
        return F.cross_entropy(m(b["inputs"]["x"]), b["labels"], reduction=b["reduction"])

    batch = {"inputs": {"x": X, "mask": None}, "labels": torch.arange(4), "reduction": "sum"}
    assert sorted(names(check(linear(), loss, batch).graph)) == ["inputs.x", "labels"]


def test_dataclass() -> None:
    captured = check(linear(), lambda m, b: (m(b.x) * b.scale).square().mean(), Sample(X, 0.5))
    assert names(captured.graph) == ["x"]


def test_named_tuple() -> None:
    captured = check(linear(), lambda m, b: F.mse_loss(m(b.x), b.y), Pair(X, X + 1))
    assert len(names(captured.graph)) == 2


def batch_encoding() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding({"x": X, "labels": torch.arange(4)})


class Listing(Mapping[str, Any]):
    """A mapping that keeps its items elsewhere than in `data`, and gives them as attributes too."""

    def __init__(self, **items: Any) -> None:
        self.items_by_name = items

    def __getitem__(self, key: str) -> Any:
        return self.items_by_name[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key == "items_by_name":
            raise AttributeError(key)
        return self.items_by_name[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_name)

    def __len__(self) -> int:
        return len(self.items_by_name)


class Slotted(UserDict[str, Any]):
    """A UserDict without `data` among its attributes."""

    __slots__ = ("data",)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key == "data":
            raise AttributeError(key)
        return self.data[key]


class Attributes(dict[str, Any]):
    """The well-known dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


MAPPINGS: dict[str, Callable[[], Any]] = {
    "BatchEncoding": batch_encoding,
    "Mapping": lambda: Listing(x=X, labels=torch.arange(4)),
    "UserDict without data": lambda: Slotted({"x": X, "labels": torch.arange(4)}),
    "dict": lambda: Attributes(x=X, labels=torch.arange(4)),
}


def by_key(m: Any, b: Any) -> Tensor:
    return F.cross_entropy(m(b["x"]), b["labels"])


def by_attribute(m: Any, b: Any) -> Tensor:
    return F.cross_entropy(m(b.x), b.labels)


@pytest.mark.parametrize("loss", [by_key, by_attribute])
@pytest.mark.parametrize("make", MAPPINGS.values(), ids=MAPPINGS.keys())
def test_mappings(make: Callable[[], Any], loss: Any) -> None:
    batch = make()
    kinds = set()

    def seen(m: Any, b: Any) -> Tensor:
        kinds.add(type(b))
        return loss(m, b)

    assert sorted(names(check(linear(), seen, batch).graph)) == ["labels", "x"]
    assert kinds == {type(batch)}
    assert batch["x"] is batch.x is X


@pytest.mark.parametrize("loss", [by_key, by_attribute])
@pytest.mark.parametrize("make", MAPPINGS.values(), ids=MAPPINGS.keys())
def test_mappings_inside_others(make: Callable[[], Any], loss: Any) -> None:
    captured = check(linear(), lambda m, b: loss(m, b[0]) + loss(m, b[1]["left"]), (make(), {"left": make(), "n": 1}))
    assert sorted(names(captured.graph)) == ["0.labels", "0.x", "1.left.labels"]


@pytest.mark.parametrize("make", MAPPINGS.values(), ids=MAPPINGS.keys())
def test_inference_of_mappings(make: Callable[[], Any]) -> None:
    model = Of(lambda m, x, labels: Listing(both=m.f(x) + labels[:, None]), f=nn.Linear(8, 8))
    assert check(model, None, make()).graph.output_names == ("output:both",)


def test_a_tokenizers_encodings() -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    batch = transformers.PreTrainedTokenizerFast(tokenizer_object=words)(["a b", "b c"], return_tensors="pt")
    model = Of(lambda m, i: m.table(i), table=nn.Embedding(3, 4))
    captured = check(model, lambda m, b: (m(b.input_ids) * b["attention_mask"][..., None]).mean(), batch)
    assert {"input_ids", "attention_mask"} <= set(names(captured.graph))


def test_same_tensor_twice() -> None:
    ids = torch.randint(8, (4, 3))
    model = Of(lambda m, i: m.head(m.table(i)), table=nn.Embedding(8, 4), head=nn.Linear(4, 8))
    captured = check(model, lambda m, b: F.cross_entropy(m(b["ids"]).mT, b["labels"]), {"ids": ids, "labels": ids})
    assert names(captured.graph) == ["ids"]


def test_views_of_one_storage() -> None:
    tokens = torch.randint(8, (4, 6))
    model = Of(lambda m, i: m.head(m.table(i)), table=nn.Embedding(8, 4), head=nn.Linear(4, 8))
    captured = check(model, lambda m, b: F.cross_entropy(m(b[0]).mT, b[1]), (tokens[:, :-1], tokens[:, 1:]))
    owned = [captured.graph.spec(captured.graph.root(v)).storage_bytes for v in captured.graph.outputs]
    first, second = (n for n in captured.graph.inputs if n.kind == "batch")
    assert second.outputs[0].storage_bytes == 0 and first.outputs[0].storage_bytes == tokens.nbytes and owned


def test_gradient_of_the_batch() -> None:
    captured = check(linear(), mean_loss, torch.randn(4, 8, requires_grad=True))
    assert "grad:batch" in captured.graph.output_names


def test_scalar_and_empty_tensors() -> None:
    batch = (X, torch.tensor(2.0), torch.zeros(0, 8))
    check(linear(), lambda m, b: (m(b[0]) * b[1]).square().mean() + b[2].sum(), batch)


def test_unused_batch_tensor() -> None:
    captured = check(linear(), lambda m, b: m(b[0]).square().mean(), (X, torch.zeros(100)))
    assert names(captured.graph) == ["0", "1"]


def test_loss_of_shape_one() -> None:
    captured = check(linear(), lambda m, b: m(b).square().mean(0).mean().view(1), X)
    assert captured.graph.spec(captured.graph.outputs[0]).shape == (1,)


# Inference ------------------------------------------------------------------------------------------------------


def test_inference_tensor() -> None:
    captured = check(linear().eval(), None, X)
    assert captured.graph.output_names == ("output:batch",)


def test_inference_tuple_batch_and_outputs() -> None:
    model = Of(lambda m, x, y: (m.f(x), {"both": [x + y, None]}, 3), f=nn.Linear(8, 8))
    captured = check(model, None, (X, X + 1))
    assert captured.graph.output_names == ("output:0", "output:1.both.0")


def test_inference_keywords() -> None:
    model = Of(lambda m, x, scale, y: m.f(x) * scale + y, f=nn.Linear(8, 8))
    check(model, None, {"x": X, "scale": 2, "y": X})


def test_inference_that_changes_buffers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    captured = check(model, None, torch.randn(2, 3, 6, 6))
    assert any(node.writes for node in captured.graph.nodes.values())


def test_inference_cache() -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        m.cache[1:5] = x
        return m.f(m.cache), m.cache

    check(Of(forward, f=nn.Linear(8, 8), cache=torch.zeros(6, 8)), None, X)


def test_inference_hands_back_input_and_views() -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = m.f(x)
        return x, x[1:], m.f.weight, y, y.t(), y

    check(Of(forward, f=nn.Linear(8, 8)), None, X)


def test_inference_of_a_transformer() -> None:
    """Eager takes one fused kernel; captured, the layers are written out."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    check(encoder, None, X.view(1, 4, 8), atol=2e-6)


def test_inference_of_an_lstm() -> None:
    check(nn.LSTM(8, 6, 2), None, torch.randn(5, 2, 8))


def test_inference_of_a_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    captured = check(model, None, {"input_ids": torch.randint(50, (2, 8)), "use_cache": False})
    assert "output:logits" in captured.graph.output_names


@pytest.mark.parametrize("padded", [False, True])
def test_attention_mask(padded: bool) -> None:
    """Eager looks whether the mask hides anything, and leaves it out if not; captured, it always takes part."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    mask = torch.ones(2, 8, dtype=torch.int64)
    if padded:
        mask[0, 5:] = 0
    batch = {"input_ids": torch.randint(50, (2, 8)), "attention_mask": mask, "labels": torch.tensor([0, 1])}
    model = transformers.BertForSequenceClassification(config)
    check(model, lambda m, b: m(**b).loss, batch, atol=2e-7)


def test_eager_reference_names() -> None:
    from magis.capture.workload import workload

    assert set(eager(workload((linear(), mean_loss, X)))) == {"loss", "grad:weight", "grad:bias"}
