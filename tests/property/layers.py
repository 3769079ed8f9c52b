"""Random networks for fission: steps over a pool of tensors, as data, with parameters, and gradients where wanted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from builder import Recorded, record
from magis.ir.edit import GraphEdit
from magis.ir.graph import Graph

LARGEST = 3000
"""Elements of a tensor that goes on being used."""
Tensor = torch.Tensor


@dataclass(frozen=True)
class Step:
    """What to do with tensor `which` (counted from the latest); `seed` settles the rest."""

    name: str
    which: int
    seed: int


@dataclass(frozen=True)
class Recipe:
    """A network as data. `start`: see `_STARTS`. `loss`: "" for no backward pass, else see `_LOSSES`. With
    `unread`, results that nobody needs stay in the graph."""

    start: str
    steps: tuple[Step, ...]
    results: tuple[int, ...] = (0,)
    loss: str = ""
    unread: bool = False

    def without(self, step: int) -> Recipe:
        """The same with one step less."""
        return replace(self, steps=self.steps[:step] + self.steps[step + 1 :])


class Making:
    """The choices of one step, and the parameters of the network, which are made once."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.given: list[Tensor] | None = None
        self.used = 0
        self.pool: list[Tensor] = []
        self.choice = random.Random(0)

    def begin(self, given: Sequence[Tensor] | None) -> None:
        """Starts another run, on these parameters if given."""
        self.given, self.used = None if given is None else list(given), 0

    def parameter(self, *shape: int, scale: float = 0.7) -> Tensor:
        """The next parameter."""
        return self._next(lambda: torch.randn(shape) * scale)

    def numbers(self, highest: int, *shape: int) -> Tensor:
        """The next tensor of indices."""
        return self._next(lambda: torch.randint(0, highest, shape))

    def flags(self, *shape: int) -> Tensor:
        """The next mask."""
        return self._next(lambda: torch.rand(shape) < 0.6)

    def _next(self, make: Callable[[], Tensor]) -> Tensor:
        self.used += 1
        if self.given is not None:
            return self.given[self.used - 1]
        made = make()
        self.parameters.append(made.double() if made.is_floating_point() else made)
        return self.parameters[-1]

    def dim(self, x: Tensor) -> int:
        """Some dimension."""
        return self.choice.randrange(x.dim())

    def other(self, x: Tensor, fits: Callable[[Tensor], bool]) -> Tensor:
        """Another tensor that fits; the tensor itself if none does."""
        found = [y for y in self.pool if y is not x and y.dtype == x.dtype and fits(y)]
        return self.choice.choice(found) if found else x


_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "leaky": functional.leaky_relu,
    "square": lambda x: torch.tanh(x) ** 2,
    "scaled": lambda x: x * 0.5 + 0.1,
    "clone": lambda x: x.clone(memory_format=torch.contiguous_format),
}


def _bias(m: Making, x: Tensor) -> Tensor:
    """A parameter that is broadcast along random dimensions."""
    shape = [n if m.choice.random() < 0.5 else 1 for n in x.shape]
    while len(shape) > 1 and shape[0] == 1:
        shape.pop(0)
    return m.choice.choice([torch.add, torch.mul, torch.sub])(x, m.parameter(*shape))


def _residual(m: Making, x: Tensor) -> Tensor:
    y = m.other(x, lambda y: y.shape == x.shape)
    return m.choice.choice([x + y, x * torch.sigmoid(y), torch.maximum(x, y), torch.where(x > y, x, y)])


def _broadcast(m: Making, x: Tensor) -> Tensor:
    """With another tensor that has length 1, or no dimension, where this one is longer."""
    y = m.other(x, lambda y: y.shape != x.shape and _broadcasts(y.shape, x.shape))
    return x + y if m.choice.random() < 0.5 else x * torch.tanh(y)


def _broadcasts(shape: Sequence[int], wider: Sequence[int]) -> bool:
    ours, theirs = list(reversed(shape)), list(reversed(wider))
    return len(ours) <= len(theirs) and all(a in (1, b) for a, b in zip(ours, theirs))


def _linear(m: Making, x: Tensor) -> Tensor:
    if x.dim() < 2:
        return torch.tanh(x)
    width = m.choice.choice([5, 8, 11, x.shape[-1]])
    bias = m.parameter(width) if m.choice.random() < 0.6 else None
    return functional.linear(x, m.parameter(width, x.shape[-1]), bias)


def _product(m: Making, x: Tensor) -> Tensor:
    """Products of all rows of a tensor with all rows of another one, as attention has them."""
    if x.dim() < 2:
        return x
    y = m.other(x, lambda y: y.dim() == x.dim() and y.shape[:-2] == x.shape[:-2] and y.shape[-1] == x.shape[-1])
    return torch.matmul(x, y.transpose(-1, -2)) * 0.5


def _weighted(m: Making, x: Tensor) -> Tensor:
    """A matrix times another tensor of the same batch."""
    y = m.other(x, lambda y: y.dim() == x.dim() > 1 and y.shape[:-2] == x.shape[:-2] and y.shape[-2] == x.shape[-1])
    return torch.tanh(x) if y is x else torch.matmul(x, y)


def _baddbmm(m: Making, x: Tensor) -> Tensor:
    if x.dim() != 3:
        return x * 2
    w = m.parameter(x.shape[0], x.shape[2], 5)
    return torch.baddbmm(m.parameter(1, 1, 5) if m.choice.random() < 0.5 else m.parameter(5), x, w, alpha=0.5)


def _addmm(m: Making, x: Tensor) -> Tensor:
    if x.dim() != 2:
        return x + 1
    shape = m.choice.choice([(5,), (1, 5), (x.shape[0], 1), (x.shape[0], 5)])
    return torch.addmm(m.parameter(*shape), x, m.parameter(x.shape[1], 5), beta=0.5, alpha=2)


def _attention(m: Making, x: Tensor) -> Tensor:
    if x.dim() not in (3, 4) or x.shape[-1] < 2:
        return x * 3
    flags = m.flags(x.shape[-2], x.shape[-2]) if m.choice.random() < 0.4 else None
    if flags is not None:
        flags = flags | torch.eye(x.shape[-2], dtype=torch.bool)
    x = x if x.dim() == 4 else x.unsqueeze(1)
    keys = m.parameter(x.shape[-1], x.shape[-1])
    return functional.scaled_dot_product_attention(x, x @ keys, x.tanh(), flags)


def _layer_norm(m: Making, x: Tensor) -> Tensor:
    width = x.shape[-m.choice.randint(1, min(2, x.dim())) :]
    plain = m.choice.random() < 0.4
    return functional.layer_norm(
        x, width, None if plain else m.parameter(*width), None if plain else m.parameter(*width)
    )


def _group_norm(m: Making, x: Tensor) -> Tensor:
    if x.dim() < 3 or x.shape[1] % 2:
        return torch.tanh(x)
    return functional.group_norm(x, 2, m.parameter(x.shape[1]), m.parameter(x.shape[1]))


def _batch_norm(m: Making, x: Tensor) -> Tensor:
    if x.dim() < 2:
        return x
    mean, spread = m.parameter(x.shape[1]).detach(), m.parameter(x.shape[1]).detach() ** 2 + 1
    return functional.batch_norm(x, mean, spread, m.parameter(x.shape[1]), m.parameter(x.shape[1]))


def _softmax(m: Making, x: Tensor) -> Tensor:
    return m.choice.choice([torch.softmax, torch.log_softmax])(x, m.dim(x))


def _reduce(m: Making, x: Tensor) -> Tensor:
    dims = sorted(m.choice.sample(range(x.dim()), m.choice.randint(1, x.dim())))
    how = m.choice.choice(["sum", "mean", "amax", "amin", "var", "logsumexp"])
    keep = m.choice.random() < 0.7 or len(dims) == x.dim()
    if how == "sum":
        return x.sum(dims, keepdim=keep) * 0.3
    if how == "var":
        return x.var(dims, unbiased=False, keepdim=keep)
    return getattr(torch, how)(x, dims, keepdim=keep)


def _largest(m: Making, x: Tensor) -> Tensor:
    return x.max(m.dim(x), keepdim=True)[0]


def _cumsum(m: Making, x: Tensor) -> Tensor:
    return x.cumsum(m.dim(x)) * 0.3


def _transpose(m: Making, x: Tensor) -> Tensor:
    if m.choice.random() < 0.5:
        return x.transpose(m.dim(x), m.dim(x))
    return x.permute(m.choice.sample(range(x.dim()), x.dim()))


def _merge(m: Making, x: Tensor) -> Tensor:
    """Two neighbouring dimensions as one."""
    at = m.choice.randrange(max(1, x.dim() - 1))
    return x.flatten(at, min(at + 1, x.dim() - 1))


def _divide(m: Making, x: Tensor) -> Tensor:
    """A dimension as two."""
    ways = [(d, n // f, f) for d, n in enumerate(x.shape) for f in range(2, n) if n % f == 0]
    if not ways or x.dim() > 4:
        return x + 0.1
    dim, *lengths = m.choice.choice(ways)
    return x.reshape(*x.shape[:dim], *lengths, *x.shape[dim + 1 :])


def _heads(m: Making, x: Tensor) -> Tensor:
    if x.dim() != 3 or x.shape[2] % 2:
        return x.unsqueeze(m.dim(x)) if x.dim() < 4 else torch.tanh(x)
    return x.view(*x.shape[:2], 2, x.shape[2] // 2).transpose(1, 2) if x.is_contiguous() else x.contiguous()


def _join_heads(m: Making, x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2) if x.dim() == 4 else x.squeeze(m.dim(x))


def _reshape(m: Making, x: Tensor) -> Tensor:
    """Back to the shape of another tensor with as many elements."""
    return x.reshape(m.other(x, lambda y: y.numel() == x.numel() and y.shape != x.shape).shape)


def _slice(m: Making, x: Tensor) -> Tensor:
    dim = m.dim(x)
    how = m.choice.choice(["slice", "select", "narrow", "step"])
    if x.shape[dim] < 3 or (how == "select" and x.dim() < 3):
        return torch.sigmoid(x)
    if how == "select":
        return x.select(dim, 1)
    if how == "step":
        return x[(slice(None),) * dim + (slice(0, None, 2),)]
    return x.narrow(dim, 1, x.shape[dim] - 2) if how == "narrow" else x[(slice(None),) * dim + (slice(1, None),)]


def _chunks(m: Making, x: Tensor) -> Sequence[Tensor]:
    return x.chunk(2, m.dim(x))


def _cat(m: Making, x: Tensor) -> Tensor:
    dim = m.dim(x)

    def fits(y: Tensor) -> bool:
        return y.dim() == x.dim() and all(a == b for d, (a, b) in enumerate(zip(x.shape, y.shape)) if d != dim)

    y = m.other(x, fits)
    return torch.cat([x, y], dim) if m.choice.random() < 0.7 or x.shape != y.shape else torch.stack([y, x], dim)


def _expand(m: Making, x: Tensor) -> Tensor:
    dim = m.dim(x)
    if x.shape[dim] == 1:
        return x.expand(*x.shape[:dim], 3, *x.shape[dim + 1 :])
    return x.unsqueeze(dim).expand(*x.shape[:dim], 2, *x.shape[dim:]) if x.dim() < 4 else x * 0.5


def _pad(m: Making, x: Tensor) -> Tensor:
    if x.dim() == 4 and m.choice.random() < 0.4:
        return functional.pad(x, (1, 0, 1, 1), mode="replicate")
    return functional.pad(x, (1, 2), value=0.5)


def _flip(m: Making, x: Tensor) -> Tensor:
    return x.flip(m.dim(x)) if m.choice.random() < 0.5 else x.roll(1, m.dim(x))


def _masked(m: Making, x: Tensor) -> Tensor:
    if x.dim() > 1 and m.choice.random() < 0.4:
        return x.tril()
    return x.masked_fill(m.flags(*x.shape[-m.choice.randint(1, x.dim()) :]), 0.25)


def _embedding(m: Making, x: Tensor) -> Tensor:
    shape = x.shape[:-1] if x.dim() > 1 else x.shape
    width = x.shape[-1] if x.dim() > 1 else 6
    found = functional.embedding(m.numbers(13, *shape), m.parameter(13, width))
    return x + found if x.dim() > 1 else found


def _select(m: Making, x: Tensor) -> Tensor:
    dim = m.dim(x)
    if m.choice.random() < 0.5:
        return x.index_select(dim, m.numbers(x.shape[dim], 4))
    shape = [2 if d == dim else n for d, n in enumerate(x.shape)]
    return x.gather(dim, m.numbers(x.shape[dim], *shape))


def _convolution(m: Making, x: Tensor) -> Tensor:
    if x.dim() not in (3, 4) or min(x.shape[2:]) < 3:
        return torch.tanh(x)
    channels, out = x.shape[1], m.choice.choice([2, 4, x.shape[1]])
    groups = m.choice.choice([1, 2]) if channels % 2 == 0 and out % 2 == 0 else 1
    kernel, padding = m.choice.choice([(3, 1), (3, 1), (1, 0), (2, 0), (3, 0)])
    stride, dilation = m.choice.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
    if dilation * (kernel - 1) + 1 > min(x.shape[2:]) + 2 * padding:
        dilation = 1
    bias = m.parameter(out) if m.choice.random() < 0.6 else None
    weight = m.parameter(out, channels // groups, *(kernel for _ in x.shape[2:]), scale=0.4)
    function = functional.conv1d if x.dim() == 3 else functional.conv2d
    return function(x, weight, bias, stride, padding, dilation, groups)


def _transposed(m: Making, x: Tensor) -> Tensor:
    if x.dim() not in (3, 4):
        return x * 0.7
    kernel, stride, padding = m.choice.choice([(2, 2, 0), (3, 1, 1), (4, 2, 1), (3, 2, 1)])
    if stride * (min(x.shape[2:]) - 1) + kernel <= 2 * padding:
        return x * 0.9
    weight = m.parameter(x.shape[1], 3, *(kernel for _ in x.shape[2:]), scale=0.4)
    function = functional.conv_transpose1d if x.dim() == 3 else functional.conv_transpose2d
    return function(x, weight, m.parameter(3), stride, padding)


def _pool(m: Making, x: Tensor) -> Tensor:
    if x.dim() != 4 or min(x.shape[2:]) < 3:
        return torch.sigmoid(x)
    kernel, stride, padding = m.choice.choice([(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 1, 0), ((2, 3), (2, 1), (0, 1))])
    if m.choice.random() < 0.5:
        return functional.max_pool2d(x, kernel, stride, padding)
    return functional.avg_pool2d(x, kernel, stride, padding, count_include_pad=m.choice.random() < 0.5)


def _upsample(m: Making, x: Tensor) -> Tensor:
    if x.dim() != 4:
        return torch.tanh(x)
    mode = m.choice.choice(["nearest", "bilinear"])
    return functional.interpolate(x, scale_factor=2, mode=mode, align_corners=False if mode == "bilinear" else None)


def _whole_pool(m: Making, x: Tensor) -> Tensor:
    return functional.adaptive_avg_pool2d(x, m.choice.choice([1, 2])) if x.dim() == 4 else x * 1.1


def _dropout(m: Making, x: Tensor) -> Tensor:
    return functional.dropout(x, 0.3, training=True)


_LAYERS: dict[str, Callable[[Making, Tensor], Any]] = {
    "bias": _bias,
    "residual": _residual,
    "broadcast": _broadcast,
    "linear": _linear,
    "product": _product,
    "weighted": _weighted,
    "baddbmm": _baddbmm,
    "addmm": _addmm,
    "attention": _attention,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "softmax": _softmax,
    "reduce": _reduce,
    "largest": _largest,
    "cumsum": _cumsum,
    "transpose": _transpose,
    "merge": _merge,
    "divide": _divide,
    "heads": _heads,
    "join_heads": _join_heads,
    "reshape": _reshape,
    "slice": _slice,
    "chunks": _chunks,
    "cat": _cat,
    "expand": _expand,
    "pad": _pad,
    "flip": _flip,
    "masked": _masked,
    "embedding": _embedding,
    "select": _select,
    "convolution": _convolution,
    "transposed": _transposed,
    "pool": _pool,
    "upsample": _upsample,
    "whole_pool": _whole_pool,
    "dropout": _dropout,
}
_STARTS: dict[str, tuple[int, ...]] = {
    "rows": (9, 8),
    "sequence": (3, 7, 8),
    "heads": (3, 2, 7, 4),
    "image": (3, 4, 9, 8),
    "signal": (3, 4, 11),
}
IMAGE = ("convolution", "convolution", "pool", "upsample", "transposed", "batch_norm", "residual", "cat", "pad", "bias")
"""Layers that a chain along the height of an image is made of."""
SMOOTH = ("tanh", "gelu", "silu", "sigmoid", "scaled", "bias", "linear", "layer_norm", "softmax", "merge", "divide",
          "transpose", "cat", "reshape", "addmm", "embedding")  # fmt: skip
"""Layers without jumps, and without what narrow types make much worse."""


def _squared(m: Making, x: Tensor) -> Tensor:
    return functional.mse_loss(x, m.parameter(*x.shape))


def _classified(m: Making, x: Tensor) -> Tensor:
    x = x.reshape(-1, x.shape[-1]) if x.dim() != 4 else x
    labels = m.numbers(x.shape[1], x.shape[0], *x.shape[2:])
    return functional.cross_entropy(x, labels)


_LOSSES: dict[str, Callable[[Making, Tensor], Tensor]] = {
    "sum": lambda m, x: (x * m.parameter(*x.shape)).sum(),
    "mean": lambda m, x: (x * m.parameter(*x.shape)).mean(),
    "squared": _squared,
    "classified": _classified,
}


def recipe(choice: random.Random, names: Sequence[str] = (), start: str = "", loss: bool | None = None) -> Recipe:
    """A random one."""
    start = start or choice.choice(list(_STARTS))
    every = [*_POINTWISE, *_LAYERS, "residual", "linear", "linear", "broadcast", "product", "layer_norm"]
    if start == "image":
        every += ["convolution"] * 5 + ["pool", "upsample"]
    steps = [
        Step(choice.choice(names or every), min(choice.randrange(8), choice.randrange(8)) // 2, choice.randrange(10**6))
        for _ in range(choice.randint(3, 12))
    ]
    results = tuple(choice.randrange(6) for _ in range(choice.choice([1, 1, 2, 3])))
    backward = choice.random() < 0.4 if loss is None else loss
    return Recipe(start, tuple(steps), results, choice.choice(list(_LOSSES)) if backward else "", choice.random() < 0.1)


def build(wanted: Recipe, dtype: torch.dtype = torch.float64) -> Recorded:
    """Records a network. The numbers that it is given are the same in every type, but for rounding."""
    torch.manual_seed(0)
    first = torch.randn(_STARTS[wanted.start], dtype=torch.float64)
    making = Making()
    _run(wanted, making, first.clone().requires_grad_(bool(wanted.loss)), None)
    given = [first, *making.parameters]
    inputs = [t.to(dtype) if t.is_floating_point() else t for t in given]
    for tensor in inputs:
        tensor.requires_grad_(bool(wanted.loss) and tensor.is_floating_point())
    kinds = ["batch", *("parameter" if t.is_floating_point() else "batch" for t in making.parameters)]
    made = record(lambda x, *parameters: _run(wanted, making, x, parameters), inputs, kinds)
    return made if wanted.unread else replace(made, graph=_needed(made.graph))


def _needed(graph: Graph) -> Graph:
    """Without what leads to no result."""
    edit = GraphEdit(graph)
    wanted = {value.node for value in graph.outputs}
    for node in reversed(graph.nodes_in_order()):
        if node.id in wanted or node.is_input:
            wanted.update(value.node for value in node.inputs)
        else:
            edit.remove(node.id)
    return edit.finish()


def _run(wanted: Recipe, making: Making, x: Tensor, given: Sequence[Tensor] | None) -> list[Tensor]:
    making.begin(given)
    making.pool = pool = [x]
    for step in wanted.steps:
        making.choice = random.Random(step.seed)
        source = pool[-1 - step.which % len(pool)]
        pointwise = _POINTWISE.get(step.name)
        made = pointwise(source) if pointwise else _LAYERS[step.name](making, source)
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if 0 < tensor.numel() <= LARGEST and tensor.dim() and all(tensor is not t for t in pool):
                pool.append(tensor)
    made = pool[1:] or [torch.tanh(x)]
    results = list({id(t): t for t in (made[-1 - i % len(made)] for i in wanted.results)}.values())
    if not wanted.loss:
        return results
    loss = _LOSSES[wanted.loss](making, results[0])
    for other in results[1:]:
        loss = loss + other.mean()
    leaves = [t for t in (x, *(given or making.parameters)) if t.is_floating_point()]
    if given is None:
        return [loss]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [loss, *(g for g in gradients if g is not None)]
