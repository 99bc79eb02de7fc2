"""Sections about samples that the model itself makes: which are scored in a validation, which a generation keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from ..input import bounds
from ..input.reading import file_name
from ..input.validation import Frozen

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", max_length=1000)]
"""``module:name`` of the user's own."""
SAMPLED = "generate."
"""What names of figures of samples begin with in ``checkpoint.best``."""


class ScoredSamples(Frozen):
    """Samples that a validation draws of prompts, as the section `generate` says, and a function of yours scores."""

    model_config = ConfigDict(validate_default=True)

    prompts: Annotated[Path, AfterValidator(file_name)]
    """A prompt a line, as of `evenload generate --prompts`."""
    samples: Annotated[int, Field(ge=1, le=4096)] = 1
    """Of each prompt; the same noise each time."""
    score: FunctionName
    """`module:function` in the working folder or installed: from the prompt's text, a sample's text and the prompt's
    line to a number from 0 to 1, or a truth value."""
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
    """`texts`: by what samples said before."""
    most: Annotated[int, Field(ge=1, le=15)] = 8
    """Guesses of a sample in one forward."""
    earlier: Annotated[Path, AfterValidator(file_name)] | None = None
    """Samples of the same prompts, as `evenload generate` wrote them at earlier weights."""


class PruneRule(Frozen):
    """Which samples are ended early since they score badly (SART, arXiv 2505.13326)."""

    score: FunctionName
    """As that of data.validation.generate, of the text so far; any finite number."""
    below: float
    """Until a sample of the prompt has ended: those of a lower score. From then on those below its score."""
    most: bounds.CountOrNone
    """Samples of a prompt that are ended so before any has ended by itself."""


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
