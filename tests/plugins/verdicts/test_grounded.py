"""Prompts from a graph: nodes, edges and walks that are there, each with what it rests on."""

import evenload
import pytest
from evenload import EvenloadError, grounded_prompts
from hypothesis import given
from hypothesis import strategies as st

NODES = {"tea": "a drink", "leaf": "part of a plant", "water": "a liquid", "cup": "a vessel"}
EDGES = [("tea", "leaf", "is made of"), ("tea", "water", "is brewed in"), ("cup", "tea", "holds")]


def test_each_kind_by_hand():
    rows = grounded_prompts(NODES, EDGES, hops=2)
    by_kind = {kind: [row for row in rows if row["source"]["kind"] == kind] for kind in ("node", "edge", "walk")}
    assert [len(by_kind[kind]) for kind in by_kind] == [4, 3, 3]
    assert {row["prompt"] for row in by_kind["node"]} == {f"What is {name}?" for name in NODES}
    edge = next(row for row in by_kind["edge"] if "leaf" in row["prompt"])
    assert edge["prompt"] == "How are tea and leaf related?"
    assert edge["source"] == {
        "kind": "edge", "nodes": ["tea", "leaf"], "texts": ["a drink", "is made of", "part of a plant"],
    }  # fmt: skip
    for row in by_kind["walk"]:
        start, middle, end = row["source"]["nodes"]
        assert middle == "tea"
        assert row["prompt"] == f"How is {start} connected to {end} by way of tea?"
        assert row["source"]["texts"][::2] == [NODES[start], "a drink", NODES[end]]


@given(
    edges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda e: e[0] != e[1]), max_size=30),
    number=st.integers(1, 8),
    hops=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_sources_are_of_the_graph(edges, number, hops, seed):
    nodes = {f"n{n}": f"text {n}" for n in range(10)}
    rows = [(f"n{a}", f"n{b}", f"{min(a, b)} to {max(a, b)}") for a, b in edges]
    prompts = grounded_prompts(nodes, iter(rows), number, hops, seed)
    assert prompts == grounded_prompts(nodes, rows, number, hops, seed)
    kinds = [row["source"]["kind"] for row in prompts]
    assert kinds.count("node") == min(number, 10)
    assert kinds.count("edge") == min(number, len(rows))
    assert kinds.count("walk") <= number
    texts = {text for _, _, text in rows}
    for row in prompts:
        names, source = row["source"]["nodes"], row["source"]
        assert len(names) == len(set(names)) == {"node": 1, "edge": 2, "walk": hops + 1}[source["kind"]]
        assert source["texts"][::2] == [nodes[name] for name in names]
        assert set(source["texts"][1::2]) <= texts
        assert all(name in row["prompt"] for name in (names[0], names[-1]))


@pytest.mark.parametrize(
    ("nodes", "edges", "how", "said"),
    [
        ({}, [], {}, "graph without nodes"),
        (NODES, [("tea", "milk", "with")], {}, "not between two nodes"),
        (NODES, [("tea", "tea", "is")], {}, "not between two nodes"),
        (NODES, [("tea", "cup")], {}, "not between two nodes"),
        (NODES, EDGES, {"number": 0}, "number is not an integer"),
        (NODES, EDGES, {"hops": 0}, "hops is not an integer"),
    ],
)
def test_what_is_no_graph_is_refused(nodes, edges, how, said):
    with pytest.raises(EvenloadError, match=said):
        evenload.grounded_prompts(nodes, edges, **how)
