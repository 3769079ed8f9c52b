"""Operators whose fake results differ from what PyTorch's kernels make, put right while tracing.

The graph's byte counts and strides come from fake tensors, so a wrong fake result is a wrong prediction; a wrong
layout of a random mask is even another mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Correction = Callable[[Any, Any], Any]


def corrected(func: Any, args: Any, result: Any) -> Any:
    """The fake result as the kernel would make it. Corrections make tensors out of their arguments only, since a
    tensor made from nothing would be a real one."""
    correction = _CORRECTIONS.get(func)
    return result if correction is None else correction(args, result)


def _asked_only(mask: int, then: Correction | None = None) -> Correction:
    """Gradients that the mask (an argument) does not ask for are not made."""

    def correct(args: Any, result: Any) -> Any:
        made = result if then is None else then(args, result)
        return tuple(gradient if asked else None for gradient, asked in zip(made, args[mask]))

    return correct


def _statistics(weight: int) -> Correction:
    """Mixed-precision normalisation on a CPU keeps mean and deviation in the weight's type (results 1 and 2)."""

    def correct(args: Any, result: Any) -> Any:
        data, scale = args[0], args[weight]
        if scale is None or scale.dtype == data.dtype or data.device.type != "cpu":
            return result
        out, mean, deviation, *rest = result
        return (out, mean.to(scale.dtype), deviation.to(scale.dtype), *rest)

    return correct


def _running_statistics(args: Any, result: Any) -> Any:
    """New running statistics have the type of the old ones."""
    out, mean, deviation, *running = _statistics(1)(args, result)
    return (out, mean, deviation, *(new.to(old.dtype) for new, old in zip(running, args[3:5])))


def _like_input(args: Any, result: Any) -> Any:
    """The gradient of group normalisation's input has the input's type and layout."""
    first, *rest = result
    return (first if first is None else torch.empty_like(args[1]), *rest)


def _in_memory_order(args: Any, result: Any) -> Any:
    """Drawing over a tensor fills it in memory order: the mask of a transposed tensor is transposed.

    Functionalisation turns `x.bernoulli_(p)` into `bernoulli(x, p)`, whose own result is row-major."""
    return torch.empty_like(args[0]) if result.stride() != torch.empty_like(args[0]).stride() else result


def _whole_storage(args: Any, result: Any) -> Any:
    """A copy that keeps strides copies all of the storage, gaps and what lies around included."""
    like = args[0]
    if any(stride == 0 and length > 1 for stride, length in zip(like.stride(), like.shape)) or not like.numel():
        return result
    elements = like.untyped_storage().nbytes() // like.itemsize
    return like.new_empty(elements).as_strided(like.shape, like.stride(), like.storage_offset())


def _one_more_offset(args: Any, result: Any) -> Any:
    """The bag of each index is worked out in a buffer one longer."""
    out, bags, *rest = result
    return (out, bags.new_empty(bags.shape[0] + 1)[:-1] if bags.numel() else bags, *rest)


def _periodic_window(args: Any, result: Any) -> Any:
    """A periodic window is a symmetric one, a sample longer, without its last."""
    periodic = len(args) < 2 or args[1]
    return result.new_empty(result.shape[0] + 1)[:-1] if periodic and result.shape[0] > 1 else result


_CORRECTIONS: dict[Any, Correction] = {
    aten.native_layer_norm.default: _statistics(2),
    aten.native_group_norm.default: _statistics(1),
    aten.native_batch_norm.default: _statistics(1),
    aten._native_batch_norm_legit.default: _statistics(1),
    aten._native_batch_norm_legit_functional.default: _running_statistics,
    aten.native_layer_norm_backward.default: _asked_only(7),
    aten.native_group_norm_backward.default: _asked_only(9, _like_input),
    aten.native_batch_norm_backward.default: _asked_only(9),
    aten.bernoulli.p: _in_memory_order,
    **{
        getattr(getattr(aten, f"{name}_window"), overload): _periodic_window
        for name in ("bartlett", "blackman", "hamming", "hann")
        for overload in ("default", "periodic")
    },
    aten.copy.default: _whole_storage,
    aten.slice_scatter.default: _whole_storage,
    aten.select_scatter.default: _whole_storage,
    aten.diagonal_scatter.default: _whole_storage,
    aten.as_strided_scatter.default: _whole_storage,
    aten._embedding_bag.default: _one_more_offset,
}
