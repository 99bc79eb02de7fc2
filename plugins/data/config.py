"""The data section of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from ...core.errors import EvenloadError
from ...core.input.bounds import Count
from ...core.input.validation import Frozen
from ...core.policies import ChosenPolicy, Kind, chosen_policy
from ...core.registry import PluginConfig, data_policies


class AskedPolicy(Frozen):
    """A policy of data by name, with its settings."""

    policy: str
    """mix: temperature, odm, doremi, ado. select: random, loss, delta_loss, less, cluster_less, online, near, tsds.
    weight: loss, adapt. Or one that another plugin offers (docs/selection.md)."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the policy, by name."""
    kind: ClassVar[Kind]

    @model_validator(mode="after")
    def _exists(self) -> AskedPolicy:
        try:
            self.chosen()
        except EvenloadError as error:
            raise ValueError(f"{error.what}: {error.do}") from error
        return self

    def chosen(self) -> ChosenPolicy:
        """The policy with its settings. Raises EvenloadError for a name or a setting that is not there."""
        return chosen_policy(self.kind, self.policy, self.settings, data_policies(self.kind))


class MixPolicy(AskedPolicy):
    """Shares that follow what steps show, from those of data.domains on."""

    kind = "mix"
    every: Count = 1
    """Steps whose losses are summed before the policy is asked."""


class SelectPolicy(AskedPolicy):
    """Samples that are taken of those that are drawn."""

    kind = "select"
    every: Count = 1
    """Steps that train on one selection before the next is made."""
    pool: Count | None = None
    """So many samples are drawn for each one that is taken; null: all samples are the pool, each time."""
    embeddings: Path | None = None
    """A .npy of numbers [samples, d], a row for each sample of the data in their order."""
    queries: Path | None = None
    """A .npy of numbers [M, d]: embeddings of what is wanted."""


class WeightPolicy(AskedPolicy):
    """Weights of the samples of a global batch by a pass of the model over them before each step."""

    kind = "weight"


class DataConfig(PluginConfig):
    """What is drawn, with what weight, by what training shows."""

    mix: MixPolicy | None = None
    """Shares of data.domains."""
    select: SelectPolicy | None = None
    """Which of the samples that are drawn are trained on."""
    weight: WeightPolicy | None = None
    """What samples count in the loss."""
    reference: Path | None = None
    """Losses of every token by another model, as `evenload score` writes them: doremi needs them, online takes them."""

    @model_validator(mode="after")
    def _does_something(self) -> DataConfig:
        if self.enabled and not (self.mix or self.select or self.weight):
            raise ValueError("set mix: {policy: odm}, or enabled false: without a policy the plugin does nothing")
        return self


def chosen_of(config: DataConfig, kind: Kind) -> ChosenPolicy | None:
    """The policy of a kind that the settings ask for."""
    asked: MixPolicy | SelectPolicy | WeightPolicy | None = getattr(config, kind)
    if not config.enabled or asked is None:
        return None
    chosen = asked.chosen()
    files: dict[str, Path] = {}
    if config.reference is not None and kind != "weight":
        files["excess" if kind == "mix" else "reference"] = config.reference
    if isinstance(asked, SelectPolicy):
        embedded = {"embeddings": asked.embeddings, "queries": asked.queries}
        files |= {name: path for name, path in embedded.items() if path is not None}
        return chosen._replace(every=asked.every, pool=asked.pool, files=files)
    return chosen._replace(every=getattr(asked, "every", 1), files=files)
