"""Edits: what they change, what they record, and fingerprints that follow."""

from __future__ import annotations

import random
from dataclasses import replace

from graphs import Builder, dense, graphs, random_edit, trained, view
from hypothesis import given, settings
from hypothesis import strategies as st

from magis.ir.args import Slot
from magis.ir.edit import GraphEdit
from magis.ir.fingerprint import digest, fingerprint, renumber, update_fingerprint
from magis.ir.graph import Graph, NodeId, Origin, Value
from magis.ir.structure import topological_order

N = [NodeId(i) for i in range(10)]


def chain() -> Graph:
    """%0 x -> %1 exp -> %2 neg, %3 mul(%1, %2), which is handed back."""
    build = Builder()
    x = build.input()
    a = build.op("exp", x, origin=Origin("block", "net.py:1"))
    b = build.op("neg", a)
    return build.graph(build.op("mul", a, b))


def test_the_old_graph_stays() -> None:
    graph = chain()
    before = dict(graph.nodes)
    edit = GraphEdit(graph)
    edit.remove(N[3])
    edit.set_outputs([Value(N[2])], ["other"])
    assert edit.finish() != graph
    assert graph.nodes == before and graph.output_names == ("out0",)


def test_an_added_node_is_new() -> None:
    edit = GraphEdit(chain())
    node = edit.add("aten.tanh.default", [Value(N[1])], [dense(4)], (Slot(0),))
    assert node == 4
    assert (edit.old_nodes, edit.new_nodes) == (set(), {4})


def test_a_copy_reads_the_same_and_says_so() -> None:
    edit = GraphEdit(chain())
    copy = edit.copy(N[1], "recomputed from")
    first, second = edit.node(N[1]), edit.node(copy)
    assert replace(second, id=N[1]) == first
    assert second.origin == Origin("block (recomputed from %1)", "net.py:1")
    assert (edit.old_nodes, edit.new_nodes) == (set(), {copy})


def test_a_redirected_reader_is_touched_on_both_sides() -> None:
    edit = GraphEdit(chain())
    copy = edit.copy(N[1], "copy of")
    edit.redirect(N[3], Value(N[1]), Value(copy))
    assert edit.node(N[3]).inputs == (Value(copy), Value(N[2]))
    assert (edit.old_nodes, edit.new_nodes) == ({3}, {3, copy})
    assert edit.node(N[2]).inputs == (Value(N[1]),)


def test_redirecting_to_the_same_changes_nothing() -> None:
    edit = GraphEdit(chain())
    edit.redirect(N[3], Value(N[1]), Value(N[1]))
    edit.redirect(N[2], Value(N[3]), Value(N[1]))  # which it does not read
    edit.replace_node(edit.node(N[2]))
    assert (edit.old_nodes, edit.new_nodes) == (set(), set())


def test_redirecting_all_moves_outputs_too_and_keeps_who_is_named() -> None:
    graph = chain()
    edit = GraphEdit(graph)
    edit.set_outputs([Value(N[1])])
    copy = edit.copy(N[1], "copy of")
    edit.redirect_all(Value(N[1]), Value(copy), keep=lambda n: n == N[2])
    done = edit.finish()
    assert done.outputs == (Value(copy),)
    assert done.users[copy] == (3,) and done.users[N[1]] == (2,)


def test_two_inputs_that_become_one_share_a_slot() -> None:
    edit = GraphEdit(chain())
    edit.redirect(N[3], Value(N[2]), Value(N[1]))
    node = edit.node(N[3])
    assert (node.inputs, node.args) == ((Value(N[1]),), (Slot(0), Slot(0)))


def test_aliases_follow_their_slot() -> None:
    build = Builder()
    x = build.input()
    y = build.edit.add(
        "aten.odd.default", (x, x, x), [view(4, of=2), None], ((Slot(0), Slot(1)),), (("key", (Slot(2),)),)
    )
    node = build.edit.node(y)
    assert (node.args, node.kwargs) == (((Slot(0), Slot(0)),), (("key", (Slot(0),)),))
    assert node.outputs[0] is not None and node.outputs[0].alias_of == 0


def test_a_removed_node_is_old_unless_it_was_never_there() -> None:
    edit = GraphEdit(chain())
    node = edit.add("aten.tanh.default", [Value(N[1])], [dense(4)], (Slot(0),))
    edit.remove(node)
    edit.remove(N[3])
    edit.set_outputs([Value(N[2])])
    assert (edit.old_nodes, edit.new_nodes) == ({3}, set())


def test_a_changed_then_removed_node_is_old_only() -> None:
    edit = GraphEdit(chain())
    edit.redirect(N[3], Value(N[2]), Value(N[1]))
    edit.remove(N[3])
    assert (edit.old_nodes, edit.new_nodes) == ({3}, set())


@settings(deadline=None, max_examples=150)
@given(graphs(), st.integers(0, 10**6))
def test_an_updated_fingerprint_is_the_full_one(graph: Graph, seed: int) -> None:
    edit = random_edit(graph, seed)
    after = edit.finish()
    updated = update_fingerprint(fingerprint(graph), graph, after, edit.old_nodes, edit.new_nodes)
    assert updated == fingerprint(after)


def test_fingerprints_chain_over_many_edits() -> None:
    graph = trained()
    mark = fingerprint(graph)
    for seed in range(40):
        edit = random_edit(graph, seed)
        after = edit.finish()
        mark = update_fingerprint(mark, graph, after, edit.old_nodes, edit.new_nodes)
        graph = after
    assert mark == fingerprint(graph)


@settings(deadline=None, max_examples=60)
@given(graphs(), st.integers(0, 10**6))
def test_numbers_do_not_matter(graph: Graph, seed: int) -> None:
    chosen = random.Random(seed)
    rank = {node: chosen.randrange(100) for node in graph.nodes}
    moved = renumber(graph, {node: NodeId(3 * i + 1) for i, node in enumerate(data_order(graph, rank))})
    assert digest(moved) == digest(graph)
    assert fingerprint(moved).total == fingerprint(graph).total


def data_order(graph: Graph, rank: dict[NodeId, int]) -> list[NodeId]:
    """A random order that respects data only."""
    plain = {n: replace(node, stream=None, outputs=tuple(unwritten(node.outputs))) for n, node in graph.nodes.items()}
    return list(topological_order(replace(graph, nodes=plain), rank))


def unwritten(outputs: object) -> object:
    return [spec and replace(spec, writes=False) for spec in outputs]  # type: ignore[attr-defined]


def test_copies_that_take_the_place_of_their_original_keep_the_digest() -> None:
    graph = chain()
    edit = GraphEdit(graph)
    copy = edit.copy(N[1], "copy of")
    edit.redirect_all(Value(N[1]), Value(copy))
    edit.remove(N[1])
    assert digest(edit.finish()) == digest(graph)
    assert fingerprint(edit.finish()).total == fingerprint(graph).total


def test_who_reads_which_of_two_copies_matters() -> None:
    def split(first: tuple[int, ...]) -> Graph:
        build = Builder()
        x = build.input()
        copies = build.op("exp", x), build.op("exp", x)
        readers = [build.op(name, copies[i in first]) for i, name in enumerate(["neg", "sin", "cos", "tan"])]
        return build.graph(*readers)

    marks = {(fingerprint(split(first)).total, digest(split(first))) for first in [(), (1,), (1, 2), (1, 3), (2, 3)]}
    assert len(marks) == 5
    assert fingerprint(split((0, 1))).total == fingerprint(split((2, 3))).total  # copies exchanged
    assert digest(split((0, 1))) == digest(split((2, 3)))


def test_what_is_handed_back_matters() -> None:
    graph = chain()
    edit = GraphEdit(graph)
    edit.set_outputs([Value(N[2])])
    assert fingerprint(edit.finish()).total != fingerprint(graph).total
    assert digest(edit.finish()) != digest(graph)
    assert fingerprint(edit.finish()).nodes == fingerprint(graph).nodes


def test_origins_do_not_matter() -> None:
    graph = chain()
    nodes = {n: replace(node, origin=Origin("elsewhere")) for n, node in graph.nodes.items()}
    other = replace(graph, nodes=nodes)
    assert other == graph and digest(other) == digest(graph) and fingerprint(other) == fingerprint(graph)
