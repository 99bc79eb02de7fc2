"""The samples that a forecast draws: lengths as training would cut them, of one source or of domains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...core.errors import EvenloadError, nearest, refuse_first, shorten
from ...core.plan.step_plan import Lengths, as_lengths
from ...core.planning.chain import PlanChain
from ...core.recipe.recipe import Recipe
from ...data.lengths import read_lengths
from ...data.mixed import naming_domain
from ...data.samples.cut import Cut, cut
from ..drawing import Domains, Drawing, batch_size

GivenLengths = Path | Lengths
"""A file of lengths, or lengths of documents."""


class ForecastSamples(NamedTuple):
    """Tokens of every sample, and what they are a mixture of, if they are one."""

    lengths: Lengths
    domains: Domains | None = None

    def drawing(self, recipe: Recipe, chain: PlanChain) -> Drawing:
        """The global batches as training draws them."""
        seed = recipe.train.seed
        return Drawing.resume(None, self.lengths, batch_size(recipe), chain, seed=seed, domains=self.domains)


def samples_of(recipe: Recipe, lengths: GivenLengths | Mapping[str, GivenLengths]) -> ForecastSamples:
    """The samples of a recipe whose documents have these lengths, by domain where it has any. Raises EvenloadError."""
    if recipe.data.domains is None:
        assert not isinstance(lengths, Mapping), "the command line names those of domains and tenants alone"
        return ForecastSamples(pieces_of(recipe, lengths).length)
    if not isinstance(lengths, Mapping):
        do = "write --lengths NAME=FILE once for each domain, or leave it out: their own data are opened"
        raise EvenloadError("lengths of domains are given by name", "lengths without a name", do)
    refuse_other_domains(recipe, lengths)
    parts = {}
    for name, own in lengths.items():
        with naming_domain(name):
            parts[name] = pieces_of(recipe, own).length
            refuse_first((not len(parts[name]), "it has no sample", "", "check its lengths and data.min_length"))
    domains = Domains.of_lengths(recipe, parts, {name: np.maximum(own - 1, 0) for name, own in parts.items()})
    return ForecastSamples(as_lengths(np.concatenate([parts[name] for name in domains.mixture.names])), domains)


def refuse_other_domains(recipe: Recipe, lengths: Mapping[str, object]) -> None:
    """Raise EvenloadError for lengths of a domain that the recipe lacks, or for one that has none."""
    assert recipe.data.domains is not None
    unknown = next((name for name in lengths if name not in recipe.data.domains), None)
    missing = [name for name in recipe.data.domains if name not in lengths]
    known, do = f"domains {', '.join(recipe.data.domains)}", "write --lengths NAME=FILE once for each domain"
    what = f"the recipe has no domain {shorten(unknown or '')}"
    refuse_first(
        (unknown is not None, what, known, nearest(unknown or "", recipe.data.domains)),
        (bool(missing), f"there are no lengths of the domain {', '.join(missing)}", known, do),
    )


def pieces_of(recipe: Recipe, lengths: GivenLengths) -> Cut:
    """Documents of these lengths as training would cut them. Raises EvenloadError."""
    all_lengths = read_lengths(lengths) if isinstance(lengths, Path) else lengths
    return cut(all_lengths, recipe.data.max_length, recipe.data.long_samples, recipe.data.min_length)
