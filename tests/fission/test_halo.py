"""Parts that read through windows: which rows each operator of a part computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from einsums import Drawing

from magis.fission.halo import Rows, read, rows_of_parts
from magis.fission.parts import CannotSplitError
from magis.fission.tree import Cut, Fission
from magis.ir.graph import NodeId, Value
from magis.ops.loop import Axis, Concat, Loop, Reduce, Same, Window

SAME = Window(3, padding=1)
"""3 wide, as many positions out as in."""


def through(window: Window | None, length: int, out: int | None = None, inputs: int = 1) -> Loop:
    axis = Axis(0, length)
    return Loop((axis,) * inputs, (Concat(Axis(0, out or length)),), window=window)


def rows(build: Drawing, outputs: list[NodeId], loops: dict[NodeId, Loop], length: int, parts: int) -> list[Rows]:
    cuts = {node: Cut(0, 1, loop.length) for node, loop in loops.items()}
    fission = Fission(frozenset(loops), cuts, length, parts, halo=True)
    return rows_of_parts(build.graph(*outputs), fission, loops)


def test_each_window_adds_a_row_on_both_sides_within_the_whole() -> None:
    build = Drawing(h=12)
    one = build.op("h->h", build.input("h"))
    two = build.op("h->h", one)
    three = build.op("h->h", two)
    loops = {one: through(None, 12), two: through(SAME, 12), three: through(SAME, 12)}
    parts = rows(build, [three], loops, 12, 3)
    assert [part.shares[Value(three)] for part in parts] == [range(4), range(4, 8), range(8, 12)]
    assert parts[0].computed == {three: range(4), two: range(5), one: range(6)}
    assert parts[1].computed == {three: range(4, 8), two: range(3, 9), one: range(2, 10)}
    assert parts[2].computed == {three: range(8, 12), two: range(7, 12), one: range(6, 12)}


def test_a_skip_around_windows_takes_the_hull() -> None:
    build = Drawing(h=10)
    one = build.op("h->h", build.input("h"))
    two = build.op("h->h", one)
    joined = build.op("h,h->h", two, one)
    loops = {one: through(None, 10), two: through(SAME, 10), joined: through(None, 10, inputs=2)}
    parts = rows(build, [joined, one], loops, 10, 3)
    assert [part.computed[one] for part in parts] == [range(4), range(2, 7), range(5, 10)]
    assert [part.shares[Value(one)] for part in parts] == [range(3), range(3, 6), range(6, 10)]
    assert [part.computed[two] for part in parts] == [range(3), range(3, 6), range(6, 10)]


def test_results_of_other_lengths_have_their_own_shares() -> None:
    build = Drawing(h=8, g=4)
    one = build.op("h->h", build.input("h"))
    pooled = build.op("h->g", one)
    total = build.op("g->", pooled)
    summed = Loop((Axis(0, 4),), (Reduce(),))
    loops = {one: through(None, 8), pooled: through(Window(2, stride=2), 8, 4), total: summed}
    parts = rows(build, [one, total], loops, 8, 2)
    assert [part.shares[Value(one)] for part in parts] == [range(4), range(4, 8)]
    assert [part.computed for part in parts] == [
        {total: range(2), pooled: range(2), one: range(4)},
        {total: range(2, 4), pooled: range(2, 4), one: range(4, 8)},
    ]
    assert len(rows(build, [one, total], loops, 8, 8)) == 4  # no more parts than the shortest result has positions


@pytest.mark.parametrize(
    ("window", "given", "wanted"),
    [
        (Window(3, padding=1), range(4), range(5)),
        (Window(3, stride=2, padding=1), range(1, 3), range(1, 6)),
        (Window(3, dilation=2, padding=2), range(4, 6), range(2, 8)),
        (Window(2, stride=2), range(1, 2), range(2, 4)),
        (Window(2, stride=2, transposed=True), range(2, 4), range(1, 2)),
        (Window(4, stride=2, padding=1, transposed=True), range(4, 6), range(1, 4)),
        (None, range(3, 5), range(3, 5)),
    ],
)
def test_read(window: Window | None, given: range, wanted: range) -> None:
    assert read(through(window, 8), given) == wanted


@pytest.mark.parametrize(
    "window",
    [Window(3, 2, 1, 1), Window(3, 1, 2, 2), Window(5, 3, 1, 2), Window(4, 2), Window(3, 2, 1, 1, transposed=True)],
)
def test_read_equals_the_definition(window: Window) -> None:
    length = 12
    for start in range(3):
        given = range(start, start + 2)
        steps = [window.dilation * k - window.padding for k in range(window.kernel)]
        if window.transposed:
            wanted = {i for i in range(length) for step in steps if i * window.stride + step in given}
        else:
            wanted = {j * window.stride + step for j in given for step in steps} & set(range(length))
        assert read(through(window, length), given) == range(min(wanted), max(wanted) + 1), (window, given)


def test_refused() -> None:
    build = Drawing(h=8)
    one = build.op("h->h", build.input("h"))
    two = build.op("h->h", one)
    graph = build.graph(one)
    loops = {one: through(None, 8), two: through(SAME, 8)}
    fission = Fission(frozenset(loops), {}, 8, 2, halo=True)
    with pytest.raises(CannotSplitError, match=r"nobody needs %2 \(test.einsum\)"):
        rows_of_parts(graph, fission, loops)
    with pytest.raises(CannotSplitError, match="a region with a halo cannot hold other regions"):
        rows_of_parts(graph, replace(fission, children=(fission,)), loops)
    alone = replace(fission, region=frozenset([one]))
    with pytest.raises(CannotSplitError, match="%1 gives a result that parts with a halo cannot hand out"):
        rows_of_parts(graph, alone, {one: Loop((Axis(0, 8),), (Same(),))})
