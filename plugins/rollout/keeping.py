"""Keeping some of the samples of each prompt, as `generate.collect` says, and what is kept next to all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.cascade import cascaded, functions_of, joined
from ...core.corrected_mean import drawn
from ...core.errors import refuse_first
from ...core.input.user_function import scored_by
from ...core.recipe.generated import CollectRule, PruneRule
from ...runtime.generate.request import Completion, Generation, Request
from ...training.sampling.prompted import Prompted
from . import Collect, Collected, Prune, SampledLengths, expected, fit_lengths

_NO_BORDER = 1 << 40
_PRUNE = "generate.collect.prune"


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
    kept = Collect(rule.keep, rule.of, rule.every, Prune(rule.prune.below, rule.prune.most))
    return replace(prepared.settings, collect=Collected(kept), scores=PruneScores(prepared, rule.prune))


class PruneScores:
    """Scores of the samples of a prompt as far as they have come, and what all scorings of this rank came to."""

    def __init__(self, prepared: Prompted, rule: PruneRule) -> None:
        self._prepared, self._rule = prepared, rule
        self._scorers = functions_of(rule, _PRUNE)
        self._texts = [row.text(prepared.tokenizer) for row in prepared.rows]
        self._parts = [cascaded(rule.bands, np.zeros(0, np.bool_), lambda *_: (np.zeros(0), np.zeros(1)))]

    def __call__(self, samples: Sequence[Completion]) -> list[float]:
        said = [
            (self._texts[s.prompt], self._prepared.stops.text_of(s), self._prepared.rows[s.prompt].row) for s in samples
        ]

        def score(number: int, places: Ints) -> tuple[Floats, Floats]:
            (key, function), begin = self._scorers[number], time.perf_counter()
            scores = [scored_by(function, key, samples[place].prompt, said[place]) for place in places]
            return np.array(scores), np.array([time.perf_counter() - begin])

        keys = [f"{sample.prompt} {sample.sample} {len(sample.tokens)}" for sample in samples]
        chosen = drawn(keys, self._rule.rescore, self._prepared.settings.seed)
        self._parts.append(cascaded(self._rule.bands, chosen, score))
        return [float(score) for score in self._parts[-1].scores]

    def figures(self) -> dict[str, float] | None:
        """What the scorers came to on all ranks; None for a single one, or where nothing was scored. Collective."""
        from ...runtime.world.agreement import everyone  # and torch, which the launcher needs not

        of_ranks = everyone(joined(self._parts))
        seconds = np.concatenate([of.seconds for of in of_ranks], axis=1)
        whole = joined(of_ranks)._replace(seconds=seconds)
        return whole.figures if self._rule.bands and len(whole.scores) else None


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
