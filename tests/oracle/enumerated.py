"""Terms of reductions that are not linear in their inputs, one by one along a last dimension."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch

from magis.ir.args import Slot
from magis.ir.graph import Call
from magis.ops.rule import argument

Tensors = list[torch.Tensor]
Enumeration = Callable[[Call, Tensors], torch.Tensor]


def _at(call: Call, tensors: Tensors, place: int, name: str = "") -> torch.Tensor | None:
    value = argument(call, place, name)
    return tensors[value.index] if isinstance(value, Slot) else None


def _have(call: Call, tensors: Tensors, place: int) -> torch.Tensor:
    tensor = _at(call, tensors, place)
    assert tensor is not None
    return tensor


def centred(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Terms of `(x - mean(x)) * scale + bias` for each element of the rows of x [rows, count]."""
    rows, count = x.shape
    shares = -(x.unsqueeze(1) / count).expand(rows, count, count) * scale.unsqueeze(2)
    parts = [(x * scale).unsqueeze(2), shares]
    parts.append(torch.zeros_like(x).unsqueeze(2) if bias is None else bias.expand(rows, count).unsqueeze(2))
    return torch.cat(parts, 2)


def centred_gradient(grad: torch.Tensor, xhat: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Terms of `rstd * (g - mean(g) - xhat * mean(g * xhat))` for rows [rows, count], rstd [rows, 1]."""
    rows, count = grad.shape
    first = -(grad.unsqueeze(1) / count).expand(rows, count, count)
    second = -xhat.unsqueeze(2) * (grad * xhat).unsqueeze(1) / count
    return torch.cat([grad.unsqueeze(2), first, second], 2) * rstd.unsqueeze(2)


class Rows:
    """How a tensor is cut into rows that are normalised together, and put back."""

    def __init__(self, shape: torch.Size, kind: str, size: int) -> None:
        self.shape, self.kind, self.size = shape, kind, size  # size: count of layer norm, groups of group norm

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        x = x.expand(self.shape)
        if self.kind == "batch":
            return x.transpose(0, 1).reshape(self.shape[1], -1)
        return x.reshape(-1, self.size) if self.kind == "layer" else x.reshape(self.shape[0] * self.size, -1)

    def join(self, terms: torch.Tensor) -> torch.Tensor:
        last = terms.shape[-1]
        if self.kind != "batch":
            return terms.reshape(*self.shape, last)
        turned = (self.shape[1], self.shape[0], *self.shape[2:], last)
        return terms.reshape(turned).transpose(0, 1)

    def weight(self, value: torch.Tensor | None) -> torch.Tensor:
        """A weight for each element, cut."""
        if value is None:
            return self.cut(torch.ones((), dtype=torch.float64))
        if self.kind != "layer":
            value = value.reshape(-1, *(1 for _ in self.shape[2:]))
        return self.cut(value)


def _rows(call: Call, x: torch.Tensor) -> Rows:
    if "layer" in call.op or "rms" in call.op:
        shape = argument(call, 2 if "backward" in call.op else 1, "")
        return Rows(x.shape, "layer", int(torch.Size(shape).numel()))  # type: ignore[arg-type]
    if "group" in call.op:
        return Rows(x.shape, "group", int(argument(call, 8 if "backward" in call.op else 6, "")))  # type: ignore[arg-type]
    return Rows(x.shape, "batch", 0)


def normal_forward(call: Call, tensors: Tensors) -> torch.Tensor:
    x = _have(call, tensors, 0)
    places = (2, 3) if "layer" in call.op else (1, 2)
    weight, bias = (_at(call, tensors, place) for place in places)
    rows = _rows(call, x)
    cut = rows.cut(x)
    rstd = (cut.var(1, unbiased=False, keepdim=True) + float(call.args[-1])).rsqrt()  # type: ignore[arg-type]
    added = None if bias is None else rows.weight(bias)
    return rows.join(centred(cut, rows.weight(weight) * rstd, added))


def normal_backward(call: Call, tensors: Tensors) -> torch.Tensor:
    grad, x = (_have(call, tensors, place) for place in (0, 1))
    mean_at, rstd_at, weight_at = {"layer": (3, 4, 5), "group": (2, 3, 4), "batch": (5, 6, 2)}[_rows(call, x).kind]
    rows = _rows(call, x)
    mean, rstd = (_have(call, tensors, place).reshape(-1, 1) for place in (mean_at, rstd_at))
    xhat = (rows.cut(x) - mean) * rstd
    weighted = rows.cut(grad) * rows.weight(_at(call, tensors, weight_at))
    return rows.join(centred_gradient(weighted, xhat, rstd))


def rms_backward(call: Call, tensors: Tensors) -> torch.Tensor:
    grad, x, rstd, weight = (_at(call, tensors, place) for place in (0, 1, 3, 4))
    assert grad is not None and x is not None and rstd is not None
    rows = _rows(call, x)
    xhat = rows.cut(x) * rstd.reshape(-1, 1)
    weighted = rows.cut(grad) * rows.weight(weight)
    share = -xhat.unsqueeze(2) * (weighted * xhat).unsqueeze(1) / xhat.shape[1]
    return rows.join(torch.cat([weighted.unsqueeze(2), share], 2) * rstd.reshape(-1, 1, 1))


def rms_weight(call: Call, tensors: Tensors) -> torch.Tensor:
    grad, x, rstd = (_have(call, tensors, place) for place in (0, 1, 3))
    count = _rows(call, x).size
    return (grad * x * rstd).reshape(-1, count).T


def running_variance(call: Call, tensors: Tensors) -> torch.Tensor:
    x, old = _have(call, tensors, 0), _have(call, tensors, 4)
    momentum = float(call.args[-2])  # type: ignore[arg-type]
    cut = _rows(call, x).cut(x)
    new = (cut - cut.mean(1, keepdim=True)) ** 2 * momentum / (cut.shape[1] - 1)
    return torch.cat([(old * (1 - momentum)).unsqueeze(1), new], 1)


def variance(call: Call, tensors: Tensors) -> torch.Tensor:
    x = tensors[0]
    given = argument(call, 1, "dim")
    dims = [d % x.dim() for d in given] if isinstance(given, tuple) else list(range(x.dim()))
    keep = bool(dict(call.kwargs).get("keepdim", False))
    correction = dict(call.kwargs).get("correction", 1)
    kept = [d for d in range(x.dim()) if d not in dims]
    rows = x.permute(*kept, *dims).reshape(*(x.shape[d] for d in kept), -1)
    terms = (rows - rows.mean(-1, keepdim=True)) ** 2 / (rows.shape[-1] - float(correction))  # type: ignore[arg-type]
    shape = [1 if d in dims else x.shape[d] for d in range(x.dim()) if keep or d not in dims]
    return terms.reshape(*shape, -1)


def softmax_gradient(call: Call, tensors: Tensors) -> torch.Tensor:
    return _along(call, 2, *tensors, lambda g, y: (y * g, -y.unsqueeze(-1) * (y * g).unsqueeze(-2)))


def log_softmax_gradient(call: Call, tensors: Tensors) -> torch.Tensor:
    return _along(call, 2, *tensors, lambda g, y: (g, -y.exp().unsqueeze(-1) * g.unsqueeze(-2)))


def log_softmax(call: Call, tensors: Tensors) -> torch.Tensor:
    """Not summands, but what a relative change of each moves: the difference, and the shares of the sum, taken
    here from autograd."""

    def parts(x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        (shares,) = torch.autograd.grad(torch.logsumexp(x, -1).sum(), x)
        rows = shares.unsqueeze(-2).expand(*x.shape, x.shape[-1])
        return (x - torch.logsumexp(x, -1, keepdim=True)).detach(), rows

    return _along(call, 1, tensors[0], tensors[0], parts)


def _along(call: Call, place: int, a: torch.Tensor, b: torch.Tensor, parts: Callable[..., object]) -> torch.Tensor:
    dim = int(call.args[place])  # type: ignore[arg-type]
    single, many = parts(a.movedim(dim, -1), b.movedim(dim, -1))  # type: ignore[misc]
    return torch.cat([single.unsqueeze(-1), many], -1).movedim(-2, dim if dim >= 0 else dim - 1)


def loss(place: int) -> Enumeration:
    """Terms of a loss whose reduction stands at that place: its elements, divided for a mean."""

    def terms(call: Call, tensors: Tensors) -> torch.Tensor:
        run = getattr(torch.ops.aten, call.op.split(".")[1]).default
        reduction = argument(call, place, "", 1)
        args = [tensors[v.index] if isinstance(v, Slot) else v for v in call.args]
        args = args[:place] + [None] * (place - len(args)) + [0] + args[place + 1 :]
        each = run(*args).reshape(-1)
        return each / each.numel() if reduction == 1 else each

    return terms


def total_weight(call: Call, tensors: Tensors) -> torch.Tensor:
    weight = _at(call, tensors, 2)
    labels = _have(call, tensors, 1).reshape(-1).tolist()
    each = [0.0 if label == call.args[4] else 1.0 if weight is None else float(weight[label]) for label in labels]
    return torch.tensor(each, dtype=torch.float64)


def attention_gradient(of_queries: bool) -> Enumeration:
    """Terms of the gradients of queries or keys, both products of a score's gradient written out."""

    def terms(call: Call, tensors: Tensors) -> torch.Tensor:
        grad, q, k, v, out, sums = (_have(call, tensors, place) for place in range(6))
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        given = dict(call.kwargs).get("scale")
        scale = float(given) if isinstance(given, float) else 1 / sqrt(q.shape[-1])
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
        mask = _at(call, tensors, 99, "attn_mask")
        scores = scores if mask is None else scores + mask
        if call.args[7]:
            rows, columns = scores.shape[-2:]
            scores = scores + torch.full((rows, columns), float("-inf"), dtype=q.dtype).triu(1)
        weights = (scores - sums.unsqueeze(-1)).exp() * scale
        forms = ("bhij,bhie,bhje,bhjd->bhidje", "bhij,bhie,bhie,bhjd->bhidje")
        if not of_queries:
            forms = ("bhij,bhie,bhje,bhid->bhjdie", "bhij,bhie,bhie,bhid->bhjdie")
        other = k if of_queries else q
        first = torch.einsum(forms[0], weights, grad, v, other)
        second = -torch.einsum(forms[1], weights, grad, out, other)
        found = torch.cat([first.flatten(4), second.flatten(4)], -1)
        return found if of_queries else found.unflatten(1, (-1, shared)).movedim(2, -1).flatten(4)

    return terms


_BATCH = "_native_batch_norm_legit.no_stats _native_batch_norm_legit.default native_batch_norm.default"
ENUMERATED: dict[str, dict[int, Enumeration]] = {
    "native_layer_norm.default": {0: normal_forward},
    "native_group_norm.default": {0: normal_forward},
    **{name: {0: normal_forward} for name in (*_BATCH.split(), "_batch_norm_with_update.default")},
    "_native_batch_norm_legit_functional.default": {0: normal_forward, 4: running_variance},
    "_batch_norm_with_update_functional.default": {0: normal_forward, 5: running_variance},
    "native_layer_norm_backward.default": {0: normal_backward},
    "native_group_norm_backward.default": {0: normal_backward},
    "native_batch_norm_backward.default": {0: normal_backward},
    "batch_norm_backward.default": {0: normal_backward},
    "_fused_rms_norm_backward.default": {0: rms_backward, 1: rms_weight},
    "var.correction": {0: variance},
    "var_mean.correction": {0: variance},
    "_softmax_backward_data.default": {0: softmax_gradient},
    "_log_softmax_backward_data.default": {0: log_softmax_gradient},
    "_log_softmax.default": {0: log_softmax},
    **{f"{name}_loss.default": {0: loss(2)} for name in ("mse", "huber", "smooth_l1", "soft_margin")},
    "binary_cross_entropy.default": {0: loss(3)},
    "binary_cross_entropy_with_logits.default": {0: loss(4)},
    "nll_loss_forward.default": {1: total_weight},
    "nll_loss2d_forward.default": {1: total_weight},
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": {
        0: attention_gradient(of_queries=True),
        1: attention_gradient(of_queries=False),
    },
}
"""By operator and result."""

DETACHED = ("_log_softmax.default",)
"""The terms do not sum to the result."""

NESTED = ("_scaled_dot_product_flash_attention_for_cpu_backward.default",)
"""Sums of sums: the rule gives the length of both sums together, not the number of products."""
