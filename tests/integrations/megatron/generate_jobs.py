"""What the ranks of test_generate.py do: samples of a host against a whole forward of stock layers a token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from evenload.integrations.megatron import PlainModel
from evenload.runtime.generate.request import Generation, Request, Sampling
from harness.proof import VOCABULARY, planned, tokens
from harness.rank import load
from megatron_tests.float64 import all_in_float64
from megatron_tests.jobs import hosted
from megatron_tests.score_jobs import differing, state_of
from megatron_tests.telling import told

_FOLDER = Path(__file__).parents[2] / "runtime" / "generate"
tiny, shuffled = (load(str(_FOLDER / name)) for name in ("tiny.py", "shuffled.py"))

PROMPTS = tokens((33, 1, 7, 18), seed=5)
LIMITS = 9, 25, 3, 17
REQUESTS = [Request(number, tuple(PROMPTS(number).tolist()), limit, (0, 1)) for number, limit in enumerate(LIMITS)]
SETTINGS = Generation(seed=11, sampling=Sampling(0.9, 40, 0.95), end_tokens=frozenset({5, 17}))


def generated(world: Any, *, ways: list[dict[str, Any]], **changes: Any) -> Any:
    """Of each way how many samples differ from plain ones, how they ended, and the largest error of a log-probability;
    and what of the host's state has changed."""
    with all_in_float64(), hosted(world, **changes) as host:
        with torch.no_grad():
            for parameter in host.model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(8.0)
        want = _one_by_one(host)
        host.gradients(planned(host, "packs"), tokens())
        before = state_of(host)
        rows = []
        for way in ways:
            seen: list[Any] = []
            order = -1 if way.get("backwards") else 1
            own = {key: value for key, value in way.items() if key not in ("backwards", "moves")}
            settings, dealer = replace(SETTINGS, **own), shuffled.Shuffled(way["moves"]) if "moves" in way else None
            samples = host.generate(REQUESTS[::order], settings, ended=seen.append, dealer=dealer)
            got = {sample[:2]: sample for sample in samples}
            other = [key for key in want if (got[key].tokens, got[key].ended) != (want[key].tokens, want[key].ended)]
            pairs = [zip(got[key].log_probs, want[key].log_probs, strict=False) for key in want]
            rows.append(
                {
                    "keys": got.keys() == want.keys() and len(samples) == len(got),
                    "other": len(other),
                    "error": max(abs(one - plain) for pair in pairs for one, plain in pair),
                    "seen": [sample[:2] for sample in seen],
                    "ended": sorted({sample.ended for sample in samples}),
                    "moved": dealer.seen.moved if dealer else 0,
                }
            )
        return {"ways": rows, "changed": differing(before, state_of(host))}


@torch.no_grad()
def _one_by_one(host: Any) -> Any:
    plain = PlainModel(host.recipe, host)

    def whole(row: list[int]) -> torch.Tensor:
        mask = torch.ones(len(row), len(row), dtype=torch.bool).triu(1)[None, None]
        call = torch.tensor(row)[None], torch.arange(len(row))[None], mask
        return plain._model(*call, runtime_gather_output=True)[0, :, :VOCABULARY]

    samples = tiny.one_by_one(whole, REQUESTS, SETTINGS)
    plain.close()
    return samples


def generation_refused(world: Any, *, cases: list[dict[str, Any]], **changes: Any) -> list[str]:
    """What is said of requests that cannot be, or of a model."""
    with hosted(world, **changes) as host:

        def generate(requests: list[tuple[Any, ...]], cap: int | None = None) -> None:
            host.generate([Request(*one) for one in requests], Generation(cache_tokens=cap))

        return [told(partial(generate, **case)) for case in cases]
