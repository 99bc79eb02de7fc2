"""The packing section of a recipe."""

from __future__ import annotations

from pydantic import PositiveInt

from ...core.registry import PluginConfig


class PackingConfig(PluginConfig):
    """Whole sequences into packed micro-batches, balanced by cost."""

    max_tokens: PositiveInt = 16384
    """Tokens that one rank may hold in one micro-batch."""
