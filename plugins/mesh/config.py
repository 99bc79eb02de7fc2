"""The mesh section of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ...core.input.bounds import RankCountOrAll, TokenCount, Tries
from ...core.input.validation import OFF_IS_A_WORD
from ...core.plan.limits import Limits
from ...core.registry import PluginConfig

EngineName = Literal["ring", "all_gather", "all_to_all", "hybrid"]
ENGINES: tuple[EngineName, ...] = ("ring", "all_gather", "all_to_all", "hybrid")


_AutoOrOff = Annotated[Literal["auto", "off"], OFF_IS_A_WORD]


class MeshConfig(PluginConfig):
    """How many ranks, and which, share each sequence; chosen by predicted time."""

    max_tokens: TokenCount | None = None
    """Tokens that one rank may hold in one micro-batch; of several plugins' caps the least holds. Null: those of the
    other plugins, or else as many as the device's memory is predicted to hold."""
    max_degree: RankCountOrAll = 0
    """Most ranks that may share a sequence. 0: all."""
    powers_of_two: bool = False
    """Only 1, 2, 4, 8, ... ranks share a sequence."""
    engines: tuple[EngineName, ...] = Field(default=ENGINES, min_length=1)
    """Ways to share attention that may be chosen: keys and values in a ring, or gathered; heads by all-to-all; or heads
    inside groups of ranks and a ring across."""
    remap: _AutoOrOff = "auto"
    """Whether modules other than attention may run on equally many tokens of every rank, where that is predicted to
    pay."""
    routed: _AutoOrOff = "auto"
    """Whether what travels between nodes may be spread over all ranks of both, where that is predicted to pay."""
    offload: _AutoOrOff = "auto"
    """Whether activations may wait in host memory where the device's is predicted not to hold them."""
    effort: Tries = 2
    """How hard to look for better divisions of the batch into rounds; each further unit takes a tenth longer."""

    @model_validator(mode="before")
    @classmethod
    def _without_halves(cls, values: Any) -> Any:
        """``halves: off`` stands in every checkpoint that was written while there was such a key."""
        if isinstance(values, dict) and values.get("halves") in ("off", False):
            return {key: value for key, value in values.items() if key != "halves"}
        return values

    @field_validator("engines", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        """``engines: ring`` means ``engines: [ring]``."""
        return (value,) if isinstance(value, str) else value

    def unshared(self) -> MeshConfig:
        return self.model_copy(update={"max_degree": 1})

    def capped(self, limits: Limits) -> Limits:
        return limits.under(self.max_tokens)
