"""What is asked of a generation, and what it gives; without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

from ...core.errors import Rule

Ended = Literal["end", "stop", "limit", "pruned", "left"]
"""By an end token, by a stop string, or by its limit; or before that, for its score or as nobody needs it any more."""


class Sampling(NamedTuple):
    """Which tokens may be drawn, and how probable each is, in the order of these fields."""

    temperature: float = 1.0
    """Divides logits; 0: the most probable token is taken, and nothing is drawn."""
    top_k: int = 0
    """As many of the most probable tokens, and what equals the last of them; 0: all."""
    top_p: float = 1.0
    """As few of the most probable tokens as have this much probability together (Holtzman et al., arXiv 1904.09751,
    section 3.1)."""


class Request(NamedTuple):
    """A prompt, and which samples of it are wanted."""

    number: int
    """By which noise is drawn, so that it is the prompt's own, whatever else is asked for."""
    tokens: tuple[int, ...]
    limit: int
    """Tokens of a sample at most, after the prompt."""
    samples: tuple[int, ...] = (0,)
    """Their numbers."""
    tenant: int | None = None
    """Whose adapter they go through, by its number; None: the model alone."""


class Completion(NamedTuple):
    """One text that the model has made."""

    prompt: int
    """Number of its request."""
    sample: int
    tokens: tuple[int, ...]
    """After the prompt, the end token included."""
    log_probs: tuple[float, ...]
    """Of each token, by the model itself: before temperature, top-k and top-p."""
    ended: Ended
    score: float | None = None
    """The last one, where samples are pruned by their scores."""
    kept: bool = True
    """Whether it is one of those that `Collecting` keeps."""


class Collecting(Protocol):
    """Which samples of a prompt are kept, decided when each has reached a border of its own tokens or ended before it:
    see `plugins.rollout.Collected`, whose form this is."""

    @property
    def ended(self) -> tuple[tuple[int, int], ...]:
        """(tokens, number) of samples that ended first; when nothing is live, those that are kept."""

    @property
    def live(self) -> tuple[int, ...]:
        """Numbers of samples of which nothing is decided yet."""

    @property
    def next_border(self) -> int:
        """Tokens at which live samples wait for each other."""

    def stops_at(self, ended: Mapping[int, int]) -> int | None:
        """Tokens beyond which no sample is needed, by those that have ended since the border (number: tokens)."""

    def at_border(self, ended: Mapping[int, int], scores: Mapping[int, float]) -> Self:
        """The next state, from what has ended and from scores of all live samples, where they are scored."""


Scoring = Callable[[Sequence[Completion]], Sequence[float]]


class UnfinishedSample(Protocol):
    """A sample as far as it has come."""

    request: Request
    number: int
    new: list[int]
    """Its tokens, after the prompt."""


class Drafter(Protocol):
    """Guesses by tokens alone: ranks that hold a model together guess each for itself, and alike."""

    def guess(self, sample: UnfinishedSample, most: int, least: float) -> Sequence[int]:
        """The next tokens of a sample, so many at most, as far as it is at least so probable that all are right."""

    def saw(self, sample: UnfinishedSample) -> None:
        """Is shown a sample that has got tokens."""


class DraftModel(NamedTuple):
    """The model of a generation, for who guesses by it: ranks that hold it together call it together."""

    linears: Sequence[Any]
    """`quantized.LinearLayer` of this rank's layers."""
    after: Callable[[Sequence[Any], Sequence[Sequence[int]]], list[int]]
    """What is drawn after each of some samples and its guesses, of which each has as many."""
    agreed: Callable[[int], int]
    """A number as the rank with the last layer has it."""
    alone: bool
    """Whether this rank holds it by itself."""
    priced: bool
    """Whether guesses are left out that take longer than they save."""


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter that guesses by a form of the model, for all samples at once."""

    def ahead(self, samples: Sequence[Any], fitting: Callable[[Any, int], int], model: DraftModel) -> None:
        """Guess what it will be asked for: of each sample as many tokens at most as ``fitting`` says that there are
        blocks for, where so many are wanted."""

    def took(self, seconds: float) -> None:
        """Is shown what the forward took that checked its guesses."""


MakeDrafter = Callable[[Sequence[Completion]], Drafter]
"""A drafter that knows earlier samples of the same prompts."""


def never(tokens: Sequence[int]) -> bool:
    """The rule that stops no sample."""
    return False


@dataclass(frozen=True)
class Generation:
    """How samples are drawn, when they end, and how many are under way at once."""

    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    end_tokens: frozenset[int] = frozenset()
    stops: Callable[[Sequence[int]], bool] = never
    """Whether the last of these tokens of a sample, those after its prompt, completes a stop string."""
    slots: int = 64
    """Samples that are under way at once on a rank."""
    cache_tokens: int | None = None
    """Whose keys and values a rank holds at once; None: of all that are under way."""
    keys: Literal["int8", "int4"] | None = None
    """Bits to which keys and values are rounded, so that samples are those of another model; None: they are not."""
    step_tokens: int = 4096
    """Tokens of prompts that one forward takes; the last tokens of samples come on top."""
    collect: Collecting | None = None
    """The rule by which some samples of a prompt are kept, before any has begun; None: all are kept."""
    scores: Scoring | None = None
    """Scores of live samples of a prompt, as far as they have come, for ``collect``; None: it wants none."""
    drafter: MakeDrafter | None = None
    """Makes what guesses tokens, so that a forward computes several of a sample; None: it computes one."""
    earlier: Sequence[Completion] = ()
    """Samples of the same prompts, by which tokens are guessed."""
    priced: bool = True
    """Whether guesses by the model itself are left out where they take longer than they save."""


def rules(requests: Sequence[Request], max_length: int, vocab_size: int | None) -> Iterator[Rule]:
    """What no model of these sizes can be asked for; ``vocab_size`` None: unknown."""
    yield not requests, "there is no prompt to continue", "no request", "give one prompt or more"
    for number, tokens, limit, *_ in requests:
        yield not tokens, f"prompt {number} has no token", "nothing to continue", "leave it out"
        least, most = min(tokens, default=0), max(tokens, default=0)
        yield (
            least < 0 or (vocab_size is not None and most >= vocab_size),
            f"prompt {number} has tokens that the model does not know",
            f"token ids {least} to {most}, a vocabulary of {vocab_size}",
            "use the model's own tokenizer",
        )
        yield limit < 1, f"no token may follow prompt {number}", f"a limit of {limit}", "ask for one token or more"
        yield (
            len(tokens) + limit > max_length,
            f"prompt {number} and what may follow are longer than the model's longest sequence",
            f"{len(tokens)} tokens and a limit of {limit}, data.max_length {max_length}",
            "lower the limit (generate.max_new_tokens), shorten the prompt, or raise data.max_length",
        )
