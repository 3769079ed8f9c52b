"""Fine-tunes a small BERT with dropout twice, in eager PyTorch and with a planned step, and compares.

    python examples/train_bert.py

Needs transformers. Takes about a minute on a CPU, most of it to measure what operators cost (cached afterwards).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
import transformers

import magis

STEPS = 3


def main() -> None:
    """Trains both and prints losses, times and memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    model = transformers.BertForSequenceClassification(config)
    twin = copy.deepcopy(model)
    batches = [
        {"input_ids": torch.randint(0, config.vocab_size, (8, 128)), "labels": torch.randint(0, 2, (8,))}
        for _ in range(STEPS)
    ]

    def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**batch).loss

    step = magis.optimize(model, loss_fn, batches[0], max_slowdown=1.10)
    print(step)
    train(model, step, batches, "planned")
    train(twin, lambda batch: loss_fn(twin, batch), batches, "eager")
    pairs = zip(model.parameters(), twin.parameters())
    worst = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
    print(f"largest difference of a weight after {STEPS} steps: {worst:.1e}")


def train(
    model: torch.nn.Module,
    step: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    batches: list[dict[str, torch.Tensor]],
    name: str,
) -> None:
    """Some steps of AdamW from the same random numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1)
    start = time.process_time()
    losses = []
    for batch in batches:
        loss = step(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    print(f"{name}: losses {losses}, {time.process_time() - start:.1f} s of CPU time")


if __name__ == "__main__":
    main()
