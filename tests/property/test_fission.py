"""Random networks x random regions: parts give what the whole gives, and take the memory that was predicted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from layers import IMAGE, SMOOTH, Recipe, Step, build, recipe
from splits import check_split, exact_results, loosened, planned, random_split

from builder import record
from magis.fission.dim_graph import Vertex, dim_graph
from magis.fission.parts import CannotSplitError
from magis.fission.tree import Fission, Program
from magis.ops.loop import Axis, Concat, Loop, Reduce
from magis.ops.registry import rules
from magis.rules.split import split

KINDS = ("plain", "halo", "bfloat16", "float16", "float32")


def made(kind: str, number: int) -> tuple[random.Random, Recipe]:
    """The choices of a case, and its network."""
    choice = random.Random(f"{kind} {number}")
    if kind == "halo":
        return choice, recipe(choice, IMAGE, "image", choice.random() < 0.2)
    return choice, recipe(choice, () if kind == "plain" else SMOOTH)


def outcome(kind: str, number: int) -> str:
    """Runs a case: "checked", "refused", or "none" if the graph has no region of that kind."""
    choice, wanted = made(kind, number)
    narrow = kind not in ("plain", "halo")
    recorded = build(wanted, getattr(torch, kind) if narrow else torch.float64)
    try:
        found = random_split(loosened(recorded.graph), choice, kind == "halo")
        if found is None:
            return "none"
        check_split(recorded, found, exact_results(build(wanted)) if narrow else None)
    except CannotSplitError:
        return "refused"
    except Exception as error:
        error.add_note(f"case {number} of {kind}: {wanted}")
        raise
    return "checked"


def run(kind: str, numbers: Iterable[int]) -> None:
    found = Counter(outcome(kind, number) for number in numbers)
    assert found["checked"] >= found["refused"] + found["none"], found


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_whole(kind: str) -> None:
    run(kind, range({"plain": 30, "halo": 12}.get(kind, 4)))


@pytest.mark.parametrize(
    ("kind", "number", "what"),
    [
        ("plain", 13, "a view of a slice with gaps"),
        ("plain", 1048, "a bias, one region along the sum of products inside one along another dimension"),
        ("plain", 1066, "group norm of a slice with gaps"),
        ("halo", 1020, "a bias, rows inside a region along the sum of products"),
    ],
)
def test_cases_that_were_wrong(kind: str, number: int, what: str) -> None:
    assert outcome(kind, number) in ("checked", "refused"), what


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [1000, 2000, 3000])
def test_parts_are_the_whole_in_many_cases(kind: str, start: int) -> None:
    run(kind, range(start, start + {"plain": 200, "halo": 80}.get(kind, 30)))


ROWS, COLUMNS = Axis(0, 9), Axis(1, 8)
WRONG: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], Loop]] = {
    "softmax along its own axis": (
        "aten._softmax.default",
        lambda x: torch.softmax(x, 1),
        Loop((COLUMNS,), (Concat(COLUMNS),)),
    ),
    "a sum that is called an average": (
        "aten.sum.dim_IntList",
        lambda x: x.sum(0, keepdim=True),
        Loop((ROWS,), (Reduce("average"),)),
    ),
    "parts that are turned around each by itself": (
        "aten.flip.default",
        lambda x: x.flip(0),
        Loop((ROWS,), (Concat(ROWS),)),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_injected_wrong_rule(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, code, loop = WRONG[what]
    torch.manual_seed(0)
    recorded = record(lambda x: torch.tanh(code(torch.tanh(x))), [torch.randn(9, 8, dtype=torch.float64)])
    monkeypatch.setattr(type(rules()[op]), "loops", lambda self, call: (loop,))
    node = next(node.id for node in recorded.graph.nodes.values() if node.op == op)
    dims = dim_graph(recorded.graph)
    cut = dims.loop(Vertex(node, 0)).cut
    found = planned(split(Program(recorded.graph), Fission(frozenset([node]), {node: cut}, loop.length, 3)).program)
    with pytest.raises(AssertionError, match="result 0 is wrong by"):
        check_split(recorded, found)


def test_the_memory_of_parts_is_measured() -> None:
    choice = random.Random(1)
    recorded = build(Recipe("rows", (Step("linear", 0, 3), Step("gelu", 0, 0), Step("linear", 0, 7))))
    found = random_split(Program(recorded.graph), choice)
    assert found is not None
    with pytest.raises(AssertionError, match="planned"):
        check_split(recorded, replace(found, peak_bytes=found.peak_bytes + 1))
