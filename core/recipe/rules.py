"""Combinations that no trainer can run, found before any rank starts."""

from __future__ import annotations

from typing import Any

from .. import registry
from ..errors import EvenloadError, refuse_first
from .sections import Model, Parallel
from .traits import trainer_called


def refuse_impossible(recipe: Any) -> None:
    """Raise EvenloadError with the first rule that a `recipe.Recipe` breaks, plugin clashes first."""
    model: Model = recipe.model
    p: Parallel = recipe.parallel
    registry.refuse_clashes(plugin.name for plugin in recipe.enabled())
    sharing = [plugin.name for plugin in recipe.enabled() if plugin.shares]
    refuse_first(
        (
            p.cp > 1 and bool(sharing),
            f"parallel.cp and plugins.{sharing[0] if sharing else ''} both say how many ranks share a sequence",
            f"parallel.cp {p.cp}",
            "set parallel.cp=1 and give its ranks to parallel.dp, or disable the plugin",
        ),
        (
            model.hidden_size % model.num_attention_heads != 0,
            "model.num_attention_heads does not divide model.hidden_size",
            f"{model.num_attention_heads} heads, hidden size {model.hidden_size}",
            "choose a number of heads that divides the hidden size",
        ),
        (
            model.num_attention_heads % model.kv_heads != 0,
            "model.num_query_groups does not divide model.num_attention_heads",
            f"{model.kv_heads} groups, {model.num_attention_heads} heads",
            "choose a number of groups that divides the number of heads",
        ),
        (
            model.num_attention_heads % p.tp != 0 or model.kv_heads % p.tp != 0,
            "parallel.tp does not divide the attention heads",
            f"tp {p.tp}, {model.num_attention_heads} heads in {model.kv_heads} query groups",
            "choose a tp that divides both",
        ),
        (
            model.ffn_size % p.tp != 0,
            "parallel.tp does not divide model.ffn_hidden_size",
            f"tp {p.tp}, ffn_hidden_size {model.ffn_size}",
            "choose a tp that divides it",
        ),
        (
            model.num_layers % p.pp != 0,
            "parallel.pp does not divide model.num_layers",
            f"pp {p.pp}, {model.num_layers} layers",
            "choose a pp that divides the number of layers",
        ),
        *trainer_called(recipe.trainer).rules(recipe),
        (
            recipe.data.min_length > recipe.data.max_length,
            "data.min_length is larger than data.max_length",
            f"{recipe.data.min_length} > {recipe.data.max_length}",
            "lower data.min_length",
        ),
    )
    refuse_idle_ranks(recipe.train.global_batch_size, p.dp or 1)


def refuse_idle_ranks(samples: int, dp: int) -> None:
    """Raise EvenloadError for a global batch of fewer ``samples`` than data-parallel ranks, given or of the world."""
    if samples < dp:
        raise EvenloadError(
            "train.global_batch_size is smaller than the number of data-parallel ranks",
            f"{samples} samples, {dp} ranks",
            "raise it, or lower parallel.dp or --nproc",
        )
