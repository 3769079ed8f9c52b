"""One rewrite after the other, as a search makes them."""

from __future__ import annotations

import pytest
from rewrite.checks import assert_same, assert_same_model, estimate, everywhere, once, random_step, toy

from magis.rules.base import Rule
from magis.rules.rewrite.add_to_elements import AddToElements
from magis.rules.rewrite.add_to_product import AddToProduct
from magis.rules.rewrite.attention import WholeAttention
from magis.rules.rewrite.gelu import WholeGelu
from magis.rules.rewrite.join_slices import JoinSlices
from magis.rules.rewrite.pieces import ConvolutionInPieces
from magis.rules.rewrite.scale import MoveScale
from magis.rules.rewrite.without_copy import WithoutCopy

RULES: list[Rule] = [
    AddToElements(),
    AddToProduct(),
    ConvolutionInPieces(),
    JoinSlices(),
    MoveScale(),
    WholeAttention(),
    WholeGelu(),
    WithoutCopy(),
]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_random_steps_stay_the_same(seed: int, backwards: bool) -> None:
    recorded = random_step(seed, size=40)
    graph = recorded.graph
    for rule in RULES[::-1] if backwards else RULES:
        graph, _ = everywhere(rule, graph)
    assert_same(recorded, graph)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "share"),
    [("bert-toy", 0.9), ("vit-toy", 0.9), ("hf-gpt2-toy", 0.9), ("hf-bert-dropout-toy", 0.99), ("unet-toy", 1.0)],
)
def test_models_stay_the_same_and_get_faster(name: str, share: float) -> None:
    made, captured = toy(name)
    graph = captured.graph
    for rule in RULES:
        better = once(rule, graph)
        if better is not None:
            faster = estimate(better).latency_s < estimate(graph).latency_s
            assert faster or isinstance(rule, ConvolutionInPieces)  # toys are mostly launches
            graph = better if faster else graph
    assert_same_model(made, captured, graph)
    assert estimate(graph).latency_s < share * estimate(captured.graph).latency_s
    assert estimate(graph).peak_bytes <= 1.001 * estimate(captured.graph).peak_bytes
