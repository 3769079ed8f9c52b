"""Names for people."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.backend import naming


@pytest.mark.parametrize(
    ("path", "leaves", "name"),
    [
        ("bert.encoder.layer.0.attention.self.query", 1, "layer_0_query"),
        ("encoder.layer.11", 1, "layer_11"),
        ("encoder.layer.11.weight", 2, "layer_11_weight"),
        ("encoder.layer.0.attention.self.query.weight", 2, "layer_0_query_weight"),
        ("encoder.fc1.weight", 2, "fc1_weight"),
        ("weight", 2, "weight"),
        ("0", 1, "x0"),
        ("0.weight", 2, "x0_weight"),
        ("", 1, "x"),
        ("a b-c", 1, "a_b_c"),
    ],
)
def test_telling_ends(path: str, leaves: int, name: str) -> None:
    assert naming.stem(path, leaves) == name


@given(st.text(), st.integers(1, 3))
def test_every_stem_and_number_is_an_identifier(path: str, leaves: int) -> None:
    variable = f"{naming.stem(path, leaves)}_1"
    assert variable.isidentifier() and variable.isascii() and not keyword.iskeyword(variable)


@given(st.lists(st.text()))
def test_comments_are_one_printable_line(parts: list[str]) -> None:
    assert len(f"# {naming.comment(parts)}".splitlines()) == 1
