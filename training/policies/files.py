"""Files that policies of data read: losses of a reference, embeddings of samples and of what is wanted."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.aliases import Floats
from ...core.errors import EvenloadError, refuse_first
from ...core.policies import KINDS
from ...core.recipe.recipe import Recipe
from ...data.reference import ReferenceLosses, numbers_in
from ...data.sources import Source, targets_of
from ..drawing import Domains


class PolicyFiles(NamedTuple):
    """What is read; None: the recipe names no such file."""

    excess: ReferenceLosses | None = None
    """For the policy of shares."""
    reference: ReferenceLosses | None = None
    """For the selection."""
    embeddings: Floats | None = None
    """[samples, d]"""
    queries: Floats | None = None
    """[M, d]"""


def open_files(recipe: Recipe, source: Source) -> PolicyFiles:
    """The files that the policies of a recipe need for its data. Raises EvenloadError."""
    chosen = [one for one in map(recipe.data_policy, KINDS) if one is not None]
    opened: dict[str, Any] = {}
    for name, path in (item for one in chosen for item in one.files.items()):
        if name in ("embeddings", "queries"):
            opened[name] = numbers_in(path, f"plugins.data.select.{name}")
        else:
            opened[name] = ReferenceLosses(path, source)
    files = PolicyFiles(**opened)
    _refuse_unlike(files, len(source.lengths))
    return files


def refuse_policies(recipe: Recipe, source: Source) -> None:
    """Raise EvenloadError where the policies of a recipe cannot work on its data: before a rank starts."""
    Domains.of_source(recipe, source)
    open_files(recipe, source)
    if (select := recipe.data_policy("select")) is None:
        return
    asked, there = (
        (select.pool or 1) * select.every * recipe.train.global_batch_size,
        int((targets_of(source) > 0).sum()),
    )
    detail = f"{asked} samples for an update, {there} samples with a target"
    do = "lower select.pool, select.every or train.global_batch_size: a selection takes no sample twice"
    refuse_first((asked > there, "a selection is made of more samples than there are", detail, do))


def _refuse_unlike(files: PolicyFiles, num_samples: int) -> None:
    own, wanted = files.embeddings, files.queries
    what = "plugins.data.select.embeddings are not those of the data"
    for name, rows in (("embeddings", own), ("queries", wanted)):
        if rows is not None and (rows.ndim != 2 or not rows.size):
            do = "give an array [rows, d]"
            raise EvenloadError(f"plugins.data.select.{name} are no rows of numbers", f"shape {list(rows.shape)}", do)
    if own is not None and len(own) != num_samples:
        do = "embed the samples of this recipe, in their order; of domains those of ascending names"
        raise EvenloadError(what, f"{len(own)} rows, {num_samples} samples", do)
    if own is not None and wanted is not None and own.shape[1] != wanted.shape[1]:
        what = "embeddings and queries of plugins.data.select are of unlike models"
        raise EvenloadError(what, f"d {own.shape[1]} and {wanted.shape[1]}", "embed both alike")
