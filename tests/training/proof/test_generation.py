"""How samples are held against plain generation: every fault is told, and a tie within rounding is none."""

import runpy
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from evenload.core.recipe.recipe import parse
from evenload.integrations.reference.textbook_sampling import noise, scores
from evenload.runtime.generate.engine import Decoder
from evenload.runtime.generate.request import Generation, Request, Sampling
from evenload.training.proof.arrangements import arranged, arrangements
from evenload.training.proof.plain_samples import TIES, PlainSamples

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "runtime" / "generate" / "tiny.py")))

MODEL = tiny.Tiny(5)
SETTINGS = Generation(seed=3, sampling=Sampling(0.9, 12, 0.95), end_tokens=frozenset())
REQUESTS = [
    Request(number, tuple((7 * number + 5 * place) % tiny.VOCABULARY for place in range(length)), limit, (0, 1, 2))
    for number, (length, limit) in enumerate([(33, 14), (14, 24), (1, 9)])
]


class Host:
    """What the proof asks of a host, over the tiny model."""

    recipe = parse({"model": {"vocab_size": tiny.VOCABULARY}, "data": {"max_length": 256}})
    layout, dp_cp_rank, collects, device = SimpleNamespace(dp_cp_size=1), 0, True, torch.device("cpu")

    def __init__(self, logits=MODEL.logits):
        self._logits = logits

    @contextmanager
    def decoding(self):
        yield Decoder(self.device, self._logits)


@pytest.fixture(scope="module")
def plain():
    return of_plain(1e-4)


def of_plain(tie):
    model = SimpleNamespace(turn=(0, 1), logits=lambda row: MODEL.whole(row))
    return PlainSamples(model, REQUESTS, SETTINGS, tie)


def test_plain_samples_are_those_of_a_forward_a_token_and_end_in_several_manners(plain):
    want = tiny.one_by_one(MODEL.whole, REQUESTS, plain.settings)
    assert {key: sample._replace(log_probs=()) for key, sample in plain.samples.items()} == {
        key: sample._replace(log_probs=()) for key, sample in want.items()
    }
    assert {sample.ended for sample in want.values()} == {"end", "limit"}
    assert plain.settings.end_tokens > SETTINGS.end_tokens


def test_every_arrangement_gives_plain_samples_and_does_what_it_says(plain):
    done = {}
    for one in arrangements(REQUESTS, plain.settings, 16):
        done[one.name] = result = arranged(Host(), REQUESTS, one, lambda _: None)
        assert {sample[:2] for sample in result.samples} == plain.samples.keys()
        assert set(result.times.values()) == {1}
        judged = [plain.judge(sample) for sample in result.samples]
        assert {(one.fault, one.flips) for one in judged} == {("", 0)}
        assert max(one.error for one in judged) < 1e-9
    needed = sum(len(r.tokens) - 1 for r in REQUESTS) + sum(len(s.tokens) for s in plain.samples.values())
    own, single, chunks, small, _, cut = done.values()
    assert (own.computed, single.computed, chunks.computed) == (needed, needed, needed)
    assert single.forwards > chunks.forwards > own.forwards
    assert small.computed > needed, "samples were given up and computed again"
    assert 0 < cut.before < len(plain.samples)
    assert cut.computed > needed


def tied(plain, key, place, rank=1):
    """The token that comes in the given rank at a place of a plain sample."""
    request, sample = REQUESTS[key[0]], plain.samples[key]
    row = [*request.tokens, *sample.tokens[:place]]
    drawn = noise((SETTINGS.seed, *key, len(row)), tiny.VOCABULARY)
    return int(scores(MODEL.whole(row)[-1].numpy(), drawn, SETTINGS.sampling).argsort()[-1 - rank])


def test_faults_of_samples_are_told(plain):
    exact, key = of_plain(TIES["fp64"]), (0, 1)
    good = plain.samples[key]
    other = good._replace(tokens=(*good.tokens[:3], tied(plain, key, 3), *good.tokens[4:]))
    assert (plain.judge(good).fault, plain.judge(good).error) == ("", 0.0)
    assert "another token at place 3" in exact.judge(other).fault
    assert "not a tie" in plain.judge(other).fault
    short = good._replace(tokens=good.tokens[:-1], log_probs=good.log_probs[:-1], ended="limit")
    for one in (short, good._replace(ended="stop")):
        assert "ends by" in plain.judge(one).fault
        assert "ends by" in exact.judge(one).fault
    off = good._replace(log_probs=(*good.log_probs[:-1], good.log_probs[-1] + 1e-7))
    assert plain.judge(off).error == pytest.approx(1e-7)
    assert plain.judge(good._replace(log_probs=(*good.log_probs[:-1], float("nan")))).error == float("inf")


def test_a_tie_is_counted_and_what_follows_is_held_against_its_own_tokens(monkeypatch):
    plain, key = of_plain(1e-4), (1, 0)
    # A host whose logits make the second best token at one place as good as the best, but for 1e-6.
    place, request = 2, REQUESTS[1]
    row = [*request.tokens, *plain.samples[key].tokens[:place]]
    second, drawn = tied(plain, key, place), noise((SETTINGS.seed, *key, len(row)), tiny.VOCABULARY)
    ranked = scores(MODEL.whole(row)[-1].numpy(), drawn, SETTINGS.sampling)
    gap = float(ranked.max() - ranked[second])

    def nearer(more):
        def logits(tokens):
            out = MODEL.whole(tokens).clone()
            if len(tokens) >= len(row) and list(tokens[: len(row)]) == row:
                out[len(row) - 1, second] += (gap + more) * SETTINGS.sampling.temperature
            return out

        return logits

    def of(more):
        return PlainSamples(SimpleNamespace(turn=(0, 1), logits=nearer(more)), REQUESTS, SETTINGS, 1e-4)

    plain, turned = of(-1e-6), of(1e-6).samples[key]
    assert turned.tokens[place] == second != plain.samples[key].tokens[place]
    plain.settings = replace(plain.settings, end_tokens=of(1e-6).settings.end_tokens)
    judged = plain.judge(turned)
    assert (judged.fault, judged.flips) == ("", 1)
    assert judged.error < 1e-5
    last = turned.tokens[-1]
    wrong = turned._replace(tokens=(*turned.tokens[:-1], (last + 1) % tiny.VOCABULARY))
    assert "not a tie" in plain.judge(wrong).fault or "ends by" in plain.judge(wrong).fault
    assert "ends by" in plain.judge(turned._replace(tokens=turned.tokens[:-1], log_probs=turned.log_probs[:-1])).fault
    assert "not a tie" in of(-1e-2).judge(turned).fault
