"""What is known of an operator for memory and cost: the interface of an operator rule (one class a kind).

A rule is pure: it sees a `Call` (literals and tensor types), never a tensor, and never imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from magis.ir.args import Arg, Args, Kwargs, Slot, substitute
from magis.ir.dtype import DType
from magis.ir.graph import Call, TensorSpec, contiguous_strides
from magis.ops.loop import Concat, Loop, part_shape


@dataclass(frozen=True, slots=True)
class Gemm:
    """`batch` matrix products [m,k] x [k,n]: 2*batch*m*n*k floating-point operations."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply and an add each."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: its matrix products, and the bytes that it reads and writes, each tensor once.

    `dtype` decides the peak rate of the matrix products."""

    nbytes: int
    gemms: tuple[Gemm, ...] = ()
    dtype: DType = DType.F32
    fused: bool = False  # its products share one launch and keep their intermediate results on the chip

    @property
    def flops(self) -> int:
        """Floating-point operations of its matrix products."""
        return sum(gemm.flops for gemm in self.gemms)


@dataclass(frozen=True, slots=True)
class T:
    """A tensor argument of a sample: shape, type, and for integers the values' exclusive upper bound."""

    shape: tuple[int, ...]
    dtype: DType = DType.F32
    high: int = 2
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Sample:
    """One example call for the oracle: arguments with `T` where tensors go."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class WindowPart:
    """One part of a call that reads a window: run it on the input's positions `reads` of the loop's axis, with
    `pads` more positions of value `pad_value` before and after them, with these arguments; of its result keep `keep`
    positions from `skip` on."""

    reads: range
    pads: tuple[int, int]
    pad_value: float
    args: Args
    kwargs: Kwargs
    skip: int
    keep: int


class OpRule:
    """Knowledge of a kind of operator. Subclasses list their overloads in `ops` and override what differs.

    The defaults describe a memory-bound operator that makes new tensors: one launch, every tensor read
    once and written once, deterministic, may be recomputed.
    """

    ops: ClassVar[tuple[str, ...]] = ()
    random: ClassVar[bool] = False
    recomputable: ClassVar[bool] = True
    known: ClassVar[bool] = True
    shape_at: ClassVar[int | None] = None
    contiguous_at: ClassVar[tuple[int, ...]] = ()

    @property
    def family(self) -> str:
        """The family of operators it belongs to, such as `pointwise`: the module that describes it."""
        return type(self).__module__.rpartition(".")[2]

    def types(self, call: Call) -> tuple[TensorSpec | None, ...] | None:
        """The results of a call that is no operator of PyTorch; `call.outputs` are those of the original. None for all
        others: PyTorch is asked."""
        return None

    def aliases(self, call: Call) -> tuple[int | None, ...]:
        """For each output the index of the input whose storage it shares; None where it makes its own."""
        return tuple(None for _ in call.outputs)

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        """What it launches. Empty for views: they cost nothing."""
        return one_launch(call)

    def flops(self, call: Call) -> int:
        """Floating-point operations of its matrix products, and one for each element written otherwise."""
        products = sum(kernel.flops for kernel in self.kernels(call))
        return products or sum(spec.numel for spec in call.outputs if spec is not None and spec.alias_of is None)

    def workspace_bytes(self, call: Call) -> int:
        """Bytes that it allocates and frees while it runs, as far as they follow from its definition."""
        return 0

    def storage_bytes(self, call: Call, output: int) -> int:
        """Bytes of the storage that an output is given. Some kernels allocate more than its elements."""
        spec = call.outputs[output]
        return 0 if spec is None else spec.storage_bytes

    def draws(self, call: Call) -> bool:
        """Whether this call takes numbers from the random generator (PyTorch's own tag is asked as well)."""
        return self.random or not self.known

    def loops(self, call: Call) -> Iterable[Loop]:
        """The axes along which the call may run in parts. None by default, which is always safe: it is run whole."""
        return ()

    def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
        """The arguments of a part that has `length` of the loop's positions; `loop` is one of `loops(call)`, or its
        refinement. Operators whose arguments depend on shapes rewrite them here. By default, an argument listed in
        `shape_at` (its position) is the shape of the first result."""
        role, result = loop.roles[0], call.outputs[0]
        if self.shape_at is None or not isinstance(role, Concat) or result is None:
            return call.args, call.kwargs
        shape = part_shape(result.shape, role.axis, length)
        return (*call.args[: self.shape_at], shape, *call.args[self.shape_at + 1 :]), call.kwargs

    def contiguous_inputs(self, call: Call) -> frozenset[int]:
        """Numbers of the inputs whose slices have to be copies, unless they are contiguous: those of the arguments at
        `contiguous_at`. Some kernels read them without looking at their strides."""
        values = (argument(call, place, "") for place in self.contiguous_at)
        return frozenset(value.index for value in values if isinstance(value, Slot))

    def without_bias(self, call: Call, loop: Loop) -> tuple[Call, tuple[int, ...]]:
        """For a loop with `once`: the call without that input (and without it among `inputs`), and the shape, with as
        many dimensions as the result, that makes the input broadcast to the result."""
        raise NotImplementedError(f"{call.op} has no bias")

    def adding(self, call: Call) -> tuple[str, Args, Kwargs] | None:
        """An operator that adds the call's only result to a tensor in place, and its arguments, where
        `Slot(len(call.inputs))` is that tensor. None when there is none that spares the result."""
        return None

    def windowed(self, call: Call, loop: Loop, rows: range) -> WindowPart:
        """For a loop with `window`: how to compute the output positions `rows`."""
        raise NotImplementedError(f"{call.op} reads no window")

    def terms(self, call: Call, output: int) -> int:
        """K: how many terms are summed into one element of an output; 1 when nothing is reduced."""
        return 1

    def squared_terms(self, torch: Any, call: Call, tensors: Sequence[Any], output: int) -> Any:
        """Sum of the squares of the terms summed into each element of an output, as a tensor.

        `torch` is handed in, so that rules import nothing. None when nothing is reduced: the scale is then
        the output's own magnitude. Default for multilinear operators: see `squared_by_linearity`."""
        return None

    def samples(self) -> Iterable[Sample]:
        """Example calls on which the oracle checks the rule against execution."""
        return ()


class UnknownOp(OpRule):
    """What holds for an operator that no rule describes: cost by bytes, never recomputed, never split."""

    recomputable = False
    known = False

    def aliases(self, call: Call) -> tuple[int | None, ...]:
        """As captured."""
        return tuple(None if spec is None else spec.alias_of for spec in call.outputs)


def read_bytes(call: Call) -> int:
    """Bytes of its tensor inputs, each once (an expanded tensor counts the elements that exist)."""
    return sum(stored_bytes(spec) for spec in call.inputs)


def written_bytes(call: Call) -> int:
    """Bytes of its tensor outputs."""
    return sum(spec.nbytes for spec in call.outputs if spec is not None)


def one_launch(call: Call, *unread: TensorSpec | None) -> tuple[Kernel, ...]:
    """One launch that reads every input once, but for those that give it only a shape, and writes every output."""
    ignored = sum(stored_bytes(spec) for spec in unread if spec is not None)
    return (Kernel(read_bytes(call) - ignored + written_bytes(call), dtype=compute_dtype(call)),)


def stored_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor's distinct elements: dimensions of stride 0 count once."""
    count = 1
    for length, stride in zip(spec.shape, spec.strides):
        count *= length if stride != 0 or length == 0 else 1
    return count * spec.dtype.nbytes


def compute_dtype(call: Call) -> DType:
    """The first floating-point type among inputs, else outputs, else f32."""
    for spec in (*call.inputs, *call.outputs):
        if spec is not None and spec.dtype.is_floating:
            return spec.dtype
    return DType.F32


def argument(call: Call, position: int, name: str, default: Arg = None) -> Arg:
    """An argument given by position or by keyword."""
    if position < len(call.args):
        return call.args[position]
    return dict(call.kwargs).get(name, default)


def tensor_argument(call: Call, position: int, name: str) -> TensorSpec | None:
    """The tensor type given by position or by keyword; None when it is absent."""
    value = argument(call, position, name)
    return call.inputs[value.index] if isinstance(value, Slot) else None


def square(tensor: Any) -> Any:
    """A tensor's elements squared: half precision in float32, integers in float64."""
    if not tensor.is_floating_point():
        tensor = tensor.double()
    elif tensor.element_size() < 4:
        tensor = tensor.float()
    return tensor * tensor


def squared_by_linearity(torch: Any, call: Call, tensors: Sequence[Any], run: Any) -> Any:
    """For an operator whose result is a sum of products of its inputs: the operator on their squares.

    Half-precision tensors are widened to float32 first; tensors of integers (indices) stay as they are."""
    squares = [square(t) if t.is_floating_point() else t for t in tensors]
    args = tuple(substitute(a, lambda slot: squares[slot.index]) for a in call.args)
    kwargs = {name: substitute(a, lambda slot: squares[slot.index]) for name, a in call.kwargs}
    return run(*args, **kwargs)


def dense(shape: tuple[int, ...], dtype: DType = DType.F32) -> TensorSpec:
    """The type of a new row-major tensor."""
    spec = TensorSpec(shape, contiguous_strides(shape), dtype, 0)
    return replace(spec, storage_bytes=spec.nbytes)
