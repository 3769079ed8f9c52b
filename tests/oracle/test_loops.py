"""Loops of every operator rule, on its samples: none is wrong, none is missing. And that the oracle would notice."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import pytest
import torch

from magis.ir.args import Args, Kwargs
from magis.ir.graph import Call
from magis.ops.loop import Axis, Concat, Loop, Reduce, Same
from magis.ops.registry import rule_for
from magis.ops.rule import OpRule, Sample, T
from oracle.loop_child import LoopChild
from oracle.loops import loop_problems
from oracle.run import Case, case_of, rules
from oracle.test_samples import OTHER_DEVICES, WITHOUT_META, samples


@pytest.fixture(scope="module")
def child() -> Iterator[LoopChild]:
    with LoopChild() as made:
        yield made


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """PyTorch warns of beta and deprecated operators; one thread keeps small runs short."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def _cases(op: str) -> Iterator[Case]:
    if op not in WITHOUT_META:
        yield from (case_of(sample, "meta" if op in OTHER_DEVICES else "cpu") for sample in samples()[op])


@pytest.mark.parametrize("op", sorted(rules()))
def test_no_loop_is_wrong(op: str) -> None:
    assert not [problem for case in _cases(op) for problem in loop_problems(case)]


@pytest.mark.parametrize("op", sorted(rules()))
def test_no_loop_is_missing(op: str, child: LoopChild) -> None:
    assert not [problem for case in _cases(op) for problem in child.missing(case)]


def _injected(sample: Sample, *loops: Loop) -> list[str]:
    """What the oracle says of these loops in place of those of the sample's operator."""

    class Injected(type(rule_for(sample.op))):  # type: ignore[misc]
        def loops(self, call: Call) -> Iterable[Loop]:
            return loops

    return loop_problems(case_of(sample), Injected())


MM = Sample("aten.mm.default", (T((3, 6)), T((6, 4))))
ROWS = Loop((Axis(0, 3), None), (Concat(Axis(0, 3)),))
SUM = Loop((Axis(1, 6), Axis(0, 6)), (Reduce("sum"),))


def test_right_loops_are_not_reported() -> None:
    assert not _injected(MM, ROWS, SUM)


@pytest.mark.parametrize(
    "loop, words",
    [
        (Loop((Axis(0, 3), None), (Reduce("sum"),)), "have shapes"),
        (Loop((Axis(0, 3), None), (Same(),)), "no output is put together"),
        (Loop((Axis(0, 3), None), (Concat(Axis(1, 3)),)), "does not divide"),
        (Loop((Axis(1, 3), None), (Concat(Axis(0, 3)),)), "are refused"),
        (Loop((Axis(1, 6), Axis(0, 6)), (Reduce("average"),)), "average differs"),
        (Loop((Axis(1, 6), Axis(0, 6)), (Reduce("max"),)), "max differs"),
        (Loop((Axis(1, 6), Axis(0, 6)), (Same(),)), "no output is put together"),
        (Loop((Axis(1, 3, 2), Axis(0, 3)), (Reduce("sum"),)), "sum differs"),
        (Loop((Axis(1, 6), Axis(0, 6)), (None,)), "its role is none"),
        (Loop((Axis(0, 3),), (Concat(Axis(0, 3)),)), "1 axes and 1 roles for 2 inputs"),
        (Loop((None, Axis(0, 1, 6)), (Concat(Axis(0, 3)),)), "has an axis of length 1"),
        (Loop((Axis(1, 6), Axis(0, 6)), (Reduce("mean"),)), "is reduced by 'mean'"),
    ],
)
def test_wrong_loops_are_reported(loop: Loop, words: str) -> None:
    problems = _injected(MM, loop)
    assert problems
    assert words in problems[0]
    assert problems[0].startswith("aten.mm.default, loop (")


def test_positions_that_interact_are_reported() -> None:
    sample = Sample("aten._softmax.default", (T((3, 4)), 1, False))
    assert not _injected(sample, Loop((Axis(0, 3),), (Concat(Axis(0, 3)),)))
    assert "differs from the whole" in _injected(sample, Loop((Axis(1, 4),), (Concat(Axis(1, 4)),)))[0]


def test_order_is_reported() -> None:
    """Leading pieces of a padded dimension's factor may be right where inner ones are not: here neither."""
    sample = Sample("aten.cumsum.default", (T((2, 4)), 1))
    assert "differs" in _injected(sample, Loop((Axis(1, 4),), (Concat(Axis(1, 4)),)))[0]
    flip = Sample("aten.flip.default", (T((4, 3)), (0,)))
    assert "differs" in _injected(flip, Loop((Axis(0, 4),), (Concat(Axis(0, 4)),)))[0]


def test_arguments_that_do_not_shrink_are_reported() -> None:
    class Careless(type(rule_for("aten.expand.default"))):  # type: ignore[misc]
        def part(self, call: Call, loop: Loop, length: int) -> tuple[Args, Kwargs]:
            return call.args, call.kwargs

    case = case_of(Sample("aten.expand.default", (T((3, 1)), (3, 4))))
    assert not loop_problems(case)
    assert "are refused" in loop_problems(case, Careless())[0]


def test_a_bias_in_every_part_is_reported() -> None:
    sample = Sample("aten.addmm.default", (T((4,)), T((3, 6)), T((6, 4))))
    axes = (None, Axis(1, 6), Axis(0, 6))
    assert not _injected(sample, Loop(axes, (Reduce("sum"),), once=0))
    assert "sum differs" in _injected(sample, Loop(axes, (Reduce("sum"),)))[0]
    assert "cannot be added once" in _injected(sample, Loop(axes, (Reduce("sum"),), once=1))[0]


def test_writes_in_place_are_reported() -> None:
    sample = Sample("aten.add_.Tensor", (T((3, 4)), T((3, 4))))
    loop = Loop((Axis(0, 3), Axis(0, 3)), (Concat(Axis(0, 3)),))
    assert _injected(sample, loop) == ["aten.add_.Tensor: it writes in place, but has loops"]


class _Without(OpRule):
    """A product of matrices that knows only some of its loops."""

    def __init__(self, *loops: Loop) -> None:
        self.known_loops = loops

    def loops(self, call: Call) -> Iterable[Loop]:
        return self.known_loops


def test_lacking_loops_are_reported(child: LoopChild) -> None:
    columns = Loop((None, Axis(1, 4)), (Concat(Axis(1, 4)),))
    case = case_of(MM)
    assert not child.missing(case, _Without(ROWS, SUM, columns))
    assert child.missing(case, _Without(ROWS, SUM)) == [
        "aten.mm.default may run along a loop (input 1 dim 1 by 4 -> concat dim 1 by 4), which its rule lacks"
    ]
    (problem,) = child.missing(case, _Without(ROWS, columns))
    assert "(input 0 dim 1 by 6, input 1 dim 0 by 6 -> sum)" in problem
    assert len(child.missing(case, _Without())) == 3


def test_a_factor_does_not_stand_for_its_dimension(child: LoopChild) -> None:
    case = case_of(Sample("aten.relu.default", (T((6, 5)),)))
    whole, leading = Loop((Axis(0, 6),), (Concat(Axis(0, 6)),)), Loop((Axis(0, 3),), (Concat(Axis(0, 3)),))
    rest = Loop((Axis(1, 5),), (Concat(Axis(1, 5)),))
    ordered = Loop(whole.inputs, whole.roles, uniform=False)
    assert not child.missing(case, _Without(whole, rest))
    assert "input 0 dim 0 by 6 ->" in child.missing(case, _Without(leading, rest))[0]
    assert "input 0 dim 0 by 3 after 2 ->" in child.missing(case, _Without(ordered, rest))[0]
