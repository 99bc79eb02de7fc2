"""Keeping some of the samples of each prompt, as `generate.collect` says, and what is kept next to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...core.errors import refuse_first
from ...core.input.user_function import scored_by, user_function
from ...core.recipe.generated import CollectRule
from ...runtime.generate.request import Completion, Generation, Request
from ...training.sampling.prompted import Prompted
from . import Collect, Collected, Prune, SampledLengths, expected, fit_lengths

_NO_BORDER = 1 << 40
_SCORE = "generate.collect.prune.score"


def samples_begun(rule: CollectRule | None, samples: int) -> int:
    """Samples of each prompt that are begun, where so many are asked for. Raises EvenloadError."""
    odd = rule is not None and samples not in (1, rule.of)
    what, do = "--samples and generate.collect.of both say how many samples there are", "leave --samples out"
    refuse_first((odd, what, f"--samples {samples}, of {rule.of if rule else 0}", do))
    return rule.of if rule else samples


def collecting(prepared: Prompted, rule: CollectRule) -> Generation:
    """The settings of a generation that keeps some of the samples of each prompt. Raises EvenloadError."""
    if rule.prune is None:
        return replace(prepared.settings, collect=Collected(Collect(rule.keep, rule.of, _NO_BORDER)))
    function = user_function(rule.prune.score, _SCORE)
    texts = [row.text(prepared.tokenizer) for row in prepared.rows]

    def scores(samples: Sequence[Completion]) -> list[float]:
        said = ((texts[s.prompt], prepared.stops.text_of(s), prepared.rows[s.prompt].row) for s in samples)
        return [scored_by(function, _SCORE, s.prompt, one) for s, one in zip(samples, said, strict=True)]

    kept = Collect(rule.keep, rule.of, rule.every, Prune(rule.prune.below, rule.prune.most))
    return replace(prepared.settings, collect=Collected(kept), scores=scores)


def beside_all(samples: Sequence[Completion], requests: Sequence[Request]) -> dict[str, float | int | None]:
    """What is kept of samples next to what all would give, those left out among them, as far as they have come.

    Lengths of samples that were ended early are those that their log-t distributions expect of them (estimated); scores
    are the last ones.
    """
    numbers = {number: place for place, number in enumerate(sorted({sample.prompt for sample in samples}))}
    prompts = np.array([numbers[sample.prompt] for sample in samples])
    tokens = np.array([max(1, len(sample.tokens)) for sample in samples])
    kept = np.array([sample.kept for sample in samples])
    whole = np.array([sample.ended in ("end", "stop", "limit") for sample in samples])
    ended = np.array([sample.ended in ("end", "stop") for sample in samples])
    limit = max(request.limit for request in requests)
    fitted = fit_lengths(SampledLengths(prompts, tokens, ended, np.ones(len(tokens))), len(numbers), limit)
    lengths = np.where(whole, tokens, expected(fitted, prompts, tokens).mean)
    scored = [(sample.score, sample.kept) for sample in samples if sample.score is not None]
    return {
        "kept": int(kept.sum()),
        "pruned": sum(sample.ended == "pruned" for sample in samples),
        "left": int((~kept).sum()) - sum(sample.ended == "pruned" for sample in samples),
        "tokens": int(tokens.sum()),
        "tokens_of_all": float(lengths.sum()),
        "kept_tokens": float(tokens[kept].mean()),
        "mean_tokens": float(lengths.mean()),
        "kept_score": float(np.mean([score for score, stays in scored if stays])) if scored else None,
        "mean_score": float(np.mean([score for score, _ in scored])) if scored else None,
    }
