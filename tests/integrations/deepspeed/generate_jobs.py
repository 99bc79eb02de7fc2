"""Generation on ranks, against a whole forward of Transformers' own model for each token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed_tests.jobs import hosted, recipe
from evenload.integrations.deepspeed.engine.model import build_model
from evenload.integrations.deepspeed.engine.stage import call_of
from evenload.runtime.generate.engine import Decoder, generate
from evenload.runtime.generate.noise import gumbel, stream_of
from evenload.runtime.generate.request import Generation, Request, Sampling
from evenload.runtime.generate.sampling import allowed
from harness.rank import load
from megatron_tests.float64 import all_in_float64

GENERATE = Path(__file__).parents[2] / "runtime" / "generate"
one_by_one, Shuffled = load(str(GENERATE / "tiny.py")).one_by_one, load(str(GENERATE / "shuffled.py")).Shuffled

_DRAW = np.random.default_rng(4)
REQUESTS = [
    Request(number, tuple(_DRAW.integers(0, 97, length).tolist()), limit, (0, 1))
    for number, (length, limit) in enumerate([(19, 9), (1, 25), (7, 3), (30, 21)])
]
SETTINGS = Generation(seed=11, sampling=Sampling(0.9, 40, 0.95), end_tokens=frozenset({5, 17}))


def generated(pp: int, stage: int, ways: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Of each way the samples that differ from those of Transformers' own model, a whole forward a token, beyond a tie
    within rounding, how many have such a tie, and the largest error of a log-probability before it."""
    rows = []
    with hosted(stage, pp=pp, **more) as host:
        model = build_model(host.recipe, attn_implementation="sdpa").eval()
        model.load_state_dict(host.weights())

        @torch.no_grad()
        def whole(row: Any) -> torch.Tensor:
            logits: torch.Tensor = model(torch.tensor(row)[None]).logits[0]
            return logits

        want = one_by_one(whole, REQUESTS, SETTINGS)
        before = host.weights(), torch.get_rng_state()
        for way in ways:
            own = {key: value for key, value in way.items() if key != "moves"}
            dealer = Shuffled(way["moves"]) if "moves" in way else None
            samples = host.generate(REQUESTS, replace(SETTINGS, **own), dealer=dealer)
            faults = [_fault(sample, want[sample[:2]], whole) for sample in samples]
            rows.append(
                {
                    "samples": sorted(sample[:2] for sample in samples) == sorted(want),
                    "other": sum(fault == "other" for fault in faults),
                    "ties": sum(fault == "tie" for fault in faults),
                    "error": max(_error(sample, want[sample[:2]]) for sample in samples),
                    "moved": dealer.seen.moved if dealer else 0,
                }
            )
        after = host.weights(), torch.get_rng_state()
        same = torch.equal(before[1], after[1]) and all(torch.equal(w, before[0][n]) for n, w in after[0].items())
        return {"ways": rows, "changed": not same, "training": host.engine.module.training}


def _fault(got: Any, want: Any, whole: Any) -> str:
    """ "other" where two samples differ, "tie" where at the first place at which they do both tokens are as good."""
    pairs = zip(got.tokens, want.tokens, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return "" if (got.tokens, got.ended) == (want.tokens, want.ended) else "other"
    request = REQUESTS[got.prompt]
    row = [*request.tokens, *want.tokens[:place]]
    stream = torch.tensor([stream_of(SETTINGS.seed, got.prompt, got.sample)])
    noise = gumbel(stream, torch.tensor([len(row)]), torch.arange(97))
    scores = (allowed(whole(row)[-1:].double(), SETTINGS.sampling) + noise)[0]
    return "tie" if abs(float(scores[got.tokens[place]] - scores[want.tokens[place]])) < 1e-4 else "other"


def _error(got: Any, want: Any) -> float:
    pairs = zip(got.tokens, want.tokens, got.log_probs, want.log_probs, strict=False)
    return max((abs(a - b) for one, other, a, b in pairs if one == other), default=0.0)


def in_float64() -> dict[str, Any]:
    """The model without DeepSpeed's engine, which has no float64, against Transformers' own attention."""
    made = recipe(0)
    with all_in_float64(), torch.no_grad():
        plain = build_model(made, attn_implementation="sdpa").double().eval()
        model = build_model(made).double().eval()
        for one in (plain, model):
            for parameter in one.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6.0)
        want = one_by_one(lambda row: plain(torch.tensor(row)[None]).logits[0], REQUESTS, SETTINGS)
        decoder = Decoder(
            torch.device("cpu"), lambda pack, slots: model(**call_of(pack), logits_to_keep=slots).logits[0]
        )
        rows = []
        for way in ({"slots": 1}, {"slots": 64}, {"slots": 3, "cache_tokens": 80, "step_tokens": 7}):
            samples = list(generate(REQUESTS, replace(SETTINGS, **way), decoder))
            rows.append(
                {
                    "other": sum((s.tokens, s.ended) != (want[s[:2]].tokens, want[s[:2]].ended) for s in samples)
                    + abs(len(samples) - len(want)),
                    "error": max(_error(sample, want[sample[:2]]) for sample in samples),
                }
            )
        return {"ways": rows}
