"""A workload: what the user hands in, checked. Model, loss function, batch, and optionally the update."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree

from magis.errors import UsageError

SGD_INPLACE = "sgd-inplace"
SGD_INPLACE_RATE = -0.01
LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A training step (`loss_fn(model, batch)` is the scalar loss) or, without `loss_fn`, an inference call
    `model(batch)`, `model(*batch)` or `model(**batch)`.

    `update` is None (gradients are kept), "sgd-inplace" (`w += -0.01 * gradient` as soon as it exists) or a
    `torch.optim` optimizer over the model's parameters.
    """

    model: torch.nn.Module
    loss_fn: LossFunction | None
    batch: Any
    update: str | torch.optim.Optimizer | None = None
    name: str = "model"

    @property
    def batch_size(self) -> int:
        """Length of the first dimension of the first batch tensor; 1 when there is none."""
        leaves = batch_tensors(self.batch)
        first = next((t for _, t in leaves if t.dim() > 0), None)
        return 1 if first is None else int(first.shape[0])

    def call(self, batch: Any) -> Any:
        """Runs loss or inference call on a batch of the same structure."""
        if self.loss_fn is not None:
            return self.loss_fn(self.model, batch)
        if isinstance(batch, Mapping):
            return self.model(**batch)
        return self.model(*batch) if isinstance(batch, (tuple, list)) else self.model(batch)


def workload(made: Any, name: str = "model") -> Workload:
    """Checks what a factory returned: `(model, loss_fn, batch)` or `(model, loss_fn, batch, update)`.

    Raises UsageError saying what to return instead."""
    if isinstance(made, Workload):
        return made
    expected = "return (model, loss_fn, batch) or (model, loss_fn, batch, update)"
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        raise UsageError(f"{name}: the factory returned {_described(made)}; {expected}")
    model, loss_fn, batch, update = (*made, None)[:4]
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{name}: the first item is {_described(model)}, not a torch.nn.Module; {expected}")
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(
            f"{name}: loss_fn is {_described(loss_fn)}; pass a function loss_fn(model, batch), or None for inference"
        )
    refuse_hidden_tensors(batch, name)
    if not batch_tensors(batch):
        raise UsageError(f"{name}: the batch holds no tensor; return the step's input tensors as the third item")
    if not (update is None or update == SGD_INPLACE or isinstance(update, torch.optim.Optimizer)):
        raise UsageError(
            f'{name}: the update is {_described(update)}; pass None, "{SGD_INPLACE}" or a torch.optim optimizer'
        )
    if update is not None and loss_fn is None:
        raise UsageError(f"{name}: an update needs gradients, so it needs a loss_fn")
    return Workload(model, loss_fn, batch, update, name)


def _described(value: Any) -> str:
    kind = type(value).__name__
    length = f" of {len(value)} items" if isinstance(value, (tuple, list)) else ""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}{length}"


def register_structure(batch: Any) -> None:
    """Lets dataclasses and mappings of any class (`BatchEncoding`) inside a batch be taken apart like dicts."""
    for item in _structure(batch):
        kind = type(item)
        if kind in pytree.SUPPORTED_NODES:
            continue
        if is_dataclass(kind):
            pytree.register_dataclass(kind)
        elif isinstance(item, Mapping):
            pytree.register_pytree_node(kind, _items, _refilled, flatten_with_keys_fn=_items_with_keys)
            _MAPPINGS.add(kind)


_MAPPINGS: set[type] = set()  # those that `register_structure` registered


def _structure(batch: Any) -> Iterator[Any]:
    """A batch and all that it is made of; each item is registered, if it has to be, before its parts are asked for."""
    todo = [batch]
    while todo:
        item = todo.pop()
        yield item
        parts = pytree.tree_leaves(item, is_leaf=lambda part, whole=item: part is not whole)
        todo += [part for part in parts if part is not item]


def _items(mapping: Mapping[Any, Any]) -> tuple[list[Any], Any]:
    return [mapping[key] for key in mapping], (list(mapping), mapping)


def _items_with_keys(mapping: Mapping[Any, Any]) -> tuple[list[tuple[Any, Any]], Any]:
    return [(pytree.MappingKey(key), mapping[key]) for key in mapping], (list(mapping), mapping)


def _refilled(values: Iterable[Any], context: Any) -> Any:
    """A mapping of the same class with other values wherever it holds the original's, so that it is read as before:
    by key, by attribute or through methods of its own."""
    keys, original = context
    news = {key: (original[key], new) for key, new in zip(keys, values)}
    try:
        made = copy.deepcopy(original, {id(old): new for old, new in news.values()})
        for key, (old, new) in news.items():
            if made[key] is not new:
                made[key] = new
            if getattr(original, str(key), None) is old and getattr(made, str(key), None) is not new:
                setattr(made, key, new)
    except Exception as error:
        raise UsageError(
            f"the batch's {type(original).__name__} cannot be copied ({_one_line(error)}); {_DO}"
        ) from error
    return made


_DO = "use a dict, tuple or dataclass, or register the class with torch.utils._pytree"


def refuse_hidden_tensors(batch: Any, name: str) -> None:
    """Raises UsageError if an object of the batch holds a tensor where it cannot be told from a constant."""
    leaves, _, _ = flatten_batch(batch)
    opaque = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    mappings = [item for item in _structure(batch) if type(item) in _MAPPINGS]
    for item in (*opaque, *mappings):
        if _hides_tensor(item, _items(item)[0] if type(item) in _MAPPINGS else ()):
            raise UsageError(f"{name}: the batch hides a tensor inside a {type(item).__name__} object; {_DO}")


def _hides_tensor(item: Any, known: Iterable[Any]) -> bool:
    """Whether an object leads to a tensor, through attributes and containers other than the known ones."""
    seen: dict[int, Any] = {id(part): part for part in known}  # kept, or its number might be another's soon
    todo = [item]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType, str, bytes)):
            continue
        if isinstance(item, torch.Tensor):
            return True
        seen[id(item)] = item
        todo += _parts(item)
    return False


def _parts(item: Any) -> list[Any]:
    parts = list(getattr(item, "__dict__", {}).values())
    for kind in type(item).__mro__:
        slots = vars(kind).get("__slots__", ())
        parts += [getattr(item, slot, None) for slot in ([slots] if isinstance(slots, str) else slots)]
    if isinstance(item, Mapping):
        parts += item.values()
    elif isinstance(item, (list, tuple, set, frozenset, deque)):
        parts += item
    return parts


def flatten_batch(batch: Any) -> tuple[list[Any], Any, list[str]]:
    """Leaves, structure and readable names ("input_ids", "0.mask") of a batch."""
    register_structure(batch)
    with_paths, structure = pytree.tree_flatten_with_path(batch)
    names = [".".join(_key(part) for part in path) or "batch" for path, _ in with_paths]
    return [leaf for _, leaf in with_paths], structure, names


def _key(part: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)


def batch_tensors(batch: Any) -> list[tuple[str, torch.Tensor]]:
    """Named tensors of a batch."""
    leaves, _, names = flatten_batch(batch)
    return [(name, leaf) for name, leaf in zip(names, leaves) if isinstance(leaf, torch.Tensor)]


def load_factory(reference: str) -> Callable[..., Any]:
    """The factory behind `file.py:factory` or `package.module:factory`.

    Raises UsageError in one line when the file, the module or the function is not there or fails to load."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UsageError(f"{reference!r} is no model: pass a zoo name, file.py:factory or package.module:factory")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    factory = getattr(module, name, None)
    if not callable(factory):
        found = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = f"; it has {', '.join(sorted(found)[:6])}" if found else ""
        raise UsageError(f"{place} has no function {name!r}{hint}")
    return factory  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    _look_in(path.parent)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise UsageError(f"{path} cannot be loaded: {_one_line(error)}") from error
    return module


def _look_in(folder: Path) -> None:
    """Lets the user's code import what lies beside it, also later; last, so that it hides nothing installed."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def _load_module(name: str) -> Any:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(f"module {name} cannot be loaded: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def call_factory(factory: Callable[..., Any], name: str) -> Workload:
    """Runs a factory and checks its result. Raises UsageError when it raises."""
    try:
        made = factory()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"the factory {name} raised {_one_line(error)}") from error
    return workload(made, name)
