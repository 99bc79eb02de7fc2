"""Files that policies of data read: losses of a reference, embeddings of samples and of what is wanted."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ...core.aliases import Floats
from ...core.errors import EvenloadError, refuse_first
from ...core.policies import KINDS, ChosenPolicy
from ...core.recipe.recipe import Recipe
from ...data.sources import Source, targets_of
from .reference import ReferenceLosses, numbers_in

logger = logging.getLogger("evenload")


class PolicyFiles(NamedTuple):
    """What is read; None: the policy has no such file."""

    reference: ReferenceLosses | None = None
    embeddings: Floats | None = None
    """[samples, d]"""
    queries: Floats | None = None
    """[M, d]"""


def open_files(chosen: ChosenPolicy, source: Source) -> PolicyFiles:
    """The files of a policy for the samples of a source. Raises EvenloadError."""
    paths, rows = chosen.files, ("embeddings", "queries")
    opened = {name: numbers_in(paths[name], f"plugins.data.select.{name}") for name in rows if name in paths}
    folder = paths.get("reference") or paths.get("excess")
    files = PolicyFiles(None if folder is None else ReferenceLosses(folder, source), **opened)
    _refuse_unlike(files, len(source.lengths))
    return files


def refuse_policies(recipe: Recipe, source: Source) -> None:
    """Raise EvenloadError where the policies of a recipe cannot work on its data: before a rank starts."""
    for chosen in filter(None, map(recipe.data_policy, KINDS)):
        files = open_files(chosen, source)
        if files.reference is not None and files.reference.sparse:
            text = "plugins.data.reference is sparse: its losses are of attention that left blocks of keys out (%s)"
            logger.info(text, files.reference.sparse)
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
            raise EvenloadError(f"plugins.data.select.{name} are not rows of numbers", f"shape {list(rows.shape)}", do)
    if own is not None and len(own) != num_samples:
        do = "embed the samples of this recipe, in their order; of domains those of ascending names"
        raise EvenloadError(what, f"{len(own)} rows, {num_samples} samples", do)
    if own is not None and wanted is not None and own.shape[1] != wanted.shape[1]:
        what = "embeddings and queries of plugins.data.select are of unlike models"
        raise EvenloadError(what, f"d {own.shape[1]} and {wanted.shape[1]}", "embed both alike")
