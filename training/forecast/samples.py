"""The samples that a forecast draws: lengths as training would cut them, of one source or of domains."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...core.errors import EvenloadError, nearest, refuse_first, shorten, shown
from ...core.plan.step_plan import Lengths, as_lengths
from ...core.planning.chain import PlanChain
from ...core.recipe.recipe import Recipe
from ...data.formats import Settings, open_documents
from ...data.lengths import SharedPrompts, read_lengths, read_prompted
from ...data.mixed import naming_domain
from ...data.samples.cut import Cut, cut
from ...data.tokenizers import holds_tokenizer, open_tokenizer
from ..drawing import Domains, Drawing, batch_size

GivenLengths = Path | Lengths
"""A file of lengths, or lengths of documents."""
_TABLES = (".arrow", ".parquet")


def lengths_of(
    recipe: Recipe, words: Sequence[str], tokenizer: str | None = None
) -> GivenLengths | Mapping[str, GivenLengths]:
    """What ``--lengths`` names: a file of lengths, or the lengths of data, which are opened with ``tokenizer`` where it
    is given, and else as the recipe opens its own; these stand for none. Of a recipe with domains or tenants that of
    ``NAME=FILE`` each; where it is left out, of domains those of their own data, of tenants none. Raises EvenloadError.
    """
    if recipe.adapts:
        do = "leave it out: each tenant's data has its own"
        refuse_first((tokenizer is not None, "tenants are planned by their own tokenizers", "--tokenizer", do))
        return {name: Path(file) for name, file in _by_name(words, "tenant").items()}
    if (domains := recipe.data.domain_sources) is not None:
        specs = _by_name(words, "domain") or domains
        return {name: _file_or_data(recipe, spec, tokenizer, named=bool(words)) for name, spec in specs.items()}
    if len(words) > 1:
        do = "give one: --lengths FILE (.npy, .txt, .jsonl or Megatron .idx), or data"
        raise EvenloadError("a recipe without tenants is planned from one file", f"{len(words)} times --lengths", do)
    return _file_or_data(recipe, words[0] if words else recipe.data.source, tokenizer, named=bool(words))


def _file_or_data(recipe: Recipe, spec: str, tokenizer: str | None, *, named: bool) -> Path | Lengths:
    """The file of lengths that the command line ``named``, or the lengths of data."""
    if named and tokenizer is None and Path(spec).suffix not in _TABLES and not os.path.isdir(spec):
        return Path(spec)
    return _of_data(recipe, spec, tokenizer)


def _of_data(recipe: Recipe, spec: str, tokenizer: str | None) -> Lengths:
    """Tokens of every document of a data set."""
    data, weights = recipe.data, recipe.model.weights
    if tokenizer is None:
        own = data.tokenizer == "bytes" and weights is not None and holds_tokenizer(weights)
        tokenizer = str(weights) if own else data.tokenizer
    settings = Settings(open_tokenizer(tokenizer), data.text_key, data.append_eos, data.loss_on == "all")
    return as_lengths(open_documents(spec, settings).lengths)


def _by_name(words: Sequence[str], of: str) -> dict[str, str]:
    files: dict[str, str] = {}
    for word in words:
        name, equals, file = word.partition("=")
        do = f"write --lengths NAME=FILE once for each {of}, or leave it out: their own data are opened"
        if not (name and equals and file):
            raise EvenloadError(f"lengths of {of}s are given by name", shown(word), do)
        if name in files:
            raise EvenloadError(f"lengths of the {of} {shorten(name)} are given twice", shown(word), do)
        files[name] = file
    return files


class ForecastSamples(NamedTuple):
    """Tokens of every sample, and what they are a mixture of, if they are one."""

    lengths: Lengths
    domains: Domains | None = None
    prompted: SharedPrompts | None = None
    """Which of them begin alike, where the file says so; batches are then of whole groups."""

    def drawing(self, recipe: Recipe, chain: PlanChain) -> Drawing:
        """The global batches as training draws them."""
        trunks, groups = self.prompted or (None, None)
        return Drawing(
            None,
            self.lengths,
            batch_size(recipe),
            chain,
            seed=recipe.train.seed,
            groups=groups,
            trunks=trunks,
            domains=self.domains,
        )


def samples_of(recipe: Recipe, lengths: GivenLengths | Mapping[str, GivenLengths]) -> ForecastSamples:
    """The samples of a recipe whose documents have these lengths, by domain where it has any. Raises EvenloadError."""
    if recipe.data.domains is None:
        assert not isinstance(lengths, Mapping), "the command line names those of domains and tenants alone"
        all_lengths, prompted = read_prompted(lengths) if isinstance(lengths, Path) else (lengths, None)
        pieces = pieces_of(recipe, all_lengths)
        return ForecastSamples(pieces.length, prompted=None if prompted is None else _of_pieces(prompted, pieces))
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


def _of_pieces(prompted: SharedPrompts, pieces: Cut) -> SharedPrompts:
    """Which pieces begin alike: the first ones of documents that do."""
    prompts, groups = (column[pieces.document] for column in prompted)
    shared = np.where(pieces.start == 0, np.minimum(prompts, pieces.length), 0)
    return SharedPrompts(shared, np.unique(groups, return_inverse=True)[1])


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
