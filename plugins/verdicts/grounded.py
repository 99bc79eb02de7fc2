"""Prompts whose answers a graph knows: about its nodes, its edges, and walks along them.

After the evaluation of GraphRAG by Zeng et al. (arXiv 2506.06331), whose questions rest on parts of the graph in place
of a model's memory. A line of the result is a line for `evenload generate --prompts`; what it rests on stands next to
the prompt, for a judge or a reader to check answers by.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from ...core.errors import refuse_first, shown
from ...core.input.bounds import SEQUENCES, whole_number


def grounded_prompts(
    nodes: Mapping[str, str], edges: Iterable[tuple[str, str, str]], number: int = 50, hops: int = 3, seed: int = 0
) -> list[dict[str, Any]]:
    """Prompts about drawn nodes, edges and walks of a graph, at most ``number`` of each kind.

    Args:
        nodes: the text of each node by its name.
        edges: names of two nodes, and the text of what is between them; they may be walked both ways.
        hops: edges of a walk, which visits no node twice; walks that end sooner are left out.

    Gives rows ``{"prompt", "source": {"kind", "nodes", "texts"}}``. Raises EvenloadError for a graph without a node, an
    edge between nodes that are not there, or a number below 1.
    """
    number, hops = whole_number(number, "number", SEQUENCES), whole_number(hops, "hops", SEQUENCES)
    draw, neighbours = random.Random(seed), defaultdict[str, dict[str, str]](dict)
    rows = list(edges)
    refuse_first((not nodes, "a graph without nodes has no prompts", shown(nodes), "give name: text"))
    for row in rows:
        odd = len(row) != 3 or row[0] not in nodes or row[1] not in nodes or row[0] == row[1]
        do = "give (node, other node, text), with names of the nodes"
        refuse_first((odd, "an edge is not between two nodes of the graph", shown(row), do))
        neighbours[row[0]][row[1]] = neighbours[row[1]][row[0]] = row[2]
    named = [_row(f"What is {node}?", "node", [node], [nodes[node]]) for node in _some(draw, sorted(nodes), number)]
    joined = [
        _row(f"How are {a} and {b} related?", "edge", [a, b], [nodes[a], text, nodes[b]])
        for a, b, text in _some(draw, rows, number)
    ]
    starts = _some(draw, sorted(neighbours), len(neighbours))
    walks = [walk for start in starts if len(walk := _walk(draw, neighbours, start, hops)) > hops][:number]
    return [*named, *joined, *(_of_walk(walk, nodes, neighbours) for walk in walks)]


def _some(draw: random.Random, rows: list[Any], number: int) -> list[Any]:
    return draw.sample(rows, min(number, len(rows)))


def _walk(draw: random.Random, neighbours: Mapping[str, Mapping[str, str]], start: str, hops: int) -> list[str]:
    walk = [start]
    while len(walk) <= hops and (left := sorted(neighbours[walk[-1]].keys() - set(walk))):
        walk.append(draw.choice(left))
    return walk


def _of_walk(walk: list[str], nodes: Mapping[str, str], neighbours: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    texts = [nodes[walk[0]]]
    for a, b in pairwise(walk):
        texts += [neighbours[a][b], nodes[b]]
    between = ", ".join(walk[1:-1])
    prompt = f"How is {walk[0]} connected to {walk[-1]}" + (f" by way of {between}?" if between else "?")
    return _row(prompt, "walk", walk, texts)


def _row(prompt: str, kind: str, nodes: list[str], texts: list[str]) -> dict[str, Any]:
    return {"prompt": prompt, "source": {"kind": kind, "nodes": nodes, "texts": texts}}
