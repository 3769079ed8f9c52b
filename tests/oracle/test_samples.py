"""Every operator rule on its own samples, against real execution."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from magis.aten.convert import overload
from magis.ops.rule import OpRule, Sample
from oracle.enumerated import rms_backward, rms_weight
from oracle.run import Case, case_of, check, cost_problems, rules
from oracle.storage import storage_problems
from oracle.terms import term_problems, widened

OTHER_DEVICES = (
    "aten._efficient_attention_backward.default",
    "aten._efficient_attention_forward.default",
    "aten._flash_attention_backward.default",
    "aten._flash_attention_forward.default",
    "aten._fused_rms_norm_backward.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_cudnn_attention_backward.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_backward.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._scaled_dot_product_fused_attention_overrideable_backward.default",
    "aten.cudnn_batch_norm.default",
    "aten.cudnn_batch_norm_backward.default",
)
"""No CPU kernel: only shapes are checked."""

WITHOUT_META = (
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._scaled_dot_product_fused_attention_overrideable_backward.default",
)
"""Not even shapes: their meta kernels belong to other backends."""


@cache
def samples() -> dict[str, list[Sample]]:
    """The samples of every operator, by its name."""
    found: dict[str, list[Sample]] = {op: [] for op in rules()}
    for rule in {id(rule): rule for rule in rules().values()}.values():
        for sample in rule.samples():
            assert rules()[sample.op] is rule, f"{type(rule).__name__} has a sample of {sample.op}"
            found[sample.op].append(sample)
    return found


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """PyTorch warns of beta and deprecated operators; one thread keeps small runs short."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("op", sorted(rules()))
def test_rule_agrees_with_execution(op: str) -> None:
    if op in OTHER_DEVICES:
        pytest.skip("has no CPU kernel")
    assert samples()[op], "no sample"
    for sample in samples()[op]:
        case = case_of(sample)
        assert not [*check(case), *storage_problems(case), *term_problems(case)], sample


@pytest.mark.parametrize("op", [op for op in OTHER_DEVICES if op not in WITHOUT_META])
def test_shapes_of_other_devices(op: str) -> None:
    assert samples()[op], "no sample"
    for sample in samples()[op]:
        case = case_of(sample, "meta")
        rule = rules()[op]
        assert len(rule.aliases(case.call)) == len(case.call.outputs)
        assert all(kernel.nbytes > 0 for kernel in rule.kernels(case.call))
        assert all(rule.terms(case.call, i) >= 1 for i, spec in enumerate(case.call.outputs) if spec is not None)
        assert not list(cost_problems(case.call, case.tensors, case.outputs))


def test_rms_gradient() -> None:
    """Its terms sum to what autograd makes of the definition, and their squares to the rule's."""
    (sample,) = samples()["aten._fused_rms_norm_backward.default"]
    case = case_of(sample, "meta")
    torch.manual_seed(0)
    tensors = [torch.randn(tensor.shape, dtype=torch.float64) for tensor in case.tensors]
    wide = widened(Case(case.call, tensors))
    assert wide is not None
    grad, x, rstd, weight = tensors
    rstd.copy_((x * x).mean(-1, keepdim=True).rsqrt())
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    result = x * (x * x).mean(-1, keepdim=True).rsqrt() * weight
    expected = torch.autograd.grad(result, (x, weight), grad)
    rule = rules()[sample.op]
    for output, terms in enumerate((rms_backward, rms_weight)):
        found = terms(wide.call, [grad, x.detach(), rstd, weight.detach()])
        torch.testing.assert_close(found.sum(-1), expected[output])
        squares = rule.squared_terms(torch, wide.call, [grad, x.detach(), rstd, weight.detach()], output)
        torch.testing.assert_close(squares, (found * found).sum(-1))
        assert rule.terms(wide.call, output) == found.shape[-1]


@pytest.mark.parametrize("op", sorted(rules()))
def test_random_operators_are_those_that_pytorch_tags(op: str) -> None:
    """What a rule calls random carries PyTorch's tag; attention's gradients carry it but draw nothing."""
    rule: OpRule = rules()[op]
    tagged = torch.Tag.nondeterministic_seeded in overload(op).tags
    if rule.random:
        assert tagged
    if tagged and not rule.random:
        assert type(rule).draws is not OpRule.draws
