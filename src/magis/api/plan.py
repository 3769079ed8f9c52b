"""Plans: what to run instead of eager's step, what is predicted of it, and everything that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

import magis
from magis.api.costs import Progress, silent
from magis.api.costs import cost_model as cost_model
from magis.api.limits import BUDGET_S, DEFAULT_BUDGET, NO_LIMITS, NO_SPLITS, Budget, Limits, Splits
from magis.api.limits import budget as check_budget
from magis.api.limits import limits as check_limits
from magis.api.limits import splits as check_splits
from magis.api.limits import strategy as check_strategy
from magis.api.lowering import lowered
from magis.api.models import ModelSource, resolve
from magis.api.planning import plan_step
from magis.api.pytorch import torch_version
from magis.api.regions import Region, regions_of
from magis.cost.model import short_hash
from magis.ir.fingerprint import digest
from magis.ir.graph import INPUT_KINDS, Graph, Value
from magis.ir.text import print_graph
from magis.lower.launches import launches
from magis.search.search import Found
from magis.search.strategy import DEFAULT, Strategy
from magis.sim.estimate import Estimate

FORMAT = 3
"""Version of the plan file; changes whenever a reader of the older version would misread it."""


def ratio(part: float, whole: float) -> float:
    """part / whole; 1 when both are nothing, as for a step that only makes views."""
    return part / whole if whole else (1.0 if not part else float("inf"))


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the plan had to keep to: latency at most `max_slowdown` times the baseline's, peak at most
    `memory_bytes`. None: no such limit."""

    max_slowdown: float | None = None
    memory_bytes: int | None = None


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Predicted memory and time of one step: everything live at the worst moment; the same without what was
    live before the step; seconds."""

    peak_bytes: int
    step_peak_bytes: int
    latency_s: float


class Baseline(Prediction, frozen=True, forbid_unknown_fields=True):
    """Eager's step, and the bytes of the model's parameters."""

    parameter_bytes: int


class RuleUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a transformation rule did: sites proposed, states made there, how often the plan has it, seconds."""

    name: str
    sites: int
    applied: int
    kept: int
    seconds: float


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that the search started from, such as the one that recomputes each block."""

    name: str
    peak_bytes: int
    latency_s: float


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the plan was found: seconds, programs made and variants evaluated, why it stopped, when the plan was the
    best, and what it was made from."""

    seconds: float
    states: int
    stop_reason: str
    best_at_s: float
    rules: tuple[RuleUse, ...] = ()
    starts: tuple[Start, ...] = ()
    evaluated: int = 0


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the plan's numbers were last proven equal to eager's; `max_rel_error` is the largest error over
    all tensors, each divided by its own scale. `program` is the `program_hash` of what was proven: of an edited plan
    nothing is known."""

    program: str
    torch: str
    device: str
    batch: int
    tensors: int
    max_rel_error: float


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan, as it is written to its file. `model`, `sizes` and `seed` say how to build the model again.

    `digest` is that of the captured step that was planned. `program` and `schedule` are text (ids in order);
    `latencies_s` and `workspaces_bytes` the seconds and the workspace of each launch, those of a loop's body once;
    `costs` says in words where they come from, `cost_table` identifies them.
    `history` is the list of (rule, site) that led from the captured step to the program.
    """

    format: int = FORMAT
    magis: str
    torch: str
    model: str
    sizes: dict[str, int]
    seed: int
    batch: int
    device: str
    latency_source: Literal["simulated", "measured"]
    costs: str
    cost_table: str
    limit: Limit
    met: bool
    baseline: Baseline
    optimized: Prediction
    regions: tuple[Region, ...] = ()
    search: Search
    history: tuple[tuple[str, tuple[int, ...]], ...] = ()
    certificate: Certificate | None = None
    digest: str
    latencies_s: tuple[float, ...]
    workspaces_bytes: tuple[int, ...]
    schedule: str
    program: str

    @property
    def memory_ratio(self) -> float:
        """Predicted peak, as a fraction of the baseline's."""
        return ratio(self.optimized.peak_bytes, self.baseline.peak_bytes)

    @property
    def latency_overhead(self) -> float:
        """Predicted extra latency, as a fraction of the baseline's."""
        return ratio(self.optimized.latency_s, self.baseline.latency_s) - 1.0

    def source(self) -> ModelSource:
        """The model that was planned. Raises UsageError when it is a zoo model that does not exist."""
        return resolve(self.model, self.sizes, self.seed)


def make_plan(
    source: ModelSource,
    device: str = "cpu",
    progress: Progress = silent,
    limits: Limits = NO_LIMITS,
    budget: Budget = DEFAULT_BUDGET,
    splits: Splits = NO_SPLITS,
    swap_dir: Path | None = None,
    host_memory: int | str | None = None,
    strategy: Strategy = DEFAULT,
) -> Plan:
    """Plans a step within limits. Without any, the plan is the captured step itself, in eager's order; with `splits`
    that ask for regions, it is the step with exactly these.

    `device` is "cpu" (operators are measured, at first use up to a minute), a preset or a `.toml` file. A plan that
    misses its limits is the best that was found, with `met` false. At most `host_memory` (bytes or a size) is swapped
    out at a time; on a CPU nothing is without `swap_dir`, a folder for a file.
    Raises UsageError for an unknown device, model or folder, CaptureError when the step cannot be captured."""
    costs = cost_model(device, swap_dir, host_memory)
    progress(f"capturing {source.reference}")
    captured = source.capture()
    planned = plan_step(captured.graph, captured.schedule, costs, limits, budget, progress, splits, strategy)
    graph, found = planned.program.graph, planned.found
    calls = [call for call, _ in launches(lowered(planned.program, planned.schedule))]
    return Plan(
        magis=magis.__version__,
        torch=torch_version(),
        model=source.reference,
        sizes=dict(source.sizes),
        seed=source.seed,
        batch=batch_size(graph),
        device=costs.device,
        latency_source=costs.source,
        costs=costs.words,
        cost_table=costs.table_hash(),
        limit=Limit(limits.max_slowdown, planned.peak_limit_bytes),
        met=planned.met,
        baseline=Baseline(*_predicted(planned.baseline), bytes_by_kind(captured.graph)["parameter"]),
        optimized=Prediction(*_predicted(planned.optimized)),
        regions=regions_of(planned.program),
        search=_search(found),
        history=found.best.history,
        digest=digest(captured.graph),
        latencies_s=tuple(costs.latency_s(call) for call in calls),
        workspaces_bytes=tuple(costs.workspace_bytes(call) for call in calls),
        schedule=" ".join(map(str, planned.schedule)),
        program=print_graph(graph),
    )


def _predicted(estimate: Estimate) -> tuple[int, int, float]:
    return estimate.peak_bytes, estimate.step_peak_bytes, estimate.latency_s


def _search(found: Found) -> Search:
    used = tuple(RuleUse(r.name, r.sites, r.applied, r.kept, r.seconds) for r in found.rules)
    starts = tuple(Start(start.name, start.peak_bytes, start.latency_s) for start in found.starts)
    return Search(found.seconds, found.states, found.stop_reason, found.best_at_s, used, starts, found.evaluated)


def plan(
    model: str,
    *,
    max_slowdown: float | None = None,
    memory_limit: int | float | str | None = None,
    device: str = "cpu",
    batch: int | None = None,
    seq: int | None = None,
    image: int | None = None,
    seed: int = 0,
    budget_s: float | None = BUDGET_S,
    iterations: int | None = None,
    split: Sequence[str] = (),
    accumulate: str = "float32",
    swap_dir: Path | None = None,
    host_memory: int | str | None = None,
    starts: str = "all",
    without: Sequence[str] = (),
    search: str = "best",
) -> Plan:
    """Plans a model by reference: a zoo name, `file.py:factory` or `package.module:factory`.

    `max_slowdown` is a factor of eager's time; `memory_limit` is bytes, a size such as "8GiB", or a share of eager's
    peak (0.4 or "40%"). Without `budget_s` and `iterations` the search goes on until nothing better is in sight.
    `split` asks for regions, such as "batch=4" or "heads=2@encoder.layer.0", each inside those before it where they
    overlap: the plan has exactly these. `accumulate` is the type in which sums of half-precision parts are kept:
    "float32" or "same". `swap_dir`, `host_memory`: see `make_plan`. With `starts` "none" the search is handed no plans
    made by hand; rules named in `without` are left out; `search` "paper" is Algorithm 3 alone.
    Raises UsageError for limits that nothing can keep to, and what `make_plan` raises."""
    sizes = {"batch": batch, "seq": seq, "image": image}
    wanted = check_limits(max_slowdown, memory_limit)
    allowed, cut = check_budget(budget_s, iterations), check_splits(split, accumulate)
    return make_plan(
        resolve(model, sizes, seed),
        device,
        limits=wanted,
        budget=allowed,
        splits=cut,
        swap_dir=swap_dir,
        host_memory=host_memory,
        strategy=check_strategy(starts, without, search),
    )


def program_hash(plan: Plan) -> str:
    """Identifies a plan's program and its order, to the letter."""
    regions = "".join(f"{r.parent} {r.length} {r.parts} {r.wide} {r.halo} {r.cuts}\n" for r in plan.regions)
    return short_hash(f"{plan.program}\n{plan.schedule}\n{regions}" if regions else f"{plan.program}\n{plan.schedule}")


def batch_size(graph: Graph) -> int:
    """Length of the first dimension of the first batch tensor; 1 when there is none."""
    shapes = (graph.spec(Value(node.id)).shape for node in graph.inputs if node.kind == "batch")
    return next((shape[0] for shape in shapes if shape), 1)


def bytes_by_kind(graph: Graph) -> dict[str, int]:
    """Bytes that the caller's tensors hold, each storage once, for every kind of input."""
    found = dict.fromkeys(INPUT_KINDS, 0)
    for node in graph.inputs:
        found[node.kind] += graph.spec(Value(node.id)).storage_bytes
    return found
