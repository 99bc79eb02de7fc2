"""Sections about samples that the model itself makes: which are scored in a validation, which a generation keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from ..errors import refuse_first
from ..input import bounds
from ..input.reading import file_name
from ..input.validation import UNSHOWN, Frozen

Band = tuple[float, float]
"""The least and the largest score that the next scorer decides."""
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", max_length=1000)]
"""``module:name`` of the user's own."""
SAMPLED = "generate."
"""What names of figures of samples begin with in ``checkpoint.best``."""


class CascadeScorer(Frozen):
    """One of a list of scorers, cheap to dear."""

    by: FunctionName
    """`module:function`."""
    unsure: Band | None = None
    """From and to which score the next one decides."""


_ONE, _SEVERAL = f"{UNSHOWN}one", f"{UNSHOWN}several"
_kind = Discriminator(lambda score: _SEVERAL if isinstance(score, list | tuple) else _ONE)
Score = Annotated[Annotated[FunctionName, Tag(_ONE)] | Annotated[tuple[CascadeScorer, ...], Tag(_SEVERAL)], _kind]
"""One function, or scorers of which each decides the samples of which the one before is unsure."""
Rescore = Annotated[float, Field(ge=0, le=1)]


def scorers_of(score: str | tuple[CascadeScorer, ...]) -> tuple[CascadeScorer, ...]:
    """The scorers that a section names, one or several."""
    return (CascadeScorer(by=score),) if isinstance(score, str) else score


def bands_of(key: str, bands: Sequence[Band | None], scale: Band = (-math.inf, math.inf)) -> tuple[Band, ...]:
    """The bands of all scorers but the last. Raises EvenloadError for scorers without one, and for bands that are none
    on this scale."""
    *cheap, last = bands or [None]
    ends, shown = [band for band in cheap if band], f"unsure: {', '.join(map(str, bands))}"
    do = "give each scorer but the last the scores that the next one decides, such as unsure: [0.3, 0.7]"
    outside = any(low < scale[0] or high > scale[1] for low, high in ends)
    refuse_first(
        (not bands, f"{key} has no scorer", "an empty list", "name a function, or several by a list"),
        (len(ends) < len(cheap), f"{key}: a scorer before the last has no band", shown, do),
        (last is not None, f"{key}: nobody decides what the last scorer is unsure of", shown, do),
        (not all(low <= high for low, high in ends), f"{key}: a band is empty", shown, do),
        (outside, f"{key}: a band is outside the scale, {scale[0]:g} to {scale[1]:g}", shown, do),
    )
    return tuple(ends)


class ScoredSamples(Frozen):
    """Samples that a validation draws of prompts, as the section `generate` says, and a function of yours scores."""

    model_config = ConfigDict(validate_default=True)

    prompts: Annotated[Path, AfterValidator(file_name)]
    """A prompt a line, as of `evenload generate --prompts`."""
    samples: Annotated[int, Field(ge=1, le=4096)] = 1
    """Of each prompt; the same noise each time."""
    score: Score
    """`module:function` in the working folder or installed: from the prompt's text, a sample's text and the prompt's
    line to a number from 0 to 1, or a truth value. Or several, cheap to dear."""
    rescore: Rescore = 0.1
    """Share that the last of several scores anyway, which corrects the mean."""
    passes: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Least score of a sample that counts as right in pass@k."""
    k: tuple[bounds.Count, ...] | None = None
    """Samples of pass@k and maj@k; null: 1 and all of them."""
    answer: FunctionName | None = None
    """`module:function` from a sample's text to the answer that it votes for in maj@k, null for none; null: the text
    without white space around it."""
    every: bounds.Count = 1
    """Validations from one with samples to the next; the one after the last step has them, too."""

    @property
    def bands(self) -> tuple[Band, ...]:
        """Bands of all scorers but the last. Raises EvenloadError for what is none."""
        return bands_of("data.validation.generate.score", [one.unsure for one in scorers_of(self.score)], (0.0, 1.0))

    @property
    def counts(self) -> tuple[int, ...]:
        """Every k that is asked for once, ascending."""
        return tuple(sorted(set(self.k or (1, self.samples))))

    @property
    def figures(self) -> tuple[str, ...]:
        """Names that `checkpoint.best` may give: the higher, the better."""
        ranks = [f"pass_at_{k}" for k in self.counts] + [f"maj_at_{k}" for k in self.counts if k > 1]
        return tuple(SAMPLED + name for name in ("score", *ranks))


class DraftRule(Frozen):
    """Guesses of next tokens, of which a forward keeps those that it draws as well."""

    by: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$", max_length=100)] = "texts"
    """`texts`: by what samples said before; `quantized`: by the model, its weights rounded, where that is faster."""
    most: Annotated[int, Field(ge=1, le=15)] = 15
    """Guesses of a sample in one forward."""
    weights: Literal["int8", "int4"] = "int8"
    """Of `quantized`: with a scale an output, or one for each 128 of its inputs."""
    earlier: Annotated[Path, AfterValidator(file_name)] | None = None
    """Samples of the same prompts, as `evenload generate` wrote them at earlier weights."""


class PruneRule(Frozen):
    """Which samples are ended early since they score badly (SART, arXiv 2505.13326)."""

    score: Score
    """As that of data.validation.generate, of the text so far; any finite number."""
    rescore: Rescore = 0.1
    """As that of data.validation.generate; it moves no sample."""
    below: float
    """Until a sample of the prompt has ended: those of a lower score. From then on those below its score."""
    most: bounds.CountOrNone
    """Samples of a prompt that are ended so before any has ended by itself."""

    @property
    def bands(self) -> tuple[Band, ...]:
        """Bands of all scorers but the last. Raises EvenloadError for what is none."""
        return bands_of("generate.collect.prune.score", [one.unsure for one in scorers_of(self.score)])


class CollectRule(Frozen):
    """How many samples of each prompt are kept: those that end first, while the others are ended (SART)."""

    keep: bounds.Count
    """Samples of a prompt that are kept: those with the fewest tokens."""
    of: Annotated[int, Field(ge=1, le=4096)]
    """Samples of a prompt that are begun."""
    every: bounds.Count = 256
    """Tokens of a sample from one scoring to the next; without prune nothing is scored."""
    prune: PruneRule | None = None
    """Null: no sample is ended for its score."""
