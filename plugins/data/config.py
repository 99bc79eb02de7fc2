"""The data section of a recipe."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from ...core.input.bounds import Count
from ...core.input.validation import Frozen
from ...core.policies import ChosenPolicy, chosen_policy
from ...core.registry import PluginConfig, data_policies


class MixPolicy(Frozen):
    """Shares that follow what steps show, from those of data.domains on."""

    policy: str
    """temperature, odm, doremi, ado, or one that another plugin offers (docs/mixture_policies.md)."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the policy, by name."""
    every: Count = 1
    """Steps whose losses are summed before the policy is asked."""

    @model_validator(mode="after")
    def _exists(self) -> MixPolicy:
        self.chosen()
        return self

    def chosen(self) -> ChosenPolicy:
        """The policy with its settings. Raises EvenloadError for a name or a setting that is not there."""
        return chosen_policy("mix", self.policy, self.settings, data_policies("mix"))


class DataConfig(PluginConfig):
    """What is drawn, with what weight, by what training shows."""

    mix: MixPolicy | None = None
    """Shares of the domains; null: as data.mix says."""


def mix_of(config: DataConfig) -> ChosenPolicy | None:
    """The policy of shares that the settings ask for."""
    return config.mix.chosen() if config.enabled and config.mix else None
