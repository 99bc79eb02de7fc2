"""Tenants as far as a plan goes: their files, and the lengths of their samples. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import EvenloadError, refuse_first, shorten, shown
from ...core.plan.step_plan import Lengths, as_lengths
from ...core.recipe.recipe import Recipe, place_of
from ...core.recipe.tenant import Tenant, TenantData, read_tenant
from ...data.formats import Settings, open_documents, refuse_outside
from ...data.lengths import read_lengths
from ...data.samples.cut import cut
from ...data.samples.order import BatchSize
from ...data.sources import Source
from ...data.tokenizers import holds_tokenizer, open_tokenizer
from ..drawing import Domains
from ..preflight import open_all
from .trials import sweep_of

_Counts = NDArray[np.int64]
_TABLES = (".arrow", ".parquet")


class Member(NamedTuple):
    """A tenant that is planned."""

    name: str
    config: Tenant
    lengths: _Counts
    """Tokens of each of its samples."""
    targets: _Counts | None
    """Of these, those that carry loss; None: each but the first one."""
    domains: Domains | None = None
    """What they are a mixture of; None: they are of one source."""

    @property
    def size(self) -> BatchSize:
        return BatchSize(self.config.train.batch_size)

    @property
    def steps(self) -> int:
        """Updates that the tenant's adapter gets."""
        train = self.config.train
        if train.epochs is None:
            return train.steps
        if self.domains is not None:
            return self.domains.mixture.steps(train.seed, epochs=train.epochs)
        return self.size.steps(self.lengths, train.seed, epochs=train.epochs)

    @property
    def tokens_of_step(self) -> float:
        """Tokens of a step of the tenant, in the mean."""
        return self.config.train.batch_size * float(self.lengths.mean())


def members_of(recipe: Recipe, files: Mapping[str, Path]) -> list[Member]:
    """The tenants of a recipe's folder, trials of sweeps each by itself.

    ``files``: files of lengths by tenant instead, whose data then need not be there; who has no file in the folder has
    the settings of an empty one. Raises EvenloadError.
    """
    folder = _folder_of(recipe)
    if files:
        return [member for name, file in files.items() for member in _of_file(folder, name, file)]
    if folder is None:
        do = "set plugins.lora.tenants to a folder with a YAML file for each, or give --lengths NAME=FILE for each"
        raise EvenloadError("nobody says which tenants are to be planned", "plugins.lora.tenants null", do)
    paths = sorted(path for path in folder.glob("*.yaml") if not path.name.startswith("."))
    if not paths:
        do = "put a file NAME.yaml there for each tenant, or give --lengths NAME=FILE for each"
        raise EvenloadError("there is no tenant to plan", f"no file NAME.yaml in {shorten(str(folder))}", do)
    opened: dict[str, Source] = {}
    members = []
    for path in paths:
        for name, tenant in _read(path):
            data = tenant.data.model_dump_json()
            if data not in opened:
                with naming(name):
                    if (root := _of_plugin(recipe, "root")) is not None:
                        refuse_outside(root, tenant.opens())
                    specs, weights = tenant.data.domain_sources, recipe.model.weights
                    opened[data] = open_all(tenant.data, tenant.data.source, specs, weights)
            source = opened[data]
            domains = Domains.of_data(tenant.data, BatchSize(tenant.train.batch_size), source)
            members.append(_checked(Member(name, tenant, source.lengths, source.targets, domains)))
    return members


def lengths_of(
    recipe: Recipe, words: Sequence[str], tokenizer: str | None = None
) -> Path | Lengths | Mapping[str, Path | Lengths]:
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


def _folder_of(recipe: Recipe) -> Path | None:
    """Raises EvenloadError where the recipe names a folder that is none."""
    folder = _of_plugin(recipe, "tenants")
    folder = None if folder is None else place_of(folder)
    if folder is not None and not folder.is_dir():
        what, do = "the folder of tenants is not there", "name a folder in plugins.lora.tenants"
        raise EvenloadError(what, shorten(str(folder)), do)
    return folder


def _of_plugin(recipe: Recipe, key: str) -> Path | None:
    return getattr(recipe.config_of(recipe.adapting), key, None) if recipe.adapts else None


def _of_file(folder: Path | None, name: str, file: Path) -> list[Member]:
    path = None if folder is None else folder / f"{name}.yaml"
    known = path is not None and path.is_file()
    trials = _read(path) if known and path else [(name, Tenant(data=TenantData(source=str(file))))]
    lengths = read_lengths(file)
    members = []
    for trial, tenant in trials:
        data = tenant.data
        what, do = f"the tenant {shorten(name)} has domains, and a file of lengths says none", "plan it by its own data"
        refuse_first((data.domains is not None, what, f"--lengths {shorten(f'{name}={file}')}", do))
        samples = cut(lengths, data.max_length, data.long_samples, data.min_length).length
        if not len(samples):
            detail = f"{len(lengths)} lengths, all below data.min_length {data.min_length} or left out"
            raise EvenloadError(f"the tenant {shorten(name)} has no sample", detail, "check its file and its lengths")
        members.append(_checked(Member(trial, tenant, samples, None)))
    return members


def _read(path: Path) -> list[tuple[str, Tenant]]:
    """The tenant of a file, or the trials of its sweep, by their names."""
    with naming(path.stem):
        tenant = read_tenant(path)
        if tenant.sweep is None:
            return [(path.stem, tenant)]
        return [(trial.name, trial.tenant) for trial in sweep_of(path.stem, tenant).trials]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors inside name the tenant."""
    try:
        yield
    except EvenloadError as error:
        tenant = f"tenant {shorten(name)}"
        what = error.what if tenant in error.what else f"the {tenant}: {error.what}"
        raise EvenloadError(what, error.found, error.do) from error


def _checked(member: Member) -> Member:
    """Raises EvenloadError for fewer samples than a batch."""
    count, wanted = len(member.lengths), member.config.train.batch_size
    what = f"the tenant {shorten(member.name)} has fewer samples than one batch"
    refuse_first((count < wanted, what, f"{count} samples, train.batch_size {wanted}", "lower its train.batch_size"))
    return member
