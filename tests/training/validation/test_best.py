"""The lowest loss that a checkpoint keeps counts for the samples that it was measured on."""

import json
import logging
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from evenload.core.errors import RankError
from evenload.core.sparse_error import SparseError
from evenload.data.sources import open_source
from evenload.integrations.host.scoring import Scores
from evenload.training.sparse_passes import WholePass
from evenload.training.step_hooks import StepHooks
from evenload.training.validation.validation import ValidationRun


def held_out(folder, letter):
    path = folder / f"{letter}.jsonl"
    path.write_text("".join(json.dumps({"text": letter * 8}) + "\n" for _ in range(20)))
    return open_source(str(path), max_length=64)


def restored(source, state, identity=None):
    """The lowest loss of a run that goes on."""
    one = ValidationRun.__new__(ValidationRun)
    one._job, one._best, one._best_of, one._identity = SimpleNamespace(source=source), math.inf, None, identity
    StepHooks([one]).restore({"validation": state})
    return one._best


def test_it_is_gone_on_with_where_the_samples_are_the_same(tmp_path, caplog):
    source = held_out(tmp_path, "a")
    passes = SimpleNamespace(is_on=False)
    of = SimpleNamespace(_job=SimpleNamespace(source=source), _best=1.5, _identity=None, _passes=passes)
    state = ValidationRun.state(of, None)
    assert restored(held_out(tmp_path, "a"), state) == 1.5
    assert restored(source, {**state, "best": None}) == math.inf
    assert not caplog.records
    assert restored(source, {**state, "data": source.fingerprint.partition("-")[0]}) == 1.5
    assert "data.validation: an earlier version kept their lengths alone" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "evenload"):
        assert restored(held_out(tmp_path, "s"), state) == math.inf
        assert restored(source, {**state, "of": "code"}) == math.inf, "it was the lowest of that domain"
        assert restored(source, state, "loss sparse {}") == math.inf, "it was dense"
        assert restored(source, {**state, "of": "loss sparse {}"}, "loss sparse {}") == 1.5
    assert caplog.text.count("the lowest loss of the validation is found anew") == 3


LOSSES, TARGETS = ([6.0, 1.0, 9.0], [2.5]), ([3, 1, 2], [10])
"""By batch, of each sequence: the sum of its token losses, and its targets."""


def evaluations(tmp_path, best_of=None):
    """``evaluate(done, scale, figures, error, first)``: a row of one run, of losses so many times as large; ``first``
    times where the pass was scored again densely, because of that error."""
    draws = [SimpleNamespace(samples=own, lengths=np.array(own) + 2, part=None) for own in TARGETS]
    own = SimpleNamespace(
        _job=SimpleNamespace(source=held_out(tmp_path, "a")), _draws=draws, _best=math.inf, _best_of=best_of
    )
    own._best_is_sparse = None
    for name in ("_compared", "_losses", "_takes"):
        setattr(own, name, partial(getattr(ValidationRun, name), own))

    def evaluate(done, scale=1.0, figures=None, error=None, first=None):
        parts, before = (
            [Scores(own * np.array(losses), np.array(targets)) for losses, targets in zip(LOSSES, TARGETS, strict=True)]
            for own in (scale, first or scale)
        )
        return ValidationRun._row(own, done, WholePass(parts, error, before), (4.0, 0.5), figures)

    return evaluate


def test_a_loss_is_that_of_all_targets_however_they_lie_in_batches(tmp_path):
    row = evaluations(tmp_path)(2)
    assert row.loss == pytest.approx(18.5 / 16, abs=1e-15)
    assert row.perplexity == pytest.approx(2.718281828459045 ** (18.5 / 16), rel=1e-14)
    assert (row.targets, row.sequences, row.tokens, row.tokens_per_s) == (16, 4, 16 + 2 * 4, 6.0)
    with pytest.raises(RankError, match="not finite"):
        evaluations(tmp_path)(2, scale=math.nan)


def test_the_best_is_the_first_with_the_lowest_loss_of_those_after_a_step(tmp_path):
    evaluate = evaluations(tmp_path)
    rows = [evaluate(done, scale) for done, scale in ((0, 0.1), (2, 1.0), (4, 1.0), (6, 0.5), (8, 0.75), (10, 0.25))]
    assert [row.best for row in rows] == [False, True, False, True, False, True]


SPARSE = SparseError("kept", 8, 2, 0.5, 0.001)


def test_a_sparse_loss_and_a_dense_one_are_not_compared(tmp_path, caplog):
    """A pass that is scored again densely is compared by what it had come to before."""
    caplog.set_level(logging.INFO, "evenload")
    evaluate, again = evaluations(tmp_path), replace(SPARSE, dense=True)
    rows = [
        evaluate(2, 1.0, error=SPARSE),
        evaluate(4, 0.5),
        evaluate(6, 1.5, error=again, first=0.9),
        evaluate(8, 0.8, error=again, first=0.95),
        evaluate(10, 0.7, error=SPARSE),
    ]
    assert [row.best for row in rows] == [True, False, True, False, True]
    assert [row.sparse for row in rows] == [SPARSE, None, again, again, SPARSE]
    assert caplog.text.count("they are not compared") == 1


def test_the_best_by_a_figure_is_the_highest_and_a_validation_without_samples_is_never_it(tmp_path):
    """What is compared also says of which samples the figure is (`SampleScores.identity`)."""
    evaluate = evaluations(tmp_path, "generate.pass_at_2 0a1b2c3d4e5f6071")
    figures = [None, {"pass_at_2": 0.25}, {"pass_at_2": 0.25}, {"pass_at_2": 0.5}, None, {"pass_at_2": 0.375}]
    best = [evaluate(2 * done, 2.0**-done, own).best for done, own in enumerate(figures, 1)]
    assert best == [False, True, False, True, False, False]
