"""Figure 7: moves in the tree of regions, by the number of parts of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from examples import EXAMPLES

from magis.fission.moves import Forest, coarser, disable, divisors, enable, finer, lift
from magis.fission.tree import Fission
from magis.ir.graph import NodeId

FIGURE = EXAMPLES["fig7_moves"]
CASES = {case["rule"]: case for case in FIGURE["cases"]}
REGIONS = {"A": {0, 1, 2, 3, 4, 5}, "B": {1, 2, 3, 4}, "C": {1}, "D": {2, 3}, "E": {3}}
LENGTH = 12

Parts = dict[str, int]


def tree(parts: Parts, length: int = LENGTH) -> Forest:
    def node(name: str) -> Fission:
        children = tuple(node(child) for child, above in FIGURE["tree_parent"].items() if above == name)
        region = frozenset(map(NodeId, REGIONS[name]))
        return Fission(region, {}, length, parts.get(name, 1), children, name)

    return (node("A"),)


def moves(rule: Callable[[Forest], Iterator[Forest]], parts: Parts, length: int = LENGTH) -> list[Parts]:
    found = [
        {each.dimension: each.parts for root in forest for each in root.walk() if each.parts > 1}
        for forest in rule(tree(parts, length))
    ]
    assert all(found.count(each) == 1 for each in found)
    return found


@pytest.mark.parametrize(
    ("name", "rule"), [("enable", enable), ("lift", lift), ("disable", disable), ("mutate", finer)]
)
def test_drawn(name: str, rule: Callable[[Forest], Iterator[Forest]]) -> None:
    case = CASES[name]
    found = moves(rule, case["before"], case.get("length", LENGTH))
    assert [each for each in case["results"] if each not in found] == []


def test_neither_leaf_nor_parent_of_an_enabled_region_is_not_enabled() -> None:
    assert moves(enable, {"E": 2}) == [{"C": 2, "E": 2}, {"D": 2, "E": 2}]
    assert moves(enable, {}) == [{"C": 2}, {"E": 2}]


def test_a_region_inside_an_enabled_one_is_not_lifted() -> None:
    assert moves(lift, {"D": 2, "E": 2}) == [{"B": 2, "E": 2}]
    assert moves(lift, {"A": 2}) == []


def test_a_region_around_an_enabled_one_is_not_disabled() -> None:
    assert moves(disable, {"D": 2, "E": 2}) == [{"D": 2}]
    assert moves(disable, {"C": 2, "E": 2}) == [{"E": 2}, {"C": 2}]


def test_parts_are_divisors() -> None:
    counts = [2, 3, 4, 6, 12]
    assert ", ".join(map(str, counts)) == CASES["mutate"]["next_values"]
    assert divisors(LENGTH) == [1, *counts]
    for fewer, more in pairwise(counts):
        assert moves(finer, {"D": fewer}) == [{"D": more}]
        assert moves(coarser, {"D": more}) == [{"D": fewer}]
    assert moves(finer, {"D": 12}) == moves(coarser, {"D": 2}) == []
    assert moves(enable, {}, length=1) == []
    assert moves(enable, {}, length=7)[0] == {"C": 7}


def test_overlapping_candidates_are_not_enabled_together() -> None:
    def candidate(*nodes: int, parts: int = 1, children: Forest = ()) -> Fission:
        return Fission(frozenset(map(NodeId, nodes)), {}, 4, parts, children)

    enabled = candidate(0, 1, parts=2)
    assert list(enable((enabled, candidate(1, 2)))) == []
    assert list(enable((enabled, candidate(0, 1)))) == []  # the same nodes along another dimension
    assert list(enable((enabled, candidate(2)))) == [(enabled, candidate(2, parts=2))]
    beside = candidate(1, 2, 3, children=(candidate(1),))
    assert list(enable((enabled, beside))) == []  # inside the enabled region, but of another one in the tree
