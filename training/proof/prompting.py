"""What a proof of generation continues, and how: without torch, so that a command can look at it first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.errors import EvenloadError
from ...core.recipe.recipe import Recipe
from ...core.recipe.sizes import shape_of
from ...data.prompt_file import Prompt, read_prompts
from ...data.tokenizers import open_tokenizer
from ...runtime.generate.request import Generation
from ..preflight import tokenizer_of
from ..sampling.prompted import settings_of

MOST_NEW = 24
"""Tokens of a sample, where its prompt does not say it."""


class Prompting(NamedTuple):
    """Prompts, and the rule by which samples are drawn and end."""

    settings: Generation
    limit: int
    """Tokens of a sample, where its prompt does not say it."""
    prompts: Sequence[Prompt] | None = None
    """None: beginnings of the recipe's data."""


def without_divided_tokens(recipe: Recipe) -> Recipe:
    """A recipe with these weights: packs of a token a sample are too small for tensor-parallel ranks to divide. Experts
    demand it of Megatron-Core; a host refuses to generate from them by name."""
    divided = recipe.megatron.sequence_parallel and shape_of(recipe.model).experts is None
    return recipe.changed({"megatron.sequence_parallel": False}) if divided else recipe


def prompting(recipe: Recipe, prompts: Path | None) -> Prompting:
    """What `verify_generation` continues, and how. Raises EvenloadError for what cannot be; starts nothing."""
    section, tokenizer = recipe.generate, open_tokenizer(tokenizer_of(recipe.data, recipe.model.weights))
    if section.keys:
        what, do = (
            "rounded keys give samples of another model",
            "set generate.keys=null; evenload compare has distances",
        )
        raise EvenloadError(what, f"generate.keys {section.keys}", do)
    limit = min(section.max_new_tokens, MOST_NEW)
    known = section.end_tokens if section.end_tokens is not None else [tokenizer.end_token]
    settings, _ = settings_of(recipe, tokenizer, frozenset(token for token in known if token is not None))
    return Prompting(settings, limit, read_prompts(prompts, tokenizer, limit) if prompts else None)


def refuse_proof(recipe: Recipe, *, weights: bool, generation: bool, prompts: Path | None, **_: object) -> None:
    """Raise EvenloadError for a proof whose parts do not go together, or prompts that cannot be continued."""
    if generation and weights:
        raise EvenloadError("samples have no weights", "--generate and --weights", "prove one, then the other")
    if generation:
        prompting(recipe, prompts)
    elif prompts is not None:
        raise EvenloadError("prompts are continued by --generate", "--prompts alone", "add --generate, or drop it")
