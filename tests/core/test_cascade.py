"""Scorers from cheap to dear: who goes on, whom the dear one scores in any case, and what their mean is."""

import logging
import math

import numpy as np
import pytest
from evenload.core.cascade import cascaded, joined, longest_first, rescored, warn_if_lossy, warn_of_rescore
from evenload.core.errors import EvenloadError
from evenload.core.recipe.generated import bands_of
from evenload.core.recipe.recipe import parse

NUM = 400
KEYS = [f"{n}" for n in range(NUM)]
BANDS = ((0.3, 0.7), (0.4, 0.6))


def scorers(seed):
    """A truth, and two scorers that are ever farther from it; scores in twentieths, so that many lie on a border."""
    rng = np.random.default_rng(seed)
    dear = rng.integers(0, 21, NUM) / 20
    middle = np.clip(np.round(20 * (dear + rng.normal(0.1, 0.15, NUM))) / 20, 0, 1)
    cheap = np.clip(np.round(20 * (dear + rng.normal(0.2, 0.3, NUM))) / 20, 0, 1)
    return cheap, middle, dear


def run(tables, chosen, bands=BANDS):
    asked = []

    def score(number, places):
        asked.append(places.tolist())
        return tables[number][places], np.array([1.0, 0.5]) * len(places)

    return cascaded(bands, chosen, score), asked


def test_scores_are_those_of_a_loop_over_samples():
    """A band holds both of its ends."""
    tables, chosen = scorers(0), rescored(KEYS, 0.1, seed=3)
    of, asked = run(tables, chosen)
    counts, want, dear = [0, 0, 0], [], []
    for n in range(NUM):
        cheap, middle, last = (float(table[n]) for table in tables)
        final = cheap
        if 0.3 <= cheap <= 0.7:
            final = middle
            counts[1] += 1
            if 0.4 <= middle <= 0.6:
                final = last
        want.append(final)
        goes_all_the_way = 0.3 <= cheap <= 0.7 and 0.4 <= middle <= 0.6
        dear.append(last if goes_all_the_way or chosen[n] else math.nan)
    counts[0], counts[2] = NUM, sum(not math.isnan(score) for score in dear)
    assert of.scores.tolist() == want
    np.testing.assert_array_equal(of.dear, dear)
    assert of.counts.tolist() == counts == [*map(len, asked)]
    assert all(places == sorted(set(places)) for places in asked), "nobody is scored twice by one scorer"
    assert {0.3, 0.7} <= set(tables[0].tolist())
    assert {0.4, 0.6} <= set(tables[1].tolist())
    row = of.figures
    assert (row["scored_2"], row["scorer_2_s"]) == (counts[1], 1.5 * counts[1])
    assert row["scorer_2_busiest_s"] == counts[1]
    places = np.flatnonzero(chosen)
    want_mean = np.mean(want) + np.mean(tables[2][places] - np.array(want)[places])
    assert (row["score"], row["score_uncorrected"]) == pytest.approx((want_mean, np.mean(want)), abs=1e-12)
    assert (row["rescored"], row["missed_frac"]) == (len(places), pytest.approx(0.99 ** len(places)))
    assert row["score_low"] < row["score"] < row["score_high"]


def test_a_single_scorer_is_asked_once_for_all():
    of, asked = run(scorers(1)[2:], np.zeros(NUM, bool), ())
    assert (asked, of.counts.tolist()) == ([[*range(NUM)]], [NUM])
    assert of.scores.tolist() == scorers(1)[2].tolist()
    assert of.mean is None


def test_the_mean_is_that_of_the_dear_one_over_draws():
    """Cheap scorers are off by 0.09; samples that went on by themselves say nothing of those that did not."""
    tables = scorers(2)
    of = [run(tables, rescored(KEYS, 0.15, seed))[0] for seed in range(2000)]
    errors = np.array([one.mean.mean for one in of]) - tables[2].mean()
    assert abs(errors.mean()) < 3 * errors.std() / math.sqrt(len(errors))
    assert of[0].scores.mean() - tables[2].mean() > 0.05
    covered = np.mean([one.mean.low <= tables[2].mean() <= one.mean.high for one in of])
    assert 0.93 <= covered <= 0.97
    assert len({one.scores.tobytes() for one in of}) == 1, "no sample's score is that of a draw"


def test_two_samples_at_least_are_drawn_and_none_of_a_share_of_0():
    assert [int(rescored(KEYS[:n], 1e-9, 0).sum()) for n in (0, 1, 2, 9)] == [0, 1, 2, 2]
    assert not rescored(KEYS, 0.0, 0).any()
    few, many = rescored(KEYS, 1e-9, 0), rescored(KEYS, 0.1, 0)
    assert many[few].all(), "the same ones"
    of, _ = run(scorers(3), rescored(KEYS[:1], 0.5, 0))
    assert of.mean is None
    assert of.figures["score"] == of.scores.mean()


def test_more_verdicts_are_right_than_by_the_dear_one_at_random():
    """For as many dear calls; a cheap scorer that is less sure the more it errs."""
    rng, better, saved = np.random.default_rng(4), [], []
    for _ in range(20):
        dear = (rng.random(NUM) < 0.5).astype(float)
        cheap = 1 / (1 + np.exp(-(2 * (2 * dear - 1) + rng.logistic(0, 1.2, NUM))))
        of, _ = run((cheap, dear), np.zeros(NUM, bool), ((0.2, 0.8),))
        calls = int(of.counts[-1])
        at_random = np.where(rng.permutation(NUM) < calls, dear, cheap)
        better.append(np.mean((of.scores > 0.5) == dear) - np.mean((at_random > 0.5) == dear))
        saved.append(1 - calls / NUM)
    assert min(better) > 0
    assert np.mean(better) > 0.05
    assert 0.4 < np.mean(saved) < 0.8


@pytest.mark.parametrize(("size", "stays"), [(1, 1.0), (2, 1.35), (4, 1.5)])
def test_what_goes_on_is_even_over_ranks_where_it_is_not_dealt_again(size, stays):
    """It piles up on few prompts, whose samples are long and, as in TRL, on one rank."""
    prompts, samples, where_they_were = 32, 8, []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        costs = 1.0 + np.repeat(rng.lognormal(4, 1.2, prompts), samples) * rng.lognormal(0, 0.2, prompts * samples)
        going = np.flatnonzero(np.repeat(rng.random(prompts) < 0.25, samples))
        dealt = longest_first(costs[going], size)
        assert sorted(place for part in dealt for place in part) == [*range(len(going))]
        assert all(costs[going][part].tolist() == sorted(costs[going][part], reverse=True) for part in dealt)
        loads = [costs[going][part].sum() for part in dealt]
        assert max(loads) <= 1.1 * np.mean(loads)
        loads = [costs[going[going * size // len(costs) == rank]].sum() for rank in range(size)]
        where_they_were.append(max(loads) / np.mean(loads))
    assert np.mean(where_they_were) >= stays
    assert longest_first(np.zeros(0), size) == [[] for _ in range(size)]


def test_turns_are_joined():
    parts = [run([table[:n] for table in scorers(n)], rescored(KEYS[:n], 0.2, n))[0] for n in (7, 30, 1)]
    of = joined(parts)
    assert of.scores.tolist() == [score for part in parts for score in part.scores]
    assert of.counts.tolist() == np.sum([part.counts for part in parts], axis=0).tolist()
    assert of.seconds.tolist() == np.sum([part.seconds for part in parts], axis=0).tolist()
    assert int(of.rescored.sum()) == sum(int(part.rescored.sum()) for part in parts)


BAD = {
    "no scorer": ([], "has no scorer"),
    "no band": ([None, None], "a scorer before the last has no band"),
    "a band too many": ([(0.1, 0.2), (0.1, 0.2)], "nobody decides what the last scorer is unsure of"),
    "an empty band": ([(0.6, 0.4), None], "a band is empty"),
    "a band of no number": ([(math.nan, 0.4), None], "a band is empty"),
    "below the scale": ([(-0.1, 0.4), None], "outside the scale, 0 to 1"),
    "above the scale": ([(0.6, 1.01), None], "outside the scale, 0 to 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bands_that_are_none_are_refused(name):
    bands, said = BAD[name]
    with pytest.raises(EvenloadError, match=said):
        bands_of("key", bands, (0.0, 1.0))


RECIPE = {"model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 256}}


def recipe_of(score):
    validation = {"source": "a.jsonl", "generate": {"prompts": "p.jsonl", "score": score}}
    return parse(RECIPE | {"data": {"max_length": 32, "validation": validation}})


def test_a_recipe_names_one_or_several():
    assert recipe_of("a:b").data.validation.generate.bands == ()
    several = recipe_of([{"by": "a:b", "unsure": [0.2, 0.2]}, {"by": "c:d.e"}]).data.validation.generate
    assert (several.bands, several.rescore) == (((0.2, 0.2),), 0.1)
    assert parse(recipe_of("a:b").model_dump(mode="json", exclude_unset=True)) == recipe_of("a:b")


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (3, r"data\.validation\.generate\.score is not valid"),
        ("no name", r"data\.validation\.generate\.score is not valid"),
        ([{"by": "no name"}], r"data\.validation\.generate\.score\.0\.by is not valid"),
        ([{"by": "a:b", "sure": 1}], r"data\.validation\.generate\.score\.0 has no key 'sure'"),
        ([], r"data\.validation\.generate\.score has no scorer"),
        ([{"by": "a:b", "unsure": [0.3, 1.7]}, {"by": "a:b"}], "outside the scale"),
    ],
)
def test_a_recipe_says_what_is_wrong_with_a_list(score, said):
    with pytest.raises(EvenloadError, match=said):
        recipe_of(score)


def test_a_share_of_0_is_warned_of_where_cheap_scores_are_final(caplog):
    caplog.set_level(logging.WARNING)
    warn_if_lossy(BANDS, 0.0, "here", (0.0, 1.0))
    assert "here: rescore is 0, so what a cheap scorer is sure of keeps its score, right or wrong" in caplog.text
    caplog.clear()
    warn_if_lossy(((0.0, 1.0),), 0.0, "here", (0.0, 1.0))
    warn_if_lossy(BANDS, 0.1, "here", (0.0, 1.0))
    warn_if_lossy((), 0.0, "here")
    assert not caplog.text
    warn_if_lossy(((0.0, 1.0),), 0.0, "here")
    assert caplog.text, "scores of any size are not all in a band"


def test_a_share_that_has_no_effect_is_said(caplog):
    section = recipe_of("a:b").data.validation.generate
    warn_of_rescore(section, "here", (0.0, 1.0))
    assert not caplog.text
    warn_of_rescore(
        section.model_validate(section.model_dump(exclude_unset=True) | {"rescore": 0.3}), "here", (0.0, 1.0)
    )
    assert "here.rescore has no effect on a single scorer" in caplog.text
