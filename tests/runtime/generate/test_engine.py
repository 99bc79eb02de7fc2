"""Samples are those of plain generation, one token and one whole forward at a time, however they are computed."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from evenload.core.costs.decode import DecodeCost
from evenload.core.errors import EvenloadError
from evenload.runtime.attention import cached
from evenload.runtime.attention.decode_rows import DecodeRows
from evenload.runtime.generate import engine
from evenload.runtime.generate.dealing import Dealer, Dealing
from evenload.runtime.generate.drafts import Drafts
from evenload.runtime.generate.engine import generate
from evenload.runtime.generate.request import Generation, Request, Sampling
from evenload.runtime.generate.schedule import Running
from evenload.training.proof.drafters import Guessing
from harness.cases import full, only_full
from hypothesis import given, settings

from . import tiny

PLAIN = Generation(seed=3, end_tokens=frozenset({5, 17}))


def asked(seed=0, prompts=6, samples=3, longest=40):
    """Prompts of 1 to 40 tokens, and limits of 1 to 30."""
    draw = torch.Generator().manual_seed(seed)

    def number(least, most):
        return int(torch.randint(least, most, (), generator=draw))

    def tokens():
        return tuple(number(0, tiny.VOCABULARY) for _ in range(number(1, longest)))

    return [Request(i, tokens(), number(1, 30), tuple(range(samples))) for i in range(prompts)]


def made(model, requests, how, **more):
    out = list(generate(requests, how, model.decoder(**more)))
    samples = {(one.prompt, one.sample): one for one in out}
    assert len(samples) == len(out) == sum(len(request.samples) for request in requests)
    return samples


MODEL, REQUESTS = tiny.Tiny(), asked()


HOW = {
    "drawn": PLAIN,
    "cut": replace(PLAIN, sampling=Sampling(0.7, 8, 0.9)),
    "greedy": replace(PLAIN, sampling=Sampling(0.0)),
    "stopped": replace(PLAIN, stops=lambda new: sum(new[-2:]) == 23 and len(new) > 1),
}


@cache
def plain(name="drawn"):
    """What plain generation gives where samples are drawn so."""
    return tiny.one_by_one(MODEL.whole, REQUESTS, HOW[name])


CHANGES = [
    {"slots": 1},
    {"slots": 5, "step_tokens": 7},
    {"slots": 64},
    {"slots": 64, "cache_tokens": 112, "step_tokens": 16},
    {"slots": 7, "cache_tokens": 128, "step_tokens": 1},
]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(name, changes, marks=() if name == "drawn" or at == own else full)
        for own, name in enumerate(HOW)
        for at, changes in enumerate(CHANGES)
    ],
    ids=str,
)
def test_every_slot_cap_and_chunk_gives_the_plain_tokens(name, changes):
    assert {sample.ended for sample in plain(name).values()} >= {"limit", "end"}
    assert any(sample.ended == "stop" for sample in plain(name).values()) == (name == "stopped")
    tiny.refuse_other(made(MODEL, REQUESTS, replace(HOW[name], **changes)), plain(name))


@pytest.mark.parametrize("keys", ["int8", "int4"])
def test_rounded_keys_give_the_same_samples_in_every_slot_cap_and_chunk(keys):
    """Of another model, whose tokens no drafts change."""
    how = replace(PLAIN, keys=keys)
    want = made(MODEL, REQUESTS, replace(how, slots=1))
    assert any(want[key].log_probs != one.log_probs for key, one in plain().items())
    assert any(want[key].tokens != one.tokens for key, one in plain().items()) or keys == "int8"
    for changes in CHANGES[1:4]:
        tiny.refuse_other(made(MODEL, REQUESTS, replace(how, **changes)), want)
    texts = {key: one.tokens for key, one in want.items()}
    got, counts = drafted(Guessing(tiny.VOCABULARY, texts), REQUESTS, replace(how, **CHANGES[1]))
    tiny.refuse_other(got, want)
    assert counts.accepted > 0


def test_every_order_split_and_resume_gives_the_plain_tokens():
    want = plain()
    tiny.refuse_other(made(MODEL, REQUESTS[::-1], replace(PLAIN, slots=4)), want)
    for ranks in (2, 3):
        dealing = Dealing.of_requests(REQUESTS, PLAIN, ranks)
        parts = [made(MODEL, singles(dealing, part), PLAIN) for part in Dealer().deal(dealing).ranks]
        tiny.refuse_other({key: one for part in parts for key, one in part.items()}, want)
    begun = generate(REQUESTS, replace(PLAIN, slots=3), MODEL.decoder())
    before = {(one.prompt, one.sample): one for one, _ in zip(begun, range(7), strict=False)}
    rest = [r._replace(samples=tuple(s for s in r.samples if (r.number, s) not in before)) for r in REQUESTS]
    after = {(one.prompt, one.sample): one for one in generate(rest, PLAIN, MODEL.decoder())}
    assert len(after) == len(want) - 7
    tiny.refuse_other(before | after, want)


def singles(dealing, places):
    pairs = zip(dealing.of[places].tolist(), dealing.numbers[places].tolist(), strict=True)
    return [REQUESTS[of]._replace(samples=(number,)) for of, number in pairs]


class Returned:
    """Borders after few forwards, over which samples go and come back without their keys."""

    def __init__(self, seed):
        self._draw = torch.Generator().manual_seed(seed)
        self.forwards, self.crossed = 1, 0

    def _number(self, most):
        return int(torch.randint(0, most, (), generator=self._draw))

    def cross(self, schedule):
        self.forwards = 1 + self._number(5)
        self.crossed += 1
        gone = [sample for sample in (*schedule.live, *schedule.waiting) if not self._number(3)]
        for sample in gone:
            schedule.drop(sample)
        for old in gone:
            new, log_probs = list(old.new), list(old.log_probs)
            schedule.put(Running(old.request, old.number, old.stream, new=new, log_probs=log_probs))
        return schedule.busy


@pytest.mark.parametrize("seed", [0, 1, 5, *map(only_full, (2, 3, 4))])
def test_samples_that_go_over_borders_have_the_plain_tokens(seed):
    how = replace(PLAIN, slots=(2, 5, 64)[seed % 3], cache_tokens=(None, 128)[seed % 2], step_tokens=9)
    borders, model = Returned(seed), tiny.Tiny()
    got = {(one.prompt, one.sample): one for one in generate(REQUESTS, how, model.decoder(), borders)}
    assert borders.crossed > 5
    assert model.tables.num_taken == 0
    tiny.refuse_other(got, plain())


@pytest.mark.parametrize("scores", [{"window": 5}, {"softcap": 2.0}, {"sinks_H": torch.ones(tiny.HEADS)}], ids=str)
def test_windows_caps_and_sinks_of_scores(scores):
    model = tiny.Tiny(**{key: value.double() if key == "sinks_H" else value for key, value in scores.items()})
    tiny.refuse_other(made(model, REQUESTS[:3], PLAIN), tiny.one_by_one(model.whole, REQUESTS[:3], PLAIN))


def test_a_rank_that_has_nothing_to_do_goes_along():
    left = iter([True, True, False])
    assert list(generate([], PLAIN, MODEL.decoder(goes_on=lambda busy: next(left)))) == []
    assert [pack.slices for pack in MODEL.packs[-2:]] == [(), ()]


def drafted(drafter, requests, how, model=MODEL):
    """Samples, and what came of their drafts."""
    drafts = Drafts(drafter, tiny.VOCABULARY)
    out = {one[:2]: one for one in generate(requests, how, model.decoder(), None, drafts)}
    assert model.tables.num_taken == 0
    return out, drafts.counts


@pytest.mark.parametrize("name", ["drawn", *map(only_full, ["cut", "greedy"]), "stopped"])
@pytest.mark.parametrize("changes", CHANGES[1:4], ids=str)
@pytest.mark.parametrize("right", [False, True], ids=["drawn", "right for a while"])
def test_drafts_change_no_token(name, changes, right):
    how = replace(HOW[name], **changes)
    texts = {key: one.tokens for key, one in plain(name).items()} if right else {}
    model = Watched()
    got, counts = drafted(Guessing(tiny.VOCABULARY, texts), REQUESTS, how, model)
    tiny.refuse_other(got, plain(name))
    tokens = sum(len(one.tokens) for one in got.values())
    assert counts.accepted + counts.forwards == tokens
    assert counts.drafted > counts.accepted >= right * 0.3 * tokens
    assert counts.tokens_a_forward == tokens / counts.forwards
    assert model.reached <= max(len(request.tokens) + request.limit for request in REQUESTS) - 1


def test_a_draft_that_is_right_to_the_end_takes_few_forwards():
    class Told(Guessing):
        def guess(self, sample, most, least):
            return self._texts[sample.request.number, sample.number][len(sample.new) :][:most]

    request = Request(0, (1, 2, 3), 30, (0,))
    (want,) = made(MODEL, [request], Generation(seed=1)).values()
    got, counts = drafted(Told(24, {(0, 0): want.tokens}), [request], Generation(seed=1), model := tiny.Tiny())
    tiny.refuse_other(got, {(0, 0): want})
    assert counts == (2, 29 - 1, 28)  # 1 + 15, and 1 + 13 up to the limit
    assert [len(pack.tokens_T) for pack in model.packs] == [2, 16, 14]


@pytest.mark.parametrize("costs", [None, DecodeCost(step_s=1e-2, row_s=1e-3, key_s=1e-5, prompt_s=0)])
def test_a_guess_is_to_save_what_it_costs(costs):
    """A row of a later forward, with its keys and its share of the step, for a row of this one."""
    asked = []

    class Asked(Guessing):
        def guess(self, sample, most, least):
            asked.append((sample.request.number, len(sample.new), sample.length, least))
            return []

    requests = [Request(0, (1, 2, 3), 20, (0, 1, 2)), Request(1, (1,), 6, (0, 1))]
    drafts = Drafts(Asked(24), tiny.VOCABULARY, costs)
    assert len([*generate(requests, Generation(), MODEL.decoder(), None, drafts)]) == 5
    step_s, row_s, key_s = (1, 1 / 64, 0) if costs is None else (1e-2, 1e-3, 1e-5)
    late = [(number, keys, least) for number, new, keys, least in asked if number or new > 7]
    assert {number for number, _, _ in late} == {0, 1}
    for number, keys, least in late:
        live = 5 if number else 3  # those of prompt 1 end first
        assert least == pytest.approx(1 / (1 + step_s / 2 / live / (row_s + key_s * keys)))


class Odd(Guessing):
    """Guesses what no model knows, then fails."""

    def guess(self, sample, most, least):
        if len(sample.new) > 3:
            raise RuntimeError("no idea")
        return [3, tiny.VOCABULARY, 3] if sample.number else [-1]


def test_a_drafter_that_fails_costs_a_warning_and_no_token(caplog):
    got, counts = drafted(Odd(24), REQUESTS, PLAIN)
    tiny.refuse_other(got, plain())
    assert caplog.text.count("no longer drafted, as drafting them failed: RuntimeError: no idea") == 1
    assert 0 < counts.drafted < counts.forwards


class Watched(tiny.Tiny):
    """Sees what is in the cache at every forward."""

    most = rows = reached = 0

    def logits(self, pack, slots_R=None):
        if pack.cached:
            tables = pack.cached.cache.tables
            self.most, self.rows = max(self.most, tables.num_taken * tables.block_tokens), max(self.rows, len(slots_R))
            self.reached = max(self.reached, *(piece.stop for piece in pack.slices))
            written = pack.cached.places_2T
            assert written.unique(dim=1).shape == written.shape
        return super().logits(pack, slots_R)


@settings(max_examples=settings.default.max_examples // 4)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 6), st.integers(1, 50))
def test_every_sample_ends_once_and_caps_are_kept(seed, slots, spare, chunk):
    requests = asked(seed, prompts=4, samples=2, longest=30)
    largest = max(len(request.tokens) + request.limit for request in requests)
    cap = (-(-largest // 16) + 1 + spare) * 16
    model = Watched(seed)
    got = made(model, requests, replace(PLAIN, slots=slots, cache_tokens=cap, step_tokens=chunk))
    assert model.most <= cap
    assert model.rows <= slots
    assert model.tables.num_taken == 0
    tiny.refuse_other(got, made(model, requests, replace(PLAIN, slots=1)))


def test_a_cap_below_one_sample_is_refused():
    with pytest.raises(EvenloadError, match="smaller than one sample"):
        list(generate(REQUESTS, replace(PLAIN, cache_tokens=48), MODEL.decoder()))


@pytest.mark.parametrize("fault", ["noise of a row", "a stale key", "a shared block"])
def test_faults_change_tokens(fault, monkeypatch):
    if fault == "noise of a row":
        draw = engine.gumbel
        monkeypatch.setattr(engine, "gumbel", lambda s, p, t: draw(torch.arange(len(s)), p, t))
    elif fault == "a stale key":
        monkeypatch.setattr(
            DecodeRows, "unseen_P1Q1S", lambda self, _: torch.zeros_like(self.reads.rows_P.view(-1, 1, 1, 1, 1)).bool()
        )
    else:
        monkeypatch.setattr("evenload.runtime.attention.kv_cache.KvCache.copy_block", lambda *_: None)
    got = made(MODEL, REQUESTS, PLAIN)
    assert any(got[key].tokens != one.tokens for key, one in plain().items())


def test_flash_attention_is_asked_for_blocks_and_lengths(monkeypatch):
    """A stand-in reads its arguments as the kernel documents them."""
    asked_for = []

    def stand_in(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal, window_size, softcap):
        assert (causal, softcap, block_table.dtype, cache_seqlens.dtype) == (True, 0.0, torch.int32, torch.int32)
        asked_for.append(window_size)
        out = torch.empty_like(q)
        for row, length in enumerate(cache_seqlens.tolist()):
            for place in range(q.shape[1]):
                stop = max(0, length - q.shape[1] + place + 1)
                keys, values = (x[block_table[row].long()].flatten(0, 1)[:stop] for x in (k_cache, v_cache))
                if window_size[0] >= 0:
                    keys, values = (x[-window_size[0] - 1 :] for x in (keys, values))
                keys, values = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in (keys, values))
                weights = (torch.einsum("hd,mhd->hm", q[row, place], keys) * softmax_scale).softmax(-1)
                out[row, place] = torch.einsum("hm,mhd->hd", weights, values)
        return out

    monkeypatch.setattr(cached.importlib, "import_module", lambda _: SimpleNamespace(flash_attn_with_kvcache=stand_in))
    monkeypatch.setattr(cached, "choose_decoder", lambda *_: cached.DECODERS[0])
    for window in (None, 5):
        model = tiny.Tiny(window=window)
        tiny.refuse_other(made(model, REQUESTS[:3], PLAIN), tiny.one_by_one(model.whole, REQUESTS[:3], PLAIN))
    assert set(asked_for) == {(-1, -1), (5, 0)}


def test_flash_attention_is_taken_where_it_is_there_and_blocks_fit(monkeypatch):
    flash = replace(cached.DECODERS[0], available=lambda: True, supports=lambda *_: True)
    cpu = torch.device("cpu")
    assert cached.choose_decoder(cpu, torch.bfloat16, 64, 256, frozenset()).name == "torch"
    monkeypatch.setattr(cached, "DECODERS", (flash, *cached.DECODERS[1:]))
    for block, options, name in ((256, [], "flash_attn"), (16, [], "torch"), (256, ["sinks"], "torch")):
        chosen = cached.choose_decoder.__wrapped__(cpu, torch.bfloat16, 64, block, frozenset(options))
        assert chosen.name == name
    assert cached.block_tokens_on(torch.device("cuda")) == 256


def test_a_drafter_that_is_never_right_is_asked_now_and_then():
    class Wrong(Guessing):
        asked = 0

        def guess(self, sample, most, least):
            self.asked += 1
            return [23]

    drafts, live = Drafts(own := Wrong(24), tiny.VOCABULARY), 32
    sample, asked = Running(Request(0, (1,), 99), 0, 0), []
    for _ in range(400):
        drafts.begin([sample] * live, waiting=False)
        before = own.asked
        for _ in range(live):
            sample.drafted = drafts.of(sample, 5, live)
            drafts.saw(sample, 0)
        asked.append(own.asked - before)
    assert asked[:16] == [32] * 16
    assert asked.count(32) + asked.count(0) == 400
    assert asked.count(32) < 80
    assert 4 <= asked[-40:].count(32) <= 8, "or it would not be seen that it pays again"
    for _ in range(400):
        drafts.begin([sample] * live, waiting=False)
        for _ in range(live):
            sample.drafted = drafts.of(sample, 5, live)
            drafts.saw(sample, len(sample.drafted))
    assert drafts.of(sample, 5, live) == [23]


def test_a_drafter_that_is_never_right_is_asked_where_that_costs_little():
    drafts = Drafts(own := Guessing(24), tiny.VOCABULARY)
    sample = Running(Request(0, (1,), 99), 0, 0)
    own.guess = lambda *_: []
    for _ in range(99):
        drafts.begin([sample], waiting=False)
        drafts.of(sample, 5, 1)
        drafts.saw(sample, 0)
        assert drafts._asks
