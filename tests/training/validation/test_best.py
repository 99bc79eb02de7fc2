"""The lowest loss that a checkpoint keeps counts for the samples that it was measured on."""

import json
import logging
import math
from types import SimpleNamespace

from evenload.data.sources import open_source
from evenload.training.validation.validation import ValidationRun


def held_out(folder, letter):
    path = folder / f"{letter}.jsonl"
    path.write_text("".join(json.dumps({"text": letter * 8}) + "\n" for _ in range(20)))
    return open_source(str(path), max_length=64)


def restored(source, state):
    """The lowest loss of a run that goes on."""
    one = SimpleNamespace(_job=SimpleNamespace(source=source), _best=math.inf, _best_of=None)
    ValidationRun._restore(one, state)
    best = one._best
    return best


def test_it_is_gone_on_with_where_the_samples_are_the_same(tmp_path, caplog):
    source = held_out(tmp_path, "a")
    of = SimpleNamespace(_job=SimpleNamespace(source=source), _best=1.5, _best_of=None)
    state = ValidationRun.state(of)["validation"]
    assert restored(held_out(tmp_path, "a"), state) == 1.5
    assert restored(source, {**state, "best": None}) == math.inf
    assert not caplog.records
    assert restored(source, {**state, "data": source.fingerprint.partition("-")[0]}) == 1.5
    assert "data.validation: an earlier version kept their lengths alone" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "evenload"):
        assert restored(held_out(tmp_path, "s"), state) == math.inf
        assert restored(source, {**state, "of": "code"}) == math.inf, "it was the lowest of that domain"
    assert "its lowest loss is found anew" in caplog.text
