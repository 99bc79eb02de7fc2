"""Samples from a model that is run in packs: prompts as slices, samples as rows of few tokens after what is kept.

    while a sample is under way:
        pack    = the next slices of prompts, and the last token of each sample with what is drafted after it
        logits  = of these tokens of each sample
        token   = argmax(allowed log-probabilities + noise of (seed, prompt, sample, place))
        sample  = sample + tokens up to the first that its draft has otherwise

A sample does not depend on what it is computed next to: see `noise`. In float64 it is the same token for token whatever
the order, the slots and the ranks; with fewer digits but where two tokens lie within rounding of each other.

Shape legend: T = tokens of a pack, R = rows that get a token, V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...core.aliases import Ints
from ...core.plan.step_plan import Slice
from ..attention.block_tables import BlockTables
from ..attention.cached import block_tokens_on
from ..attention.copy_rows import copy_rows
from ..attention.kv_cache import CachedRows, KvCache
from ..attention.pack import IGNORE, Pack
from .drafts import Drafts
from .kept import KeptSamples
from .noise import gumbel
from .quantized import LinearLayer
from .request import Completion, DraftModel, Ended, Generation, Request
from .sampling import pick
from .schedule import Running, Schedule

Serves = Callable[[Mapping[int, int | None]], None]
"""Is told once whose adapter each sequence of a pack goes through; the mapping grows from forward to forward."""


def of_nobody(tenants: Mapping[int, int | None]) -> None:
    """Where the model has no adapters."""


def keep(picks_2R: Tensor) -> Tensor:
    """Picks of a rank that needs nobody else for them."""
    return picks_2R


class Quantizable(NamedTuple):
    """What of a model is quantized while it drafts, and how it runs then."""

    linears: Sequence[LinearLayer]
    logits: Callable[[Pack, Tensor], Tensor | None]
    """As those of `Decoder`."""


@dataclass(frozen=True)
class Decoder:
    """How a rank runs the model without gradients."""

    device: torch.device
    logits: Callable[[Pack, Tensor], Tensor | None]
    """Of a pack and some of its slots [R] their logits [R, V]; None on a rank that has not the last layer."""
    shared: Callable[[Tensor], Tensor] = keep
    """What ranks with the last layer have picked [2, R], on all ranks that hold the model together."""
    goes_on: Callable[[bool], bool] = bool
    """Whether there is another forward, where this rank has something to compute, or has not."""
    serves: Serves = of_nobody
    quantizable: Quantizable | None = None
    """How the same model drafts; None: it does not. Who watches ``logits`` is not shown what drafts compute."""


class Borders(Protocol):
    """Where ranks stop between two forwards, to deal their samples again."""

    forwards: int
    """Until this rank stops next, where it has so many to compute."""

    def cross(self, schedule: Schedule) -> bool:
        """Give samples to other ranks, and take theirs over; whether any rank has one left. Collective."""


@torch.no_grad()
def generate(
    requests: Iterable[Request],
    settings: Generation,
    decoder: Decoder,
    borders: Borders | None = None,
    drafts: Drafts | None = None,
) -> Iterator[Completion]:
    """The samples of some requests, and of what comes over ``borders``, as they end, started in this order; under
    ``settings.collect``, which no border may part, those of a prompt when it is decided which are kept.

    Raises EvenloadError where ``settings.cache_tokens`` hold less than the largest sample may become.
    """
    cache = KvCache(BlockTables(block_tokens_on(decoder.device), settings.cache_tokens), settings.keys)
    schedule = Schedule([request for request in requests if request.samples], settings, cache)
    decoder.serves(schedule.tenants)
    keeping = KeptSamples(schedule, settings, settings.collect) if settings.collect else None
    drafts = drafts or Drafts()

    def most(sample: Running) -> float:
        left = sample.request.limit - len(sample.new)
        return min(left, keeping.left(sample) if keeping else left) - 1

    def draft(sample: Running) -> list[int]:
        return drafts.of(sample, most(sample), len(schedule.live))

    def fitting(sample: Running, wanted: int) -> int:
        return len(schedule.fitting(sample, range(int(min(wanted, most(sample))))))

    model = _draft_model(decoder, settings, cache)

    left = borders.forwards if borders else -1
    while (goes_on := decoder.goes_on(schedule.busy)) or borders:
        if borders and not (goes_on and left):
            if not borders.cross(schedule):
                return
            left = borders.forwards
            continue
        left -= 1
        if not schedule.busy:
            decoder.logits(
                _pack([], {}, cache, decoder.device), torch.zeros(1, dtype=torch.int64, device=decoder.device)
            )
            continue
        drafts.begin(schedule.live, waiting=len(schedule.live) + len(schedule.waiting) > settings.slots)
        slices, samples, tokens = schedule.next(draft, lambda ready: drafts.ahead(ready, fitting, model))
        drafted = {sample.key: len(sample.drafted) for sample in samples if sample.drafted}
        pack = _pack(slices, tokens, cache, decoder.device, drafted)
        begin = time.perf_counter()
        picks = _picked(pack, samples, settings, decoder)
        if len(slices) == len(samples):
            drafts.took(time.perf_counter() - begin)
        schedule.computed()
        for sample, own in zip(samples, picks, strict=True):
            before = len(sample.new)
            how = _taken(sample, own, settings)
            accepted = len(sample.new) - before - 1
            drafts.saw(sample, accepted)
            schedule.grew(sample, accepted)
            if keeping:
                yield from keeping.after(sample, how)
            elif how:
                schedule.end(sample)
                yield sample.ended(how)


def _draft_model(decoder: Decoder, settings: Generation, cache: KvCache) -> DraftModel | None:
    """Keys of what it computes are written over by the forward that checks it."""
    if decoder.quantizable is None:
        return None
    quantizable = replace(decoder, logits=decoder.quantizable.logits)

    def after(samples: Sequence[Running], guessed: Sequence[Sequence[int]]) -> list[int]:
        depth = len(guessed[0])
        slices = [Slice(one.key, one.kept + depth, one.kept + depth + 1) for one in samples]
        last = (own or one.new or one.request.tokens for one, own in zip(samples, guessed, strict=True))
        tokens = {one.key: of[-1:] for one, of in zip(samples, last, strict=True)}
        picks = _picked(_pack(slices, tokens, cache, decoder.device), samples, settings, quantizable, depth)
        return [token for ((token, _),) in picks]

    def agreed(number: int) -> int:
        return int(decoder.shared(torch.full((2, 1), float(number), dtype=torch.float64, device=decoder.device))[0, 0])

    return DraftModel(decoder.quantizable.linears, after, agreed, decoder.shared is keep, settings.priced)


def _taken(sample: Running, picks: Sequence[tuple[int, float]], settings: Generation) -> Ended | None:
    """Give a sample its next token, and those after it whose draft was right up to there; how it ends, if it does."""
    how: Ended | None = None
    for guess, (token, log_prob) in zip([*sample.drafted, None], picks, strict=True):
        sample.new.append(token)
        sample.log_probs.append(log_prob)
        how = _end_of(sample, settings)
        if how or token != guess:
            break
    return how


def _end_of(sample: Running, settings: Generation) -> Ended | None:
    if sample.new[-1] in settings.end_tokens:
        return "end"
    if settings.stops(sample.new):
        return "stop"
    return "limit" if len(sample.new) == sample.request.limit else None


def _pack(
    slices: Sequence[Slice],
    tokens: Mapping[int, Sequence[int]],
    cache: KvCache,
    device: torch.device,
    drafted: Mapping[int, int] | None = None,
) -> Pack:
    """Slices in the order of the cache's rows; without any the pack is one token that nothing is computed for."""
    rows = CachedRows.of(cache, slices, device, drafted)
    lengths = [piece.length for piece in rows.slices] or [1]
    borders = tuple(accumulate(lengths, initial=0))
    arrays: dict[str, Ints] = {
        "tokens_T": np.array([*chain.from_iterable(tokens[piece.sequence] for piece in rows.slices)] or [0]),
        "positions_T": rows.positions_T if slices else np.zeros(1, dtype=np.int64),
        "labels_T": np.full(borders[-1], IGNORE, dtype=np.int64),
        "cu_seqlens": np.array(borders, dtype=np.int32),
    }
    fields: dict[str, Any] = copy_rows(arrays, device)
    return Pack(segments=borders, max_seqlen=max(lengths), slices=rows.slices, cached=rows, num_targets=0, **fields)


def _picked(
    pack: Pack, samples: Sequence[Running], settings: Generation, decoder: Decoder, guessed: int = 0
) -> list[list[tuple[int, float]]]:
    """The next token of each sample, and those after each token of its draft, with their log-probabilities; the pack
    may begin after so many guesses of each."""
    ends = {piece.sequence: end for piece, end in zip(pack.slices, pack.segments[1:], strict=True)}
    counts = [1 + len(sample.drafted) for sample in samples]
    after_R = np.concatenate([np.zeros(0, dtype=np.int64), *map(np.arange, counts)])

    def of_rows(of_samples: Sequence[int]) -> Ints:
        return np.repeat(np.array(of_samples, dtype=np.int64), counts)

    firsts = [ends[sample.key] - count for sample, count in zip(samples, counts, strict=True)]
    arrays = {
        "slots": of_rows(firsts) + after_R if samples else np.zeros(1, dtype=np.int64),
        "streams": of_rows([sample.stream for sample in samples]),
        "places": of_rows([sample.length + guessed for sample in samples]) + after_R,
    }
    rows = copy_rows(arrays, decoder.device)
    logits_RV = decoder.logits(pack, rows["slots"])
    if not samples:
        return []
    if logits_RV is None:
        picks_2R = torch.zeros(2, len(after_R), dtype=torch.float64, device=decoder.device)
    else:
        noise_RV = None
        if settings.sampling.temperature:
            tokens_V = torch.arange(logits_RV.shape[1], device=decoder.device)
            noise_RV = gumbel(rows["streams"], rows["places"], tokens_V)
        picks_2R = pick(logits_RV, noise_RV, settings.sampling)
    tokens_R, log_probs_R = decoder.shared(picks_2R).tolist()
    picks = ((int(token), log_prob) for token, log_prob in zip(tokens_R, log_probs_R, strict=True))
    return [[*islice(picks, count)] for count in counts]
