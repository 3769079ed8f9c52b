"""Which terms a result sums, by brute force: the other half of the oracle.

Where a result is linear in some arguments, each of their elements makes one term: the operator runs once for
each, all others zero. Other reductions have their terms written out in `enumerated`. Everything in float64.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from magis.aten.convert import overload, torch_dtype
from magis.ir.args import Arg, Slot
from magis.ir.dtype import DType
from magis.ir.graph import Call
from magis.ops.registry import rule_for
from oracle.enumerated import DETACHED, ENUMERATED, NESTED
from oracle.run import Case, execute

Pair = tuple[torch.Tensor, torch.Tensor]
LINEAR: dict[str, dict[int, str]] = {
    "mm.default": {0: "self"},
    "bmm.default": {0: "self"},
    "mv.default": {0: "self"},
    "dot.default": {0: "self"},
    "vdot.default": {0: "self"},
    "addmm.default": {0: "self mat1"},
    "addbmm.default": {0: "self batch1"},
    "addmv.default": {0: "self mat"},
    "addr.default": {0: "self vec1"},
    "baddbmm.default": {0: "self batch1"},
    "sum.default": {0: "self"},
    "sum.dim_IntList": {0: "self"},
    "nansum.default": {0: "self"},
    "mean.default": {0: "self"},
    "mean.dim": {0: "self"},
    "trace.default": {0: "self"},
    "cumsum.default": {0: "self"},
    "var_mean.correction": {1: "self"},
    "std_mean.correction": {1: "self"},
    "convolution.default": {0: "input bias"},
    "convolution_backward.default": {0: "grad_output", 1: "grad_output", 2: "grad_output"},
    "native_layer_norm.default": {1: "input"},
    "native_layer_norm_backward.default": {1: "grad_out", 2: "grad_out"},
    "native_group_norm.default": {1: "input"},
    "native_group_norm_backward.default": {1: "grad_out", 2: "grad_out"},
    "_native_batch_norm_legit.no_stats": {1: "input"},
    "_native_batch_norm_legit.default": {1: "input"},
    "native_batch_norm.default": {1: "input"},
    "_batch_norm_with_update.default": {1: "input"},
    "_native_batch_norm_legit_functional.default": {1: "input", 3: "input running_mean"},
    "_batch_norm_with_update_functional.default": {1: "input", 4: "input running_mean"},
    "native_batch_norm_backward.default": {1: "grad_out", 2: "grad_out"},
    "batch_norm_backward.default": {1: "grad_out", 2: "grad_out"},
    "_scaled_dot_product_flash_attention_for_cpu.default": {0: "value"},
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": {2: "grad_out"},
    "embedding_dense_backward.default": {0: "grad_output"},
    "index_put.default": {0: "self values"},
    "_unsafe_index_put.default": {0: "self values"},
    "put.default": {0: "self source"},
    "index_add.default": {0: "self source"},
    "scatter_add.default": {0: "self src"},
    "_unsafe_masked_index_put_accumulate.default": {0: "self values"},
    "unfold_backward.default": {0: "grad_in"},
    "col2im.default": {0: "self"},
    "nll_loss_forward.default": {0: "self"},
    "nll_loss2d_forward.default": {0: "self"},
}
"""For each result that is linear, the arguments in which it is so together. `_LINEAR_FAMILIES` has the rest."""

_LINEAR_FAMILIES = {"pool": ("self", "grad_output"), "pad": ("", "grad_output"), "upsample": ("self", "grad_output")}

AT_LEAST = re.compile(
    "_?adaptive_avg_pool|_unsafe|_?upsample|avg_pool|col2im|convolution|embedding|index_|nll_loss|put|reflection"
    "|replication|scatter_add|unfold_backward"
)
"""Operators (by the start of their name) whose rules give an upper bound; all others give the number itself."""

OWN_SCALE = re.compile(
    "_fused_rms_norm.default|_safe_softmax|_softmax.default|count_nonzero|cumprod|index_|linalg_vector|logcumsumexp"
    "|logsumexp|multi_margin|norm|prod|put_|scatter|std"
)
"""Reductions whose result is its own scale: products, sums of positive terms. In-place scatters count too."""


def term_problems(case: Case, most: int = 2000) -> list[str]:
    """Where `terms` or `squared_terms` of a rule differ from brute force; where arguments have more than `most`
    elements, from an estimate, or from nothing."""
    wide = widened(case)
    if wide is None:
        return []
    problems: list[str] = []
    rule = rule_for(wide.call.op)
    for output, spec in enumerate(wide.call.outputs):
        if spec is None or not spec.dtype.is_floating:
            continue
        squares = rule.squared_terms(torch, wide.call, wide.tensors, output)
        name = wide.call.op.split(".", 1)[1].replace("_.", ".")
        linear = _linear_arguments(name, output)
        if squares is None:
            problems += _without_squares(wide, output, linear)
        elif name in ENUMERATED and output in ENUMERATED[name]:
            if rule.terms(wide.call, output) * spec.numel <= 100 * most:
                problems += _enumerated_problems(wide, output, squares)
        elif linear:
            few = sum(t.numel() for t in _named(wide, linear.split()).values()) <= most
            compare = _linear_problems if few else _sign_problems
            problems += compare(wide, output, linear.split(), squares)
        else:
            problems.append(f"nothing checks the squared terms of result {output}")
    return problems


def widened(case: Case) -> Case | None:
    """The case in float64; None when the operator has none of its floating-point inputs left to widen."""
    tensors = [t.double().clone() if t.is_floating_point() else t.clone() for t in case.tensors]
    if not any(t.is_floating_point() for t in tensors):
        return None
    args = tuple(_wide(value) for value in case.call.args)
    kwargs = tuple((name, _wide(value)) for name, value in case.call.kwargs)
    inputs = tuple(replace(spec, dtype=DType.F64) if spec.dtype.is_floating else spec for spec in case.call.inputs)
    outputs = tuple(
        replace(spec, dtype=DType.F64) if spec is not None and spec.dtype.is_floating else spec
        for spec in case.call.outputs
    )
    return Case(Call(case.call.op, args, kwargs, inputs, outputs), tensors)


def _wide(value: Arg) -> Arg:
    return DType.F64 if isinstance(value, DType) and torch_dtype(value).is_floating_point else value


def _linear_arguments(name: str, output: int) -> str:
    if name in LINEAR:
        return LINEAR[name].get(output, "")
    for family, (forward, backward) in _LINEAR_FAMILIES.items():
        if family in name and name != "max_pool2d_with_indices.default":
            return backward if "backward" in name else forward
    return ""


def _without_squares(wide: Case, output: int, linear: str) -> Iterator[str]:
    terms = rule_for(wide.call.op).terms(wide.call, output)
    name = wide.call.op.split(".", 1)[1]
    statistics = output == 2 and "norm" in name
    sums = output == 1 and "attention" in name
    if terms > 1 and not statistics and not sums and not OWN_SCALE.match(name):
        yield f"result {output} sums {terms} terms, but no squares of them are known"


def _named(wide: Case, names: list[str]) -> dict[int, torch.Tensor]:
    """Slots and tensors of the arguments of these names."""
    found = {}
    for place, argument in enumerate(overload(wide.call.op)._schema.arguments):
        kwargs = dict(wide.call.kwargs)
        value = wide.call.args[place] if place < len(wide.call.args) else kwargs.get(argument.name)
        if argument.name in names and isinstance(value, Slot):
            found[value.index] = wide.tensors[value.index]
    return found


def _result(wide: Case, tensors: list[torch.Tensor], output: int) -> torch.Tensor:
    result = execute(wide.call, [tensor.clone() for tensor in tensors])[output]
    assert result is not None
    return result.double()


def _linear_problems(wide: Case, output: int, names: list[str], squares: torch.Tensor) -> Iterator[str]:
    whole = _result(wide, wide.tensors, output)
    total, squared, count = (torch.zeros_like(whole) for _ in range(3))
    named = _named(wide, names)
    zeroed = [torch.zeros_like(t) if place in named else t for place, t in enumerate(wide.tensors)]
    for slot, tensor in named.items():
        for index, value in enumerate(tensor.reshape(-1).tolist()):
            single = torch.zeros(tensor.numel(), dtype=tensor.dtype)
            single[index] = value
            inputs = [*zeroed[:slot], single.reshape(tensor.shape), *zeroed[slot + 1 :]]
            term = _result(wide, inputs, output)
            total += term
            squared += term * term
            count += term != 0
    most = int(count.max()) if count.numel() else 0
    random_places = "max_pool" in wide.call.op  # not those of the largest elements of their windows
    yield from _differences(wide, output, (total, whole), (squares, squared), None if random_places else most)


def _sign_problems(wide: Case, output: int, names: list[str], squares: torch.Tensor) -> Iterator[str]:
    """For arguments too large to take apart: under random signs of their elements, the mean square of a sum is
    the sum of its terms' squares. Compared on average over all results, so only gross errors show."""
    named = _named(wide, names)
    generator = torch.Generator().manual_seed(1)  # the values were drawn from seed 0
    runs = 64 if squares.numel() < 64 else 8
    mean = 0.0
    for _ in range(runs):
        signs = {slot: (torch.rand(t.shape, generator=generator) < 0.5) * 2.0 - 1.0 for slot, t in named.items()}
        inputs = [t * signs[slot] if slot in signs else t for slot, t in enumerate(wide.tensors)]
        mean += float((_result(wide, inputs, output) ** 2).mean()) / runs
    said = float(squares.double().mean())
    if not 0.5 * said <= mean <= 1.6 * said:
        yield f"result {output}: squared terms are {said} on average, under random signs {mean}"


def _enumerated_problems(wide: Case, output: int, squares: torch.Tensor) -> Iterator[str]:
    name = wide.call.op.split(".", 1)[1]
    terms = ENUMERATED[name][output](wide.call, wide.tensors)
    whole = terms.sum(-1) if name in DETACHED else _result(wide, wide.tensors, output)
    count = None if name in NESTED else terms.shape[-1]
    yield from _differences(wide, output, (terms.sum(-1), whole), (squares, (terms * terms).sum(-1)), count)


def _close(pair: Pair) -> bool:
    a, b = pair
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-12, equal_nan=True)


def _differences(wide: Case, output: int, sums: Pair, squares: Pair, count: int | None) -> Iterator[str]:
    if not _close(sums):
        yield f"result {output}: the terms sum to {sums[0].flatten()[:3]}, the operator gives {sums[1].flatten()[:3]}"
    if not _close(squares):
        yield f"result {output}: squared terms {squares[0].flatten()[:3]}, brute force {squares[1].flatten()[:3]}"
    said = rule_for(wide.call.op).terms(wide.call, output)
    exact = sums[0].numel() > 0 and not AT_LEAST.match(wide.call.op.split(".")[1])
    if count is not None and (count > said or (exact and count < said)):
        yield f"result {output} sums {count} terms, the rule says {said}"
