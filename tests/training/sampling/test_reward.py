"""`evenload.cascade`: rewards are those of a plain loop on any ranks, and drawn ones pay for the others."""

import math

import numpy as np
import pytest
import torch.distributed as dist
from evenload import EvenloadError, cascade
from evenload.core.errors import RankError

WORDS = ["a" * (n * n % 23 + 1) + " b" * (n % 5) for n in range(24)]


def share_of_a(completions, **_):
    return [round(one.count("a") / len(one), 1) for one in completions]


def by_column(completions, prompts, answer, trainer_state, **more):
    assert not {"log_extra", "log_metric"} & more.keys()
    assert len(completions) == len(prompts) == len(answer) == len(more["completion_ids"])
    return [len(one) / 50 + part / 100 + trainer_state for one, part in zip(completions, answer, strict=True)]


def dear(completions, prompts, seen, answer, **_):
    for one, rank in zip(completions, seen, strict=True):
        SEEN.append((one, rank))
    assert [prompt == f"prompt {n % 4}" for prompt, n in zip(prompts, answer, strict=True)]
    return [(len(one) + n) % 7 / 7 for one, n in zip(completions, answer, strict=True)]


SEEN = []
BANDS = (0.2, 0.8), (0.1, 0.4)


def rewards(share=0.25, correct=False, planted=None):
    """Of this rank's part of the samples, in two calls; what a log has, and who scored what dearly."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own, logged = range(len(WORDS))[rank * len(WORDS) // size : (rank + 1) * len(WORDS) // size], []
    SEEN.clear()
    reward = cascade([(share_of_a, BANDS[0]), (by_column, BANDS[1]), planted or dear], share, correct=correct, seed=5)
    got = []
    for _ in range(2):
        got += reward(
            prompts=[f"prompt {n % 4}" for n in own],
            completions=[WORDS[n] for n in own],
            completion_ids=[[1] * len(WORDS[n]) for n in own],
            answer=[*own],
            seen=[rank for _ in own],
            trainer_state=0.05,
            log_extra=lambda *_: None,
            log_metric=lambda *pair: logged.append(pair),
        )
    moved = [len(one) for one, came_from in SEEN if came_from != rank]
    figures = {name: value for name, value in reward.figures.items() if not name.endswith("_s")}
    return got[: len(own)], logged, sum(len(one) + 1 for one, _ in SEEN), len(moved), figures


def in_a_loop():
    """Scores of all samples, each by itself."""
    for n, word in enumerate(WORDS):
        score = round(word.count("a") / len(word), 1)
        if 0.2 <= score <= 0.8:
            score = len(word) / 50 + n / 100 + 0.05
            if 0.1 <= score <= 0.4:
                score = (len(word) + n) % 7 / 7
        yield score


def test_rewards_are_those_of_a_loop_over_samples():
    got, logged, _, _, figures = rewards()
    want = [*in_a_loop()]
    assert got == pytest.approx(want, abs=1e-12)
    assert len(set(want)) > 12
    names = dict(logged)
    assert names["cascade/score_uncorrected"] == pytest.approx(np.mean(want))
    assert 0 < names["cascade/share_of_scorer_2"] < 1
    assert (figures["scored_1"], figures["score_uncorrected"]) == (48, pytest.approx(np.mean(want)))
    assert figures["score_low"] < figures["score"] < figures["score_high"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_get_their_own_and_share_what_goes_on(world, size):
    alone = rewards()
    of_ranks = world(size).run(rewards)
    assert [one for own, *_ in of_ranks for one in own] == alone[0]
    assert all((logged, figures) == (alone[1], alone[4]) for _, logged, _, _, figures in of_ranks)
    assert sum(work for _, _, work, _, _ in of_ranks) == alone[2], "nobody is scored twice"
    assert sum(moved for *_, moved, _ in of_ranks) > 0
    assert max(work for _, _, work, _, _ in of_ranks) <= 1.3 * alone[2] / size


def fails(kind):
    odd = {"raises": lambda **_: [][1], "another count": lambda completions, **_: [0.5] * (len(completions) + 1)}
    odd |= {"nan": lambda completions, **_: [math.nan for _ in completions], "none": lambda **_: None}
    try:
        rewards(1.0, planted=odd[kind] if not dist.is_initialized() or dist.get_rank() == 1 else None)
    except RankError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", ["raises", "another count", "nan", "none"])
def test_a_scorer_that_fails_is_named(kind):
    assert "the scorer <lambda> " in fails(kind)


@pytest.mark.slow
def test_a_scorer_that_fails_on_one_rank_ends_the_call_on_all(world):
    first, second = world(2).run(fails, "nan")
    assert first == second
    assert "gave no number for each of" in first


def test_corrected_rewards_are_those_of_the_dear_scorer_in_the_mean_of_draws():
    def cheap(completions, **_):
        return [0.9 for _ in completions]

    def right(completions, **_):
        return [float("b" in one) for one in completions]

    reward = cascade([(cheap, (0.0, 0.5)), right], 0.2, correct=True)
    plain = cascade([(cheap, (0.0, 0.5)), right], 0.2)
    got = np.array([reward(prompts=WORDS, completions=WORDS) for _ in range(1500)])
    want = np.array(right(WORDS))
    assert abs(got.mean(0) - want).max() < 4.5 * (0.9 * math.sqrt(0.8 / 0.2) / math.sqrt(1500))
    assert abs(got.mean() - want.mean()) < 3 * got.std() / math.sqrt(got.size)
    assert set(np.round(got[:, 0], 9)) == {0.9, round(0.9 - 0.9 / 0.2, 9)}
    assert set(plain(prompts=WORDS, completions=WORDS)) == {0.9}, "they pay for no others"


BAD = {
    "no scorer": ([], {}, "has no scorer"),
    "no band": ([dear, dear], {}, "a scorer before the last has no band"),
    "a band of words": ([(dear, "ab"), dear], {}, "a band is no two numbers"),
    "a band of one number": ([(dear, (1,)), dear], {}, "a band is no two numbers"),
    "an empty band": ([(dear, (2, 1)), dear], {}, "a band is empty"),
    "no function": ([(dear, (1, 2)), "module:name"], {}, "a scorer is no function"),
    "no share": ([dear], {"rescore": 1.5}, "rescore is no share"),
    "nothing to correct by": ([dear], {"rescore": 0, "correct": True}, "nothing is drawn to correct by"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused(name):
    scorers, how, said = BAD[name]
    with pytest.raises(EvenloadError, match=said):
        cascade(scorers, **how)


def test_a_share_of_0_is_warned_of(caplog):
    cascade([(dear, (0, 1)), dear], 0)
    assert "evenload.cascade: rescore is 0" in caplog.text
