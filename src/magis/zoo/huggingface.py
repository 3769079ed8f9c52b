"""Hugging Face models from their configurations, random weights, the model's own loss.

Dropout is 0 but for `hf-bert-dropout`. Language models predict the next token of their own input. A builder's
extra keywords are fields of the model's configuration.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from magis.errors import UsageError
from magis.zoo.workload import Builder, Sizes, Workload, ZooModel, with_toy


def own_loss(model: Any, batch: dict[str, Any]) -> Any:
    """The loss that the model computes from its `labels`."""
    return model(**batch).loss


def _network(kind: Any, config: Any, dtype: str = "float32") -> Any:
    import torch

    torch.manual_seed(0)
    return kind(config).to(getattr(torch, dtype))


def _tokens(net: Any, sizes: Sizes) -> Any:
    import torch

    return torch.randint(0, net.config.vocab_size, (sizes.batch, sizes.seq))


def _next_token(net: Any, sizes: Sizes) -> Workload:
    """Labels are a copy of the input ids [batch, seq]; the model shifts them itself."""
    ids = _tokens(net, sizes)
    return net, own_loss, {"input_ids": ids, "labels": ids.clone()}


def _images(net: Any, sizes: Sizes) -> Workload:
    """Pixels [batch, 3, image, image] and class labels [batch]."""
    import torch

    pixels = torch.randn(sizes.batch, 3, sizes.image, sizes.image)
    labels = torch.randint(0, net.config.num_labels, (sizes.batch,))
    return net, own_loss, {"pixel_values": pixels, "labels": labels}


def bert(sizes: Sizes, dropout: float = 0.0, masked: bool = False, **fields: Any) -> Workload:
    """BERT: two-class sequence classification, or with `masked` the masked LM whose head is tied."""
    import torch
    import transformers

    config = transformers.BertConfig(
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=max(512, sizes.seq or 0),
        num_labels=2,
        **fields,
    )
    if masked:
        return _next_token(_network(transformers.BertForMaskedLM, config), sizes)
    net = _network(transformers.BertForSequenceClassification, config)
    labels = torch.randint(0, 2, (sizes.batch,))
    return net, own_loss, {"input_ids": _tokens(net, sizes), "labels": labels}


def vit(sizes: Sizes, **fields: Any) -> Workload:
    """ViT: ten-class image classification."""
    import transformers

    config = transformers.ViTConfig(
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
        image_size=sizes.image,
        **fields,
    )
    return _images(_network(transformers.ViTForImageClassification, config), sizes)


def resnet(sizes: Sizes, **fields: Any) -> Workload:
    """ResNet with BatchNorm in training mode: ten-class image classification."""
    import transformers

    if sizes.batch == 1 and (sizes.image or 0) <= 32:
        raise UsageError("BatchNorm needs two values a channel: give --batch 2 or --image above 32")
    config = transformers.ResNetConfig(num_labels=10, **fields)
    return _images(_network(transformers.ResNetForImageClassification, config), sizes)


def gpt2(sizes: Sizes, positions: int = 1024, **fields: Any) -> Workload:
    """GPT-2 with its head tied to the embedding."""
    import transformers

    config = transformers.GPT2Config(
        n_positions=max(positions, sizes.seq or 0),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        summary_first_dropout=0.0,
        use_cache=False,
        **fields,
    )
    net = _network(transformers.GPT2LMHeadModel, config)
    net.loss_type = "ForCausalLM"  # what it falls back to anyway, with a warning
    return _next_token(net, sizes)


def gptneo(sizes: Sizes, positions: int = 2048, **fields: Any) -> Workload:
    """GPT-Neo in bfloat16: global and local attention (window 256) in turn, head tied; 1.3B by default."""
    import transformers

    config = transformers.GPTNeoConfig(
        max_position_embeddings=max(positions, sizes.seq or 0), classifier_dropout=0.0, use_cache=False, **fields
    )
    return _next_token(_network(transformers.GPTNeoForCausalLM, config, "bfloat16"), sizes)


def llama(sizes: Sizes, **fields: Any) -> Workload:
    """Llama in bfloat16, grouped-query attention, head tied as in Llama-3.2-1B."""
    import transformers

    config = transformers.LlamaConfig(
        max_position_embeddings=max(131072, sizes.seq or 0),
        rms_norm_eps=1e-5,
        attention_dropout=0.0,
        tie_word_embeddings=True,
        use_cache=False,
        **fields,
    )
    return _next_token(_network(transformers.LlamaForCausalLM, config, "bfloat16"), sizes)


def qwen2(sizes: Sizes, **fields: Any) -> Workload:
    """Qwen2, grouped-query attention with bias, head tied as in Qwen2-0.5B."""
    import transformers

    config = transformers.Qwen2Config(
        max_position_embeddings=max(32768, sizes.seq or 0),
        attention_dropout=0.0,
        tie_word_embeddings=True,
        use_cache=False,
        **fields,
    )
    return _next_token(_network(transformers.Qwen2ForCausalLM, config), sizes)


_SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 512}
_TOKENS = {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}

# The toys' configurations: structure kept, widths and vocabulary cut.
TOY_BERT: dict[str, Any] = {**_SMALL, "num_attention_heads": 4, "vocab_size": 1000}
TOY_VIT: dict[str, Any] = {**_SMALL, "num_attention_heads": 4, "patch_size": 8}
TOY_RESNET: dict[str, Any] = {"embedding_size": 32, "hidden_sizes": (64, 128, 256, 512), "depths": (1, 2, 2, 1)}
TOY_GPT2: dict[str, Any] = {"positions": 64, "n_layer": 2, "n_embd": 128, "n_head": 4, **_TOKENS}
_WINDOW: dict[str, Any] = {"attention_types": [[["global", "local"], 1]], "window_size": 16, "positions": 64}
_TOY_GPTNEO: dict[str, Any] = {"num_layers": 2, "hidden_size": 128, "num_heads": 4, **_WINDOW, **_TOKENS}
_TOY_GROUPED: dict[str, Any] = {**_SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, **_TOKENS}

_LLAMA: dict[str, Any] = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_QWEN2: dict[str, Any] = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}


def entries(full: ZooModel, toy_sizes: Sizes, toy: Builder, patch: int = 1) -> tuple[ZooModel, ZooModel]:
    """A model of transformers and its toy; the image must be a multiple of the toy's `patch`."""
    full = replace(full, requires="transformers", least=Sizes(1, seq=2, image=1))  # a next token needs two
    return with_toy(full, toy_sizes, toy, image_multiple=patch)


_TEXT, _TOY_TEXT, _TOY_LANGUAGE, _TOY_IMAGE = (
    Sizes(32, seq=512),
    Sizes(32, seq=64),
    Sizes(8, seq=64),
    Sizes(8, image=64),
)

MODELS: tuple[ZooModel, ...] = (
    *entries(
        ZooModel("hf-bert", "hf", "BERT-base, sequence classification", _TEXT, bert),
        _TOY_TEXT,
        partial(bert, **TOY_BERT),
    ),
    *entries(
        ZooModel("hf-bert-dropout", "hf", "hf-bert with dropout 0.1", _TEXT, partial(bert, dropout=0.1)),
        _TOY_TEXT,
        partial(bert, dropout=0.1, **TOY_BERT),
    ),
    *entries(
        ZooModel(
            "hf-bert-mlm",
            "hf",
            "BERT-base, masked language model, tied head",
            _TEXT,
            partial(bert, masked=True),
        ),
        _TOY_TEXT,
        partial(bert, masked=True, **TOY_BERT),
    ),
    *entries(
        ZooModel("hf-vit", "hf", "ViT-base/16, image classification", Sizes(64, image=224), vit, image_multiple=16),
        _TOY_IMAGE,
        partial(vit, **TOY_VIT),
        patch=8,
    ),
    *entries(
        ZooModel("hf-gpt2", "hf", "GPT-2 small, next token", Sizes(8, seq=1024), gpt2),
        _TOY_LANGUAGE,
        partial(gpt2, **TOY_GPT2),
    ),
    *entries(
        ZooModel("hf-gptneo", "hf", "GPT-Neo-1.3B in bfloat16, next token", _TEXT, gptneo),
        _TOY_LANGUAGE,
        partial(gptneo, **_TOY_GPTNEO),
    ),
    *entries(
        ZooModel("hf-llama", "hf", "Llama-3.2-1B in bfloat16", Sizes(4, seq=1024), partial(llama, **_LLAMA)),
        _TOY_LANGUAGE,
        partial(llama, **_TOY_GROUPED),
    ),
    *entries(
        ZooModel("hf-qwen2", "hf", "Qwen2-0.5B, next token", Sizes(4, seq=1024), partial(qwen2, **_QWEN2)),
        _TOY_LANGUAGE,
        partial(qwen2, **_TOY_GROUPED),
    ),
    *entries(
        ZooModel("hf-resnet50", "hf", "ResNet-50 with BatchNorm in training", Sizes(64, image=224), resnet),
        _TOY_IMAGE,
        partial(resnet, **TOY_RESNET),
    ),
)
