"""The prompts of a file, and how a recipe continues them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...core.drafters import drafter_of
from ...core.errors import EvenloadError, refuse_first, shown
from ...core.recipe.recipe import Recipe
from ...data.prompt_file import Prompt, read_prompts
from ...data.tokenizers import Tokenizer, open_tokenizer
from ...runtime.generate.request import Completion, Generation, Request, Sampling, rules

_WINDOW = 8
"""Tokens that the end of a stop string may take beyond one a byte, such as special ones."""


class StopStrings:
    """Whether a sample has come to a string that ends it, and its text before that."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._decode = tokenizer.decode
        self._strings = strings
        self._most = max((len(string.encode()) for string in strings), default=0) + _WINDOW

    def __call__(self, tokens: Sequence[int]) -> bool:
        text = self._decode(tokens[-self._most :]) if self._strings else ""
        return any(string in text for string in self._strings)

    def text_of(self, sample: Completion) -> str:
        """The text of a sample, without the token or the string that ended it."""
        text = self._decode(sample.tokens[:-1] if sample.ended == "end" else sample.tokens)
        places = [text.find(string) for string in self._strings if sample.ended == "stop" and string in text]
        return text[: min(places, default=len(text))]


class Prompted(NamedTuple):
    """What is asked of a host, and what it was made of."""

    rows: list[Prompt]
    requests: list[Request]
    """One a row, by its place."""
    settings: Generation
    stops: StopStrings
    tokenizer: Tokenizer


def prompted(recipe: Recipe, tokenizer_name: str, prompts: Path, samples: int) -> Prompted:
    """So many samples of each prompt of a file, by the recipe's section `generate`. Raises EvenloadError for what its
    model cannot continue; starts nothing. ``recipe``: with the vocabulary size filled in."""
    section, tokenizer = recipe.generate, open_tokenizer(tokenizer_name)
    ends = _end_tokens(section.end_tokens, tokenizer, tokenizer_name)
    rows = read_prompts(prompts, tokenizer, section.max_new_tokens)
    numbers = tuple(range(samples))
    requests = [Request(number, row.tokens, row.limit, numbers) for number, row in enumerate(rows)]
    refuse_first(*rules(requests, recipe.data.max_length, recipe.model.vocab_size))
    return Prompted(rows, requests, *settings_of(recipe, tokenizer, ends), tokenizer)


def settings_of(recipe: Recipe, tokenizer: Tokenizer, ends: frozenset[int]) -> tuple[Generation, StopStrings]:
    """How the recipe's section `generate` draws samples that end by these tokens, and its strings that end them."""
    section = recipe.generate
    sampling, stops = Sampling(section.temperature, section.top_k, section.top_p), StopStrings(tokenizer, section.stop)
    own = Generation(recipe.train.seed, sampling, ends, stops, section.slots, section.cache_tokens, section.keys)
    return replace(own, drafter=drafter_of(section.drafts, recipe)), stops


def _end_tokens(own: Sequence[int] | None, tokenizer: Tokenizer, name: str) -> frozenset[int]:
    if own is not None:
        return frozenset(own)
    if tokenizer.end_token is None:
        what, detail = "nothing says which token ends a sample", f"the tokenizer {shown(name)} names no end of sequence"
        do = "set generate.end_tokens to the ids that do, or to [] where samples end by generate.stop or their limit"
        raise EvenloadError(what, detail, do)
    return frozenset([tokenizer.end_token])
