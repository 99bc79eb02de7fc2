"""Which samples are under way, and what each forward computes of them.

A prompt is prefilled once, but for its last token, and shared by its samples; each of these is then a row of one token
a forward, and of guesses after it as far as blocks are free: nobody is given up for a guess. Samples start in their
order as slots and blocks are free. Where a sample cannot grow, prompts that nobody needs now are given up first, then
the sample that started last: it begins again, with the tokens that it has, when another one has ended. The first one is
never given up, so that there is an end.

Nothing here decides which token comes next: that is a function of the sample alone (`noise`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...core.errors import EvenloadError
from ...core.plan.step_plan import Slice
from ..attention.block_tables import BlockTables
from ..attention.kv_cache import KvCache
from .noise import stream_of
from .request import Completion, Ended, Generation, Request


@dataclass(eq=False)
class Prefill:
    """A prompt whose keys are there, or are being computed."""

    request: Request
    key: int
    """What the cache calls it."""
    kept: int = 0
    """Tokens whose keys are there."""
    pending: int = 0
    """Samples that wait for them."""

    @property
    def length(self) -> int:
        """Without the last token: each sample computes that by itself, for its first token."""
        return len(self.request.tokens) - 1


@dataclass(eq=False)
class Running:
    """A sample that has begun, or waits for its turn."""

    request: Request
    number: int
    stream: int
    """Of its noise."""
    key: int = -1
    """What the cache calls it, while it has a slot."""
    new: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept: int = 0
    prefill: Prefill | None = None
    """What it waits for."""
    score: float | None = None
    """The last one, where samples are scored."""
    drafted: Sequence[int] = ()
    """Guesses of its next tokens, in the forward that is under way."""

    @property
    def length(self) -> int:
        return len(self.request.tokens) + len(self.new)

    def ended(self, how: Ended) -> Completion:
        new = tuple(self.new), tuple(self.log_probs)
        return Completion(self.request.number, self.number, *new, how, self.score)


Draft = Callable[[Running], Sequence[int]]
"""Guesses of the next tokens of a sample."""


def no_draft(sample: Running) -> Sequence[int]:
    """The draft where nobody guesses."""
    return ()


def nothing_ahead(samples: Sequence[Running]) -> None:
    """Where nobody wants to know all samples before the first is drafted."""


class Schedule:
    """The samples of some requests on one rank; raises EvenloadError where the cap holds less than one of them."""

    def __init__(self, requests: Sequence[Request], settings: Generation, cache: KvCache) -> None:
        self._settings = settings
        self._cache, self._tables = cache, cache.tables
        refuse_small_cache(requests, settings, self._tables)
        self.waiting = deque(
            Running(request, number, stream_of(settings.seed, request.number, number))
            for request in requests
            for number in request.samples
        )
        self.live: list[Running] = []
        """In the order in which they started."""
        self._suspended: set[Running] = set()
        """Samples that wait for others of their prompt."""
        self._idle: list[Running] = []
        """Samples without a slot whose keys are there; they are suspended, or were."""
        self._wanted = Counter(sample.request.number for sample in self.waiting)
        self._prefills: dict[int, Prefill] = {}
        self.tenants: dict[int, int | None] = {}
        """Whose each sequence of the cache is, those that were freed too."""
        self._gave_up = False
        """Since the last sample ended: no other one starts until one does."""

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.live)

    def next(
        self, draft: Draft = no_draft, ahead: Callable[[Sequence[Running]], None] = nothing_ahead
    ) -> tuple[list[Slice], list[Running], dict[int, list[int]]]:
        """What the next forward computes: slices, by what the cache calls their sequences; the samples that get a token
        from it, each for the last token of its slice, or for what it had and each guess after that; and the tokens of
        each slice.

        ``ahead`` is shown those whose draft is asked for next, when all have their blocks.
        """
        place, size = 0, self._tables.block_tokens
        while place < len(self.live):  # who is given up is the last
            sample = self.live[place]
            if sample.length % size == 1 or size == 1:  # else its last block holds one token more
                self._make_grow(sample)
            place += 1
        self._start()
        ahead([one for one in self._parts() if isinstance(one, Running) and one.length - one.kept == 1])
        slices: list[Slice] = []
        samples: list[Running] = []
        tokens: dict[int, list[int]] = {}
        rest = self._settings.step_tokens
        for part in self._parts():
            kept, length = part.kept, part.length
            stop = length if length - kept == 1 else min(length, kept + rest)
            if stop == kept:
                continue
            rest -= (stop - kept) * (length - kept > 1)
            tokens[part.key] = _tokens(part, stop)
            if isinstance(part, Running) and length - kept == 1:
                part.drafted = self.fitting(part, draft(part))
                tokens[part.key] += part.drafted
            slices.append(Slice(part.key, kept, kept + len(tokens[part.key])))
            part.kept = stop
            if stop == length and isinstance(part, Running):
                samples.append(part)
        slices.sort(key=lambda piece: -1 if (tenant := self.tenants[piece.sequence]) is None else tenant)
        return slices, samples, tokens

    def computed(self) -> None:
        """The keys of the last forward are there."""
        for sample in self.live:
            if sample.prefill is not None and sample.prefill.kept == sample.prefill.length:
                self._leave_prefill(sample)

    def grew(self, sample: Running, accepted: int) -> None:
        """A sample has got tokens, so many of which were drafted: keys of these are there. Blocks of the other guesses
        are free again."""
        if sample.drafted and sample.key >= 0:
            sample.kept += accepted
            self._tables.shrink(sample.key, sample.length)
        sample.drafted = ()

    def end(self, sample: Running) -> None:
        """Take a sample out that has its last token."""
        self.live.remove(sample)
        self._tables.free(sample.key)
        self._gave_up = False

    def put(self, sample: Running) -> None:
        """Take over a sample whose keys are not here: one that has tokens starts before those that have none."""
        self._wanted[sample.request.number] += 1
        (self.waiting.appendleft if sample.new else self.waiting.append)(sample)

    def suspend(self, sample: Running) -> None:
        """Take a sample out until `resume`; its keys stay as long as nobody else needs their blocks."""
        assert sample.prefill is None, "it has just got a token"
        self.live.remove(sample)
        self._suspended.add(sample)
        self._idle.append(sample)
        self._gave_up = False

    def resume(self, samples: Sequence[Running]) -> None:
        """Suspended samples are the next to get a slot."""
        for sample in reversed(samples):
            self._suspended.remove(sample)
            self._wanted[sample.request.number] += sample.key < 0
            self.waiting.appendleft(sample)

    def drop(self, sample: Running) -> None:
        """Take a sample out that nobody needs here, wherever it is."""
        number = sample.request.number
        if sample in self._suspended:
            self._suspended.remove(sample)
        elif sample in self.live:
            self._leave(sample)
        else:
            self.waiting.remove(sample)
            self._wanted[number] -= sample.key < 0
        if sample in self._idle:
            self._idle.remove(sample)
        self._free_keys(sample)
        prefill = self._prefills.get(number)
        if prefill is not None and not prefill.pending and not self._wanted[number]:
            self._close(prefill)
        self._gave_up = False

    def _parts(self) -> Iterator[Prefill | Running]:
        """What can be computed: prompts where the first sample stands that waits for them, so that who has started
        first goes on in every step."""
        yield from dict.fromkeys(sample.prefill or sample for sample in self.live)

    def _start(self) -> None:
        """Give slots to samples that wait, in their order, while they and their prompts find blocks."""
        while self.waiting and len(self.live) < self._settings.slots and not self._gave_up:
            sample = self.waiting[0]
            if sample in self._idle:
                if self._tables.grow(sample.key, sample.length):
                    self._idle.remove(sample)
                    self.live.append(self.waiting.popleft())
                elif not self._has_free(1):
                    return
                continue
            prefill = self._prefills.get(sample.request.number)
            before = len(sample.request.tokens) - 1
            shared = before // self._tables.block_tokens
            wanted = self._tables.size(sample.length) - shared + (self._tables.size(before) if prefill is None else 0)
            if not self._has_free(wanted, besides=prefill):
                return
            self.waiting.popleft()
            self._wanted[sample.request.number] -= 1
            self._take_slot(sample, prefill or self._open_prefill(sample.request))

    def _open_prefill(self, request: Request) -> Prefill:
        prefill = self._prefills[request.number] = Prefill(request, self._new_key(request))
        assert self._tables.grow(prefill.key, prefill.length)
        return prefill

    def _take_slot(self, sample: Running, prefill: Prefill) -> None:
        sample.key, sample.prefill = self._new_key(sample.request), prefill
        sample.kept = prefill.length
        prefill.pending += 1
        self._tables.fork(prefill.key, sample.key, prefill.length)
        assert self._tables.grow(sample.key, sample.length)
        self.live.append(sample)
        if prefill.kept == prefill.length:
            self._leave_prefill(sample)

    def _leave_prefill(self, sample: Running) -> None:
        """Copy what the prompt has in its last block, which the sample goes on in, and be on its own."""
        prefill = sample.prefill
        assert prefill is not None
        whole, rest = divmod(prefill.length, self._tables.block_tokens)
        if rest:
            self._cache.copy_block(self._tables[prefill.key][whole], self._tables[sample.key][whole])
        self._forget(sample, prefill)

    def _forget(self, sample: Running, prefill: Prefill) -> None:
        sample.prefill = None
        prefill.pending -= 1
        if not prefill.pending and not self._wanted[prefill.request.number]:
            self._close(prefill)

    def _make_grow(self, sample: Running) -> None:
        """Find a block for the next token of a sample; others, or itself, are given up for it."""
        while not self._tables.grow(sample.key, sample.length):
            if self._has_free(1):
                continue
            last = self.live[-1]
            self._give_up(last)
            if last is sample:
                return

    def fitting(self, sample: Running, drafted: Sequence[int]) -> Sequence[int]:
        """As many guesses of a sample's next tokens as there are blocks for that nobody else has."""
        if self._tables.grow(sample.key, sample.length + len(drafted)):
            return drafted
        return drafted[: len(self._tables[sample.key]) * self._tables.block_tokens - sample.length]

    def _give_up(self, sample: Running) -> None:
        self._leave(sample)
        self._wanted[sample.request.number] += 1
        self.waiting.appendleft(sample)
        self._gave_up = True

    def _leave(self, sample: Running) -> None:
        self.live.remove(sample)
        self._free_keys(sample)
        if sample.prefill is not None:
            self._forget(sample, sample.prefill)

    def _free_keys(self, sample: Running) -> None:
        if sample.key >= 0:
            self._tables.free(sample.key)
            sample.key = -1

    def _has_free(self, blocks: int, besides: Prefill | None = None) -> bool:
        """Whether so many blocks are free when prompts and samples have given theirs up that are not computed now."""
        if self._tables.has_free(blocks) or self._drop_prefills(blocks, besides):
            return True
        while self._idle and not self._tables.has_free(blocks):
            sample = self._idle.pop()
            self._free_keys(sample)
            self._wanted[sample.request.number] += sample not in self._suspended
        return self._tables.has_free(blocks)

    def _drop_prefills(self, blocks: int, besides: Prefill | None = None) -> bool:
        """Give up prompts that no sample waits for; whether so many blocks are free then."""
        for prefill in [one for one in self._prefills.values() if not one.pending and one is not besides]:
            if self._tables.has_free(blocks):
                break
            self._close(prefill)
        return self._tables.has_free(blocks)

    def _close(self, prefill: Prefill) -> None:
        del self._prefills[prefill.request.number]
        self._tables.free(prefill.key)

    def _new_key(self, request: Request) -> int:
        key = len(self.tenants) + 1
        self.tenants[key] = request.tenant
        return key


def refuse_small_cache(requests: Sequence[Request], settings: Generation, tables: BlockTables) -> None:
    """Raise EvenloadError where a cache with these blocks holds less than the largest sample may become."""
    if not requests:
        return
    largest = max(requests, key=lambda request: len(request.tokens) + request.limit)
    tokens, block = len(largest.tokens) + largest.limit, tables.block_tokens
    if not tables.holds(tokens, besides=1):  # the last block of its prompt is there twice
        raise EvenloadError(
            "the cache of keys and values is smaller than one sample may become",
            f"{settings.cache_tokens} tokens in blocks of {block}; prompt {largest.number} and its limit have {tokens}",
            f"raise generate.cache_tokens to {(tables.size(tokens) + 1) * block}, or lower the limit",
        )


def _tokens(part: Prefill | Running, stop: int) -> list[int]:
    """Tokens [kept, stop) of a prompt or a sample."""
    prompt, new = part.request.tokens, part.new if isinstance(part, Running) else []
    before = len(prompt)
    if part.kept == stop - 1 >= before:
        return new[stop - 1 - before : stop - before]
    return [*prompt[part.kept : stop], *new[max(0, part.kept - before) : max(0, stop - before)]]
