"""What is asked of a generation, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ...core.errors import Rule
from .sampling import Sampling

Ended = Literal["end", "stop", "limit"]
"""By an end token, by a stop string, or by its limit."""


class Request(NamedTuple):
    """A prompt, and which samples of it are wanted."""

    number: int
    """By which noise is drawn, so that it is the prompt's own, whatever else is asked for."""
    tokens: tuple[int, ...]
    limit: int
    """Tokens of a sample at most, behind the prompt."""
    samples: tuple[int, ...] = (0,)
    """Their numbers."""


class Sample(NamedTuple):
    """One text that the model has made."""

    prompt: int
    """Number of its request."""
    sample: int
    tokens: tuple[int, ...]
    """Behind the prompt, the end token included."""
    log_probs: tuple[float, ...]
    """Of each token, by the model itself: before temperature, top-k and top-p."""
    ended: Ended


def never(tokens: Sequence[int]) -> bool:
    """Stops no sample."""
    return False


@dataclass(frozen=True)
class Generation:
    """How samples are drawn, when they end, and how many are under way at once."""

    seed: int = 0
    sampling: Sampling = Sampling()
    end_tokens: frozenset[int] = frozenset()
    stops: Callable[[Sequence[int]], bool] = never
    """Whether the last of these tokens of a sample, those behind its prompt, completes a stop string."""
    slots: int = 64
    """Samples that are under way at once on a rank."""
    cache_tokens: int | None = None
    """Whose keys and values a rank holds at once; None: of all that are under way."""
    step_tokens: int = 4096
    """Tokens of prompts that one forward takes; the last tokens of samples come on top."""


def deal(limits: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Which requests each rank has, by their limits: the longest first, in turn. The one rule of who generates what."""
    order = np.argsort(-np.asarray(limits, dtype=np.int64), kind="stable").tolist()
    return [order[rank::num_ranks] for rank in range(num_ranks)]


def rules(requests: Sequence[Request], max_length: int, vocab_size: int | None) -> list[Rule]:
    """What no model of these sizes can be asked for."""
    empty = next((r for r in requests if not r.tokens), None)
    known = vocab_size or max((max(r.tokens, default=0) + 1 for r in requests), default=0)
    foreign = next((r for r in requests if max(r.tokens, default=0) >= known or min(r.tokens, default=0) < 0), None)
    endless = next((r for r in requests if r.limit < 1), None)
    long = next((r for r in requests if len(r.tokens) + r.limit > max_length), None)
    return [
        (not requests, "there is no prompt to continue", "no request", "give one prompt or more"),
        (empty is not None, f"prompt {empty and empty.number} has no token", "nothing to continue", "leave it out"),
        (
            foreign is not None,
            f"prompt {foreign and foreign.number} has tokens that the model does not know",
            f"token ids {foreign and min(foreign.tokens)} to {foreign and max(foreign.tokens)}, a vocabulary of {known}",
            "use the model's own tokenizer",
        ),
        (
            endless is not None,
            f"prompt {endless and endless.number} may not have a token",
            f"a limit of {endless and endless.limit}",
            "ask for one token or more",
        ),
        (
            long is not None,
            f"prompt {long and long.number} and its limit are longer than the model's longest sequence",
            f"{len(long.tokens) if long else 0} tokens and a limit of {long and long.limit}, "
            f"data.max_length {max_length}",
            "lower the limit (generate.max_new_tokens), shorten the prompt, or raise data.max_length",
        ),
    ]
