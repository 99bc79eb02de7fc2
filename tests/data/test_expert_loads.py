"""Recorded loads: what was written comes back, damage is named, and ranks form groups of any size in their order."""

import re
from pathlib import Path

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data import expert_loads
from evenload.data.expert_loads import RecordedLoads, read_loads

from .files import jsonl

HEADER = {"format": 1, "experts": 4, "topk": 2, "layers": [0, 2], "ranks": 2, "ep": 2}


def drawn(rounds, seed):
    """Counts [rounds][2 layers][2 ranks][4 experts]."""
    counts = np.random.default_rng(seed).integers(0, 9, (rounds, 2, 2, 4)).tolist()
    return counts


def written(path, *lines):
    return Path(jsonl(path, lines))


def test_what_was_written_comes_back(tmp_path):
    counts = {3: drawn(2, 0), 4: [], 5: drawn(1, 1)}
    loads = read_loads(written(tmp_path / "l.jsonl", HEADER, *({"step": s, "counts": c} for s, c in counts.items())))
    assert (loads.num_experts, loads.topk, loads.layers, loads.num_ranks, loads.ep) == (4, 2, (0, 2), 2, 2)
    assert {step: of.tolist() for step, of in loads.steps.items()} == counts
    assert loads.steps[4].shape == (0, 2, 2, 4)


def test_steps_that_a_resumed_run_trained_again_count_once(tmp_path):
    steps = [{"step": step, "counts": drawn(1, place)} for place, step in enumerate((0, 1, 2, 3, 1, 2))]
    loads = read_loads(written(tmp_path / "l.jsonl", HEADER, *steps))
    assert {step: counts.tolist() for step, counts in loads.steps.items()} == {
        step: drawn(1, place) for step, place in ((0, 0), (1, 4), (2, 5))
    }


@pytest.mark.parametrize(
    ("lines", "what", "detail"),
    [
        ([], "holds no loads", "an empty file"),
        ([HEADER], "holds no loads", "0 steps"),
        ([HEADER, {"step": 0, "counts": []}], "holds no loads", "1 steps, none with a round"),
        ([[1, 2]], "line 1 of .* is not a header", ""),
        ([HEADER | {"format": 2}], "line 1 of .* is not a header", "format: 2"),
        ([HEADER | {"experts": 0}], "line 1 of .* is not a header", "experts: 0"),
        ([HEADER | {"more": 0}], "line 1 of .* is not a header", "more"),
        ([HEADER | {"layers": []}], "names no layers", ""),
        ([HEADER | {"layers": [2, 0]}], "names no layers", r"\(2, 0\)"),
        ([HEADER | {"topk": 5}], "more experts for a token", "topk=5"),
        ([HEADER | {"ep": 3, "ranks": 3}], "does not divide the experts", "ep=3"),
        ([HEADER | {"ranks": 3}], "does not divide the ranks", "ranks=3"),
        ([HEADER, '{"step": 0, "cou', {"step": 1, "counts": drawn(1, 0)}], "line 2 of .* is not valid JSON", ""),
        ([HEADER, 7], "line 2 of .* is not a step", "7"),
        ([HEADER, {"counts": drawn(1, 0)}], "line 2 of .* is not a step", ""),
        ([HEADER, {"step": -1, "counts": drawn(1, 0)}], "line 2 of .* is not a step", ""),
        ([HEADER, {"step": 0}], r"line 2 of .* has no counts \[round\]", "no lists"),
        ([HEADER, {"step": 0, "counts": [drawn(1, 0)[0][:1]]}], "has no counts", r"\(1, 1, 2, 4\), its header says"),
        ([HEADER, {"step": 0, "counts": [[[[1, 2, 3, 4], [1, 2, 3]]] * 2]}], "has no counts", "unequal"),
        ([HEADER, {"step": 0, "counts": [[[[1, 2, 3, 4.5]] * 2] * 2]}], "has no counts", "float64"),
        ([HEADER, {"step": 0, "counts": [[[[1, 2, 3, -4]] * 2] * 2]}], "not a number of tokens", "-4"),
        ([HEADER, {"step": 0, "counts": [[[[1, 2, 3, 1 << 41]] * 2] * 2]}], "not a number of tokens", str(1 << 41)),
        ([HEADER, {"step": 0, "counts": [[[[1, 2, 3, 1 << 70]] * 2] * 2]}], "has no counts", "object"),
    ],
)
def test_a_damaged_file_is_refused_by_name_in_three_parts(tmp_path, lines, what, detail):
    with pytest.raises(EvenloadError, match=what) as caught:
        read_loads(written(tmp_path / "l.jsonl", *lines))
    assert re.search(detail, caught.value.found)
    assert caught.value.do


@pytest.mark.parametrize("kept", [1, 0.6, 0.1])
def test_a_last_line_that_is_cut_short_is_named_with_its_remedy(tmp_path, kept):
    path = written(tmp_path / "l.jsonl", HEADER, {"step": 0, "counts": drawn(1, 0)}, {"step": 1, "counts": drawn(2, 1)})
    *before, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(before) + last[: int(kept * (len(last) - 2))])
    with pytest.raises(EvenloadError, match=r"line 3 of .* is not valid JSON") as caught:
        read_loads(path)
    assert "the file ends inside this line: delete it" in caught.value.do


def test_a_file_of_more_counts_than_memory_holds_is_refused(tmp_path, monkeypatch):
    steps = [{"step": step, "counts": drawn(1, step)} for step in (0, 1, 1, 2)]
    monkeypatch.setattr(expert_loads, "_MOST_COUNTS", 3 * 16)
    assert len(read_loads(written(tmp_path / "l.jsonl", HEADER, *steps)).steps) == 3
    monkeypatch.setattr(expert_loads, "_MOST_COUNTS", 3 * 16 - 1)
    with pytest.raises(EvenloadError, match="is too large"):
        read_loads(tmp_path / "l.jsonl")


def recorded(rounds, ranks=4, ep=2):
    """Every rank of every round has a number of its own, in the order in which they stand."""
    steps, at = {}, 0
    for step, count in rounds.items():
        rows = np.arange(at, at + count * ranks).reshape(count, 1, ranks, 1)
        steps[step], at = np.tile(rows, (1, 1, 1, 8)), at + count * ranks
    return RecordedLoads("l.jsonl", 8, 1, (0,), ranks, ep, steps)


@pytest.mark.parametrize(
    ("ep", "wanted"),
    [
        (1, {0: [[n] for n in range(8)], 1: [[n] for n in range(8, 20)]}),
        (2, {0: [[n, n + 1] for n in range(0, 8, 2)], 1: [[n, n + 1] for n in range(8, 20, 2)]}),
        (4, {0: [[0, 1, 2, 3], [4, 5, 6, 7]], 1: [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]}),
        (8, {0: [list(range(8))], 1: [list(range(8, 16))]}),  # rounds stand side by side; a rest is left out
        (16, {1: [list(range(16))]}),  # steps do
    ],
)
def test_recorded_ranks_form_groups_of_any_size_in_their_order(ep, wanted):
    groups = recorded({0: 2, 1: 3}).in_groups(ep)
    assert {step: counts[:, 0, :, 0].tolist() for step, counts in groups.items()} == wanted


def test_layers_and_experts_keep_their_places(tmp_path):
    counts = drawn(3, 7)
    loads = read_loads(written(tmp_path / "l.jsonl", HEADER, {"step": 0, "counts": counts}))
    assert loads.in_groups(2)[0].tolist() == counts
    (two,) = loads.in_groups(4).values()
    assert two[0, :, :2].tolist() == counts[0]
    assert two[0, :, 2:].tolist() == counts[1]


@pytest.mark.parametrize(("ep", "what"), [(3, "cannot be regrouped"), (32, "too few loads")])
def test_what_cannot_be_regrouped_is_refused_by_name(ep, what):
    with pytest.raises(EvenloadError, match=what) as caught:
        recorded({0: 2, 1: 3}).in_groups(ep)
    assert f"parallel.ep {ep}" in caught.value.found
    assert caught.value.do
