"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) in PEFT's words: what ``adapter_config.json`` says of one.

A linear layer y = x W^T gets y + scaling * (x A^T) B^T with A [r, in] and B [out, r]; W stays as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal

from pydantic import Field

from ..errors import EvenloadError, shown
from ..input import bounds
from ..input.sandbox import Budget, SandboxError, bounded
from .sections import Section, Updates

ALL_LINEAR: Literal["all-linear"] = "all-linear"
_PLAIN = re.compile(r"(\w|-|\\?\.)*")
"""A pattern without repetitions and choices, which takes no time to speak of."""
_FEW = 64


class Adapter(Section):
    """The adapter of a tenant; the fields of PEFT's LoraConfig that evenload knows."""

    r: bounds.Size = 8
    """Rank of each pair of matrices."""
    lora_alpha: bounds.Amount = 8.0
    """The product of a pair is multiplied by lora_alpha / r, or by lora_alpha / sqrt(r) with use_rslora."""
    lora_dropout: bounds.Beta = 0.0
    """Share of the inputs of A that are dropped while training."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = ALL_LINEAR
    """Ends of names of the linear layers that are adapted, as Hugging Face calls them (q_proj, self_attn.v_proj ...);
    all-linear: every one but the output layer."""
    rank_pattern: Mapping[str, bounds.Size] = Field(default={})
    """Other ranks, by ends of names or patterns of them."""
    alpha_pattern: Mapping[str, bounds.Amount] = Field(default={})
    """Other alphas, likewise."""
    use_rslora: bool = False
    """Rank-stabilised scaling (Kalajdzievski, arXiv 2312.03732)."""

    def targets(self, names: Iterable[str]) -> list[str]:
        """The linear layers that are adapted, out of these names and in their order."""
        if self.target_modules == ALL_LINEAR:
            return list(names)
        return [name for name in names if any(_ends(name, target) for target in self.target_modules)]

    def without_effect(self, names: Iterable[str]) -> list[str]:
        """Entries of target_modules that mean none of the names."""
        known = list(names)
        wanted = () if self.target_modules == ALL_LINEAR else self.target_modules
        return [target for target in wanted if not any(_ends(name, target) for name in known)]

    def rank_of(self, name: str) -> int:
        """Rank of the matrices of a linear layer. Raises EvenloadError for patterns that are none, or have no end."""
        chosen = self._patterns["rank_pattern"].of(name)
        return self.r if chosen is None else self.rank_pattern[chosen]

    def scaling_of(self, name: str) -> float:
        """What the product of a linear layer's matrices is multiplied by. Raises as `rank_of`."""
        rank, chosen = self.rank_of(name), self._patterns["alpha_pattern"].of(name)
        alpha = self.lora_alpha if chosen is None else self.alpha_pattern[chosen]
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @cached_property
    def _patterns(self) -> dict[str, _Patterns]:
        return {key: _Patterns(key, tuple(getattr(self, key))) for key in ("rank_pattern", "alpha_pattern")}


class TenantTrain(Updates):
    """How a tenant's adapter is trained; nothing here touches another tenant."""

    steps: bounds.Count = 100
    """Updates of this adapter."""
    epochs: bounds.Count | None = None
    """Instead of steps."""
    batch_size: bounds.SequenceCount = 8
    """Samples of a step."""
    seed: bounds.Seed = 1234
    """Of the order of samples, the adapter's first values and its dropout."""
    lr: bounds.Amount = 2e-4


class _Patterns:
    """Patterns of names. Each name is looked up once, so whoever looked all up in time never waits again."""

    def __init__(self, key: str, patterns: tuple[str, ...]) -> None:
        self._key, self._patterns = key, patterns
        self._budget, self._chosen = Budget(), dict[str, str | None]()
        self._plain = len(patterns) <= _FEW and all(map(_PLAIN.fullmatch, patterns))

    def of(self, name: str) -> str | None:
        """The first pattern that is the name, or its end after a dot, as PEFT chooses. Raises EvenloadError."""
        if name not in self._chosen:
            self._chosen[name] = self._first(name)
        return self._chosen[name]

    def _first(self, name: str) -> str | None:
        if self._plain:
            return first_match(self._patterns, name)
        try:
            chosen: str | None = bounded(self._budget, first_match, self._patterns, name)
        except SandboxError as error:
            what, detail = f"adapter.{self._key} has no patterns of names", f"{error}; in {shown(self._patterns)}"
            raise EvenloadError(what, detail, "mend it, or write names out: {q_proj: 8}") from error
        return chosen


def first_match(patterns: Sequence[str], name: str) -> str | None:
    """The first of the patterns that is the name, or its end after a dot."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", name)), None)


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
