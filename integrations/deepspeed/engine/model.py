"""A Hugging Face causal language model from a recipe: its weights come from the seed, or from a folder; nothing is
downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import transformers

from ....core.errors import EvenloadError
from ....core.recipe.recipe import Recipe
from ....runtime.attributes import with_attributes
from ....runtime.stage.lookup import sum_in_float32
from ...huggingface import attention
from ...huggingface.folders.conversion import ModelWeights
from ...huggingface.folders.model_config import model_config
from ...huggingface.folders.reading import WeightFolder
from .experts import has_whole_rows
from .keeping import WHOLE, Keeping, Parts, WithoutMemory, build_partly, read_model


def build_model(
    recipe: Recipe,
    *,
    attn_implementation: str = attention.NAME,
    experts_implementation: str | None = None,
    parts: Parts | None = None,
    keeping: Keeping = WHOLE,
) -> Any:
    """The model on the CPU, in training mode, in float32 where ``keeping`` says nothing else; equal on every rank that
    has the same recipe.

    Args:
        experts_implementation: how Transformers runs experts; None: one product over groups of tokens, whose sums have
            one order on every device, where it can (it wants rows of whole 16 bytes), else expert by expert.
        parts: what of it is wanted, if not the whole.
        keeping: what this rank keeps of weights that are read (``model.weights``).

    Raises:
        EvenloadError: see `model_config` and `read_model`; or the model has its own attention code.
    """
    attention.register()
    kind, config = transformers.AutoModelForCausalLM, model_config(recipe)
    if experts_implementation or not (recipe.model.moe is None or has_whole_rows(recipe)):
        config._experts_implementation = experts_implementation or "eager"
    whole = partial(kind.from_config, config, attn_implementation=attn_implementation, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        if recipe.model.weights is not None:
            model = read_model(whole, recipe.model.weights, parts, keeping)
        else:
            model = build_partly(whole, parts) if parts else whole()
    sum_in_float32(model.get_input_embeddings())
    model.config.use_cache = False
    model.train()
    return model


def empty_model(recipe: Recipe) -> Any:
    """The model of a recipe without memory for its weights, and with Transformers' notes on how its folder is read."""
    with WithoutMemory():
        model = transformers.AutoModelForCausalLM.from_config(model_config(recipe), dtype=torch.float32)
    if recipe.model.weights is not None:
        ModelWeights(WeightFolder.open(recipe.model.weights), model)
    return model


def recompute_layers(model: Any) -> None:
    """Keep only the inputs of the layers for the backward, which runs them again; Hugging Face's own means. Raises
    EvenloadError: the model has no such means."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise EvenloadError(
            f"the model '{model.config.model_type}' cannot recompute its activations",
            "train.recompute true",
            "set train.recompute to false, or use a model with gradient checkpointing",
        )
    # A reentrant checkpoint gives no gradients to a layer whose input needs none (a frozen embedding).
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the newer name
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def enable_recomputing(model: Any, blocks: Sequence[Any]) -> None:
    """Let the decoder layers of a model recompute where they are asked to. Raises EvenloadError as above."""
    if not hasattr(blocks[0], "_gradient_checkpointing_func"):
        recompute_layers(model)
        for block in blocks:
            block.gradient_checkpointing = False


@contextmanager
def recomputing(blocks: Sequence[Any], layers: int) -> Iterator[None]:
    """Forwards inside keep the inputs alone of the first ``layers`` decoder layers, and the activations of the others.

    `recompute_layers` must have been called. A layer asks in its forward; its backward does what that was told.
    """
    with ExitStack() as undo:
        for number, block in enumerate(blocks):
            undo.enter_context(with_attributes(block, gradient_checkpointing=number < layers))
        yield
