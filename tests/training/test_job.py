"""What a rank reads of a batch: the tokens of its samples, and which of them carry loss."""

import json

import numpy as np
import pytest
from evenload.core.recipe.recipe import parse
from evenload.training.job import Job
from evenload.training.preflight import preflight

ROWS = [{"prompt": "a" * n, "completion": "b" * (n % 4)} for n in range(1, 13)]


@pytest.fixture
def ready(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENLOAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return preflight(parse({"data": {"source": str(tmp_path / "rows.jsonl")}, "train": {"global_batch_size": 6}}))


def job_of(ready):
    return Job(ready.recipe, None, None, ready.chain, None, ready.source)


def test_the_labels_of_a_draw_are_those_of_its_samples(ready):
    job = job_of(ready)
    drawing = job.drawing()
    draws = [drawing(), drawing()]
    assert [draw.without_target for draw in draws] == [6 - len(draw.samples) for draw in draws]
    assert sum(draw.without_target for draw in draws) == 3
    for draw in draws:
        labels, tokens = job.labels_of(draw), job.tokens_of(draw)
        for place, sample in enumerate(draw.samples.tolist()):
            row = ROWS[sample]
            assert bytes(tokens(place).tolist()).decode() == row["prompt"] + row["completion"]
            assert (labels.of(place) != -100).sum() == labels.targets[place] == len(row["completion"])


def test_a_sample_has_its_own_weights_and_those_of_its_draw(tmp_path, monkeypatch):
    """Of every third row each target has its own; rows of weight 0 are drawn and left out, and counted."""
    monkeypatch.setenv("EVENLOAD_CACHE", str(tmp_path / "cache"))
    rows = [
        {"text": "ab" * n, "w": [n, 0, -0.5][n % 3] if n % 3 else (np.arange(2 * n - 1) - 1.5).tolist()}
        for n in range(1, 13)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"source": str(tmp_path / "rows.jsonl"), "weight_column": "w"}
    ready = preflight(parse({"data": data, "train": {"global_batch_size": 6}}))
    job = job_of(ready)
    drawing = job.drawing()
    draws = [drawing(), drawing()]
    assert sum(draw.without_target for draw in draws) == 4
    factors = np.linspace(0.5, 2.0, len(draws[1].samples))
    for draw, of in ((draws[0], np.ones(len(draws[0].samples))), (draws[1]._replace(weight=factors), factors)):
        labels = job.labels_of(draw)
        for place, sample in enumerate(draw.samples.tolist()):
            weight = rows[sample]["w"]
            wanted = np.array(weight if isinstance(weight, list) else [weight] * int(draw.lengths[place] - 1))
            counts = labels.of(place)[1:] != -100
            assert labels.targets[place] == counts.sum() == np.count_nonzero(wanted)
            assert labels.weights.of(place)[1:][counts].tolist() == (of[place] * wanted[wanted != 0]).tolist()
            assert labels.weights.sums[place] == pytest.approx(of[place] * wanted.sum(), abs=1e-12)


def test_a_column_of_ones_draws_what_is_drawn_without(ready, tmp_path):
    ones = [{**row, "w": 1} for row in ROWS]
    (tmp_path / "ones.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ones))
    data = {"source": str(tmp_path / "ones.jsonl"), "weight_column": "w"}
    other = preflight(parse({"data": data, "train": {"global_batch_size": 6}}))
    assert other.source.fingerprint == ready.source.fingerprint
    jobs = [job_of(one) for one in (ready, other)]
    drawings = [job.drawing() for job in jobs]
    for _ in range(3):
        bare, draw = (drawing() for drawing in drawings)
        assert bare.samples.tolist() == draw.samples.tolist()
        assert bare.state == draw.state
        assert draw.weight_sums is None
        labels = jobs[1].labels_of(draw)
        assert labels.weights is None
