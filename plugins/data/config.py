"""The data section of a recipe."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from ...core.errors import EvenloadError
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
        try:
            self.chosen()
        except EvenloadError as error:
            raise ValueError(f"{error.what}: {error.do}") from error
        return self

    def chosen(self) -> ChosenPolicy:
        """The policy with its settings. Raises EvenloadError for a name or a setting that is not there."""
        chosen = chosen_policy("mix", self.policy, self.settings, data_policies("mix"))
        return chosen._replace(every=self.every)


class DataConfig(PluginConfig):
    """What is drawn, with what weight, by what training shows."""

    mix: MixPolicy | None = None
    """Shares of data.domains; needed where the plugin is enabled."""

    @model_validator(mode="after")
    def _does_something(self) -> DataConfig:
        if self.enabled and self.mix is None:
            raise ValueError("set mix: {policy: odm}, or enabled false: without a policy the plugin does nothing")
        return self


def mix_of(config: DataConfig) -> ChosenPolicy | None:
    """The policy of shares that the settings ask for."""
    return config.mix.chosen() if config.enabled and config.mix else None
