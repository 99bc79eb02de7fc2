"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) in PEFT's words: what ``adapter_config.json`` says of one.

A linear layer y = x W^T gets y + scaling * (x A^T) B^T with A [r, in] and B [out, r]; W stays as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

from pydantic import Field

from ..input import bounds
from .sections import Section

ALL_LINEAR: Literal["all-linear"] = "all-linear"
_Value = TypeVar("_Value", int, float)


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
        """Those of the names of linear layers that are adapted, in their order."""
        if self.target_modules == ALL_LINEAR:
            return list(names)
        return [name for name in names if any(_ends(name, target) for target in self.target_modules)]

    def without_effect(self, names: Iterable[str]) -> list[str]:
        """Entries of target_modules that mean none of the names."""
        known = list(names)
        wanted = () if self.target_modules == ALL_LINEAR else self.target_modules
        return [target for target in wanted if not any(_ends(name, target) for name in known)]

    def rank_of(self, name: str) -> int:
        """Rank of the matrices of a linear layer."""
        return _of_pattern(self.rank_pattern, name, self.r)

    def scaling_of(self, name: str) -> float:
        """What the product of a linear layer's matrices is multiplied by."""
        rank, alpha = self.rank_of(name), _of_pattern(self.alpha_pattern, name, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _of_pattern(patterns: Mapping[str, _Value], name: str, default: _Value) -> _Value:
    """As PEFT chooses: the first pattern that is the name, or its end behind a dot."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)
