"""A rewrite in progress: new nodes get their types from PyTorch, and so does all that reads what changed.

A rewrite may give a tensor another layout (a slice of a merged product has gaps between its rows). Readers are then
typed anew; where one of them refuses the new layout the rewrite does not apply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from magis.fission.parts import CannotInferError, Infer
from magis.fission.tree import Program
from magis.ir.args import Arg, Kwargs, Slot, Symbol
from magis.ir.dtype import DType
from magis.ir.edit import GraphEdit
from magis.ir.graph import Call, Node, NodeId, Origin, TensorSpec, Value
from magis.ops.registry import rule_for
from magis.rules.base import Change, changed, remove_unread, same_home

_UNKNOWN = TensorSpec((), (), DType.F32, 0)
_CONTIGUOUS: Kwargs = (("memory_format", Symbol("memory_format", "contiguous_format")),)


class CannotRewriteError(CannotInferError):
    """A rewrite that does not apply after all."""


class Rewriting:
    """Collects the changes of one rewrite. Every method may raise CannotInferError: the rewrite does not apply."""

    def __init__(self, program: Program, infer: Infer) -> None:
        self.program, self.infer = program, infer
        self.graph = program.graph
        self.edit = GraphEdit(program.graph)
        self._replaced: set[NodeId] = set()
        self._added: set[NodeId] = set()

    def spec(self, value: Value) -> TensorSpec:
        """The type of a value as it stands now."""
        spec = self.edit.node(value.node).outputs[value.output]
        if spec is None:
            raise CannotRewriteError(f"%{value.node}.{value.output} is not a tensor")
        return spec

    def call(
        self,
        op: str,
        inputs: Iterable[Value],
        *args: Arg,
        kwargs: Kwargs = (),
        outputs: int = 1,
        origin: Origin = Origin(),
    ) -> NodeId:
        """Adds a node; `Slot(i)` among its arguments is the i-th of `inputs`."""
        values = tuple(inputs)
        specs = tuple(self.spec(value) for value in values)
        device = specs[0].device if specs else "cpu"
        given = Call(op, args, kwargs, specs, (replace(_UNKNOWN, device=device),) * outputs)
        aliases = rule_for(op).aliases(given)
        given = replace(given, outputs=tuple(replace(_UNKNOWN, alias_of=a, device=device) for a in aliases))
        made = self.edit.add(op, values, self.infer(given), args, kwargs, origin=origin)
        self._added.add(made)
        return made

    def add(
        self, op: str, inputs: Iterable[Value], *args: Arg, kwargs: Kwargs = (), origin: Origin = Origin()
    ) -> Value:
        """Adds a node with one result, and gives that."""
        return Value(self.call(op, inputs, *args, kwargs=kwargs, origin=origin))

    def contiguous(self, value: Value) -> Value:
        """The value itself if it is contiguous, else a copy that is."""
        if self.spec(value).is_contiguous:
            return value
        origin = self.edit.node(value.node).origin
        return self.add("aten.clone.default", (value,), Slot(0), kwargs=_CONTIGUOUS, origin=origin)

    def replace(self, old: Value, new: Value) -> None:
        """Makes every reader of `old` but added nodes, and the graph's outputs, take `new`, a tensor of the same shape
        and type."""
        before, after = self.spec(old), self.spec(new)
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise CannotRewriteError(f"{after.shape} {after.dtype} in the place of {before.shape} {before.dtype}")
        if old in self.graph.outputs:
            new = self._handed_back(new, before)
        self.edit.redirect_all(old, new, keep=self._added.__contains__)
        self._replaced.add(old.node)

    def _handed_back(self, value: Value, wanted: TensorSpec) -> Value:
        """A value that may be given to the caller: with its own storage and eager's layout."""
        spec = self.spec(value)
        if spec.alias_of is None and spec.strides == wanted.strides:
            return value
        if wanted.alias_of is not None or not wanted.is_contiguous:
            raise CannotRewriteError("the caller gets a tensor of that layout")
        return self.add("aten.clone.default", (value,), Slot(0), kwargs=_CONTIGUOUS)

    def finish(self, unread: Iterable[NodeId] = ()) -> Change:
        """The changed program, without those nodes of `unread`, of what was replaced, and of what only they read, that
        nobody needs any more. The rewrite must not cross the border of a region that runs in parts."""
        remove_unread(self.edit, self.program, self._replaced | set(unread))
        touched = [n for n in self.edit.old_nodes if n in self.graph.nodes and not self.graph.nodes[n].is_input]
        if not same_home(self.program, touched):
            raise CannotRewriteError("crosses the border of a region")
        self._retype()
        return changed(self.program, self.edit)

    def _retype(self) -> None:
        """Types anew what reads values whose type has changed, and what reads that."""
        now = self.edit.finish()
        new: dict[Value, TensorSpec] = {}
        for node in now.nodes_in_order():
            before = self.graph.nodes.get(node.id)
            if node.is_input or not self._reads_other_types(node, before, new):
                continue
            made = self.infer(_call(self, node, new))
            for i, (old, spec) in enumerate(zip(node.outputs, made)):
                if (old is None) != (spec is None):
                    raise CannotRewriteError(f"{node.op} gives other results")
                if old is not None and spec is not None and (old.shape, old.dtype) != (spec.shape, spec.dtype):
                    raise CannotRewriteError(f"{node.op} gives a result of another shape")
                if spec is not None and spec != old:
                    if Value(node.id, i) in now.outputs:
                        raise CannotRewriteError("the caller would get a tensor of another layout")
                    new[Value(node.id, i)] = spec
            if made != node.outputs:
                self.edit.replace_node(replace(node, outputs=made))

    def _reads_other_types(self, node: Node, before: Node | None, new: dict[Value, TensorSpec]) -> bool:
        if any(value in new for value in node.inputs):
            return True
        if before is None or before.inputs == node.inputs:
            return False
        return any(self.graph.spec(old) != self.spec(value) for old, value in zip(before.inputs, node.inputs)) or len(
            before.inputs
        ) != len(node.inputs)


def _call(rewriting: Rewriting, node: Node, new: dict[Value, TensorSpec]) -> Call:
    specs = tuple(new.get(value) or rewriting.spec(value) for value in node.inputs)
    return Call(node.op, node.args, node.kwargs, specs, node.outputs)
