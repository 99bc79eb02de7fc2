"""The packing section of a recipe."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Annotated, Literal

from pydantic import field_validator, model_validator

from ...core.input.bounds import Amount, CountOrNone, Effort, TokenCount
from ...core.input.validation import OFF_IS_A_WORD
from ...core.plan.limits import Limits
from ...core.registry import PluginConfig

logger = logging.getLogger("evenload")


@cache
def _warn_of_polish_nodes() -> None:
    logger.warning("plugins.packing.polish_nodes has no effect any more; remove it from the recipe")


class PackingConfig(PluginConfig):
    """Slices and whole sequences into packed micro-batches, balanced by cost."""

    max_tokens: TokenCount = 16384
    """Tokens that one rank may hold in one micro-batch; of several plugins' caps the least holds."""
    slices: Annotated[Literal["auto", "even", "off"], OFF_IS_A_WORD] = "auto"
    """Whether sequences are cut. even: so that all micro-batches cost alike, where that is not predicted to make the
    step slower. auto: the same, but only in a batch with a sequence longer than max_tokens, or where it is predicted to
    make the step faster (pipelines, ZeRO-3). off: never; longer sequences are refused."""
    block_tokens: TokenCount = 4
    """Slices start at multiples of this, and none is shorter unless its sequence ends."""
    asymmetric: bool = True
    """Let the backward pass group slices anew where the cost model says that it pays."""
    activation_gib: Amount | None = None
    """Activations and prefix KV that one rank may hold [GiB]; early slices are replayed where they do not fit. Null: no
    cap."""
    max_delay_steps: CountOrNone = 0
    """A sequence that alone would bound its step may wait for a later global batch, at most this many steps."""
    group_size: CountOrNone = 0
    """So many consecutive samples of a global batch are a group that stays together: GRPO's completions of a prompt; 2
    are pairs. 0: none, unless who asks for a plan says which are."""
    groups_in: Literal["rank", "micro_batch"] = "rank"
    """Where the samples of a group stay together: on one data-parallel rank, or in one of its micro-batches."""
    equal_size: bool = False
    """As many groups on every data-parallel rank as on the others, or as many samples where there are no groups; one
    more where their number cannot be divided."""
    padded: bool = False
    """Sequences stay whole and are rows, padded to the longest of their micro-batch: for models that cannot keep apart
    several in one row. Transformers' Trainer sets it by itself where a model cannot run packs."""
    round_tokens: TokenCount = 1
    """Every micro-batch is filled up to a multiple of so many tokens: fewer shapes for kernels, compilers and
    allocators. Dummies, padded rows and what ranks share stay as they are."""
    largest_first: bool = False
    """Each rank runs its largest micro-batch first, where the order is free: memory peaks at once. Slices of a sequence
    and passes of a pipeline keep theirs."""
    trees: bool = True
    """What rows begin with in common, such as the prompt of GRPO's completions or of a pair, is computed once, and rows
    that share it stay together where that is predicted to be faster."""
    polish_nodes: Effort = 0
    """Without effect, kept for older recipes: an integer program after the greedy gained at most 0.0003."""

    @field_validator("polish_nodes")
    @classmethod
    def _has_no_effect(cls, value: int) -> int:
        if value:
            _warn_of_polish_nodes()
        return value

    @model_validator(mode="after")
    def _groups_wait_together(self) -> PackingConfig:
        if self.max_delay_steps and (self.group_size or self.equal_size):
            raise ValueError(
                "max_delay_steps holds single samples back: set it to 0, or group_size 0, equal_size false"
            )
        return self

    @model_validator(mode="after")
    def _rows_are_free(self) -> PackingConfig:
        if self.padded and (self.group_size or self.equal_size or self.slices == "even"):
            raise ValueError(
                "padded rows are whole samples, each by itself: set group_size 0, equal_size false, slices auto or off"
            )
        return self

    @model_validator(mode="after")
    def _holds_a_multiple(self) -> PackingConfig:
        if self.max_tokens < self.round_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} holds no multiple of round_tokens {self.round_tokens}")
        return self

    def folded(self, num_ranks: int) -> PackingConfig:
        # What ranks share runs backward in the groups of its forward.
        asymmetric = self.asymmetric and num_ranks == 1
        return self.model_copy(update={"max_tokens": self.max_tokens * num_ranks, "asymmetric": asymmetric})

    def capped(self, limits: Limits) -> Limits:
        capped = limits.under(self.max_tokens, self.activation_gib)
        # What is filled up stays under the cap, whoever set it.
        most = max(self.round_tokens, capped.max_tokens // self.round_tokens * self.round_tokens)
        return replace(
            capped,
            max_tokens=most,
            equal_size=self.equal_size,
            groups_in_micro_batch=self.groups_in == "micro_batch",
            padded=self.padded,
            round_tokens=self.round_tokens,
            largest_first=self.largest_first,
        )

    def in_rows(self, count: int = 1) -> PackingConfig | None:
        if self.group_size or self.equal_size:
            return None
        return self.model_copy(update={"padded": True, "slices": "off", "max_tokens": self.max_tokens // count})

    def uncut(self) -> PackingConfig:
        return self.model_copy(update={"slices": "off"})
