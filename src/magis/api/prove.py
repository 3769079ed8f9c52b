"""The proof: the program's results against eager's, tensor by tensor, and the random generator's final state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite

import torch
import torch.utils._pytree as pytree

from magis.api.eager import EagerStep, Snapshot, written_tensors
from magis.api.scale import Scale, scales
from magis.aten.convert import core_dtype
from magis.capture.capture import Captured
from magis.capture.workload import Workload, register_structure
from magis.ir.graph import Value

UNSTEADY_UNITS = 8
"""By how many rounding units parameters are changed to see how steady eager's results are."""
UNSTEADY_DRAWS = 2
Results = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ProofResult:
    """Whether the program computes what eager computes.

    `max_rel_error` is the largest error of a tensor divided by that tensor's scale; `tensors` how many were
    compared; `batch` the batch size at which; `failures` one line for each tensor that differs."""

    ok: bool
    max_rel_error: float
    tensors: int
    batch: int
    failures: tuple[str, ...] = ()


def prove(
    workload: Workload,
    captured: Captured,
    step: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]],
    seed: int = 0,
    reference: Results | None = None,
) -> ProofResult:
    """Runs eager and `step` from the same weights and generator state and compares all that they leave.

    `reference` are more exact results (eager's in float64); without it eager is the reference. Weights,
    buffers and state are put back afterwards."""
    state = {} if captured.update is None else captured.update.state(workload)
    written = written_tensors(workload, state)
    snapshot = Snapshot(written)
    torch.manual_seed(seed)
    eager = {name: tensor.clone() for name, tensor in EagerStep(workload).results().items()}
    eager_generator = torch.get_rng_state()
    eager |= snapshot.current()
    snapshot.restore()
    torch.manual_seed(seed)
    with torch.no_grad():
        returned = step(captured.bind(workload))
    ours = {name: tensor.clone() for name, tensor in zip(captured.graph.output_names, returned)}
    del returned
    generator = torch.get_rng_state()
    ours |= snapshot.current()
    snapshot.restore()
    torch.manual_seed(seed)
    found = result_scales(captured, workload, ours)
    snapshot.restore()
    failures, worst = compare(ours, eager, found, reference)
    if failures:
        kinks = unsteadiness(workload, snapshot, eager, seed)
        failures, worst = compare(ours, eager, found, reference, kinks)
    if not torch.equal(generator, eager_generator):
        failures.append("the random generator's final state differs from eager's")
    return ProofResult(not failures, worst, len(ours), workload.batch_size, tuple(failures))


def unsteadiness(workload: Workload, snapshot: Snapshot, eager: Results, seed: int) -> dict[str, float]:
    """How far each of eager's own results moves when its parameters change by some rounding units.

    Where functions have kinks (ReLU at 0, the largest of equals), a difference of one rounding may turn a gradient on
    or off: no bound on sums explains that, but eager itself shows it (ADR 9)."""
    found: dict[str, float] = {}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(UNSTEADY_DRAWS):
        with torch.no_grad():
            for parameter in workload.model.parameters():
                if parameter.is_floating_point():
                    unit = UNSTEADY_UNITS * torch.finfo(parameter.dtype).eps
                    noise = torch.rand(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
                    parameter.mul_(1 + unit * (2 * noise - 1))
        torch.manual_seed(seed)
        moved = {name: tensor.clone() for name, tensor in EagerStep(workload).results().items()}
        moved |= snapshot.current()
        snapshot.restore()
        for name in moved.keys() & eager.keys():
            if moved[name].dtype.is_floating_point and moved[name].shape == eager[name].shape:
                found[name] = max(found.get(name, 0.0), _distance(moved[name], eager[name]))
    return found


def exact_results(workload: Workload, seed: int = 0) -> dict[str, torch.Tensor]:
    """Eager's results in float64, from the same weights and generator state: the reference at small sizes."""
    model = copy.deepcopy(workload.model).double()
    register_structure(workload.batch)
    batch = pytree.tree_map(_double, workload.batch)
    double = Workload(model, workload.loss_fn, batch, workload.update, workload.name)
    torch.manual_seed(seed)
    found = EagerStep(double).results()
    return {**found, **{name: t.detach().clone() for name, t in written_tensors(double, {}).items()}}


def _double(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.detach().double().requires_grad_(leaf.requires_grad)


def result_scales(captured: Captured, workload: Workload, names: Mapping[str, object]) -> dict[str, Scale]:
    """The scale of each result that the captured step makes; unwritten tensors have none."""
    graph = captured.graph
    values = dict(zip(graph.output_names, graph.outputs))
    for node in graph.nodes.values():
        for output, spec in enumerate(node.outputs):
            if spec is not None and spec.writes:
                owner = graph.nodes[graph.root(Value(node.id, output)).node]
                values[f"{owner.kind}:{owner.name}"] = Value(node.id, output)
    return scales(graph, {n: v for n, v in values.items() if n in names}, captured.bind(workload))


def compare(
    ours: Results,
    eager: Results,
    found: Mapping[str, Scale],
    reference: Results | None = None,
    kinks: Mapping[str, float] | None = None,
) -> tuple[list[str], float]:
    """One line for each result that differs by more than rounding allows, and the largest scaled error.

    Per tensor `max|ours - ref| <= 4 * max|eager - ref| + tolerance(scale)`, where eager counts as at least as far from
    the reference as its `kinks` say (see `unsteadiness`); integers and booleans exactly. Where an
    inference call's output is infinite in eager too, with the same sign, it is equal."""
    failures = [f"{name}: eager has it, the program does not" for name in eager.keys() - ours.keys()]
    failures += [f"{name}: the program has it, eager does not" for name in ours.keys() - eager.keys()]
    worst = 0.0
    for name in sorted(ours.keys() & eager.keys()):
        unsteady = (kinks or {}).get(name, 0.0)
        exact = (reference or {}).get(name)
        failure, error = _compare_one(name, ours[name], eager[name], found.get(name), exact, unsteady)
        worst = max(worst, error if isfinite(error) else float("inf"))
        if failure:
            failures.append(f"{name}: {failure}")
    return sorted(failures), worst


def _compare_one(
    name: str,
    ours: torch.Tensor,
    eager: torch.Tensor,
    scale: Scale | None,
    reference: torch.Tensor | None,
    unsteady: float,
) -> tuple[str, float]:
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return f"is {ours.dtype}{list(ours.shape)}, eager's {eager.dtype}{list(eager.shape)}", 0.0
    if scale is None or not ours.dtype.is_floating_point:
        same = torch.equal(ours, eager) or _equal_with_nan(ours, eager)
        return ("" if same else "differs from eager's, which nothing should change"), 0.0
    ref = (eager if reference is None else reference).double()
    same = torch.isinf(eager) & (ours == eager)
    if name.startswith("output:") and bool(same.any()):
        ours, eager, ref = (tensor.masked_fill(same, 0.0) for tensor in (ours, eager, ref))
        scale = _finite(scale, eager)
    if not bool(torch.isfinite(ours).all()):
        return "holds a value that is not finite", float("inf")
    error = _distance(ours, ref)
    allowed = scale.tolerance(core_dtype(ours.dtype).eps) + 4.0 * max(_distance(eager, ref), unsteady)
    relative = error / scale.size if scale.size > 0 else (0.0 if error == 0 else float("inf"))
    if not (isfinite(allowed) and error <= allowed):
        return f"differs by {error:.3e}, rounding explains {allowed:.3e}", relative
    if scale.change is not None and not _same_change(
        ours, eager.double(), scale.change, core_dtype(ours.dtype).eps, 4.0 * unsteady
    ):
        return "its change differs from eager's by more than rounding explains", relative
    return "", relative


def _finite(scale: Scale, eager: torch.Tensor) -> Scale:
    """The scale of an output with infinities, of which its terms say nothing: the largest of its other values."""
    return scale if 0 < scale.size < float("inf") else replace(scale, size=_distance(eager, torch.zeros_like(eager)))


def _same_change(ours: torch.Tensor, eager: torch.Tensor, change: Scale, eps: float, unsteady: float) -> bool:
    """Whether a tensor that was changed in place was changed alike: element by element, within the tolerance of the
    change and the rounding of its addition."""
    allowed = change.tolerance(eps) + unsteady + 2.0 * eps * eager.abs()
    return bool(((ours.double() - eager).abs() <= allowed).all())


def _equal_with_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype.is_floating_point and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max().item()) if a.numel() else 0.0
