"""Samples of which some are kept: who goes on, who waits for the others of its prompt, and what becomes of each.

A sample waits at a border of its own tokens until every live sample of its prompt has reached it or ended before it.
Then `Collecting` decides, from their lengths and scores alone. So what is kept is a function of the samples, whatever
slots, caches and ranks do; how far the others had come by then is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...core.errors import EvenloadError
from .request import Collecting, Completion, Ended, Generation
from .schedule import Running, Schedule


@dataclass
class _Collection:
    """The samples of one prompt."""

    state: Collecting
    running: dict[int, Running] = field(default_factory=dict)
    """Those that may still be kept and have not ended, by number."""
    over: dict[int, Completion] = field(default_factory=dict)
    """Those that have ended, or nobody needs."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens of those that have ended by themselves since the border, by number."""

    @property
    def bar(self) -> float:
        """Tokens from which on a sample that lives waits, or is not needed."""
        stop = self.state.stops_at(self.lengths)
        return self.state.next_border if stop is None else min(stop, self.state.next_border)

    @property
    def is_undecided(self) -> bool:
        return any(len(sample.new) < self.bar for sample in self.running.values())


class KeptSamples:
    """The samples of a schedule under ``settings.collect``. Raises EvenloadError where not all samples of a prompt are
    in it."""

    def __init__(self, schedule: Schedule, settings: Generation, rule: Collecting) -> None:
        self._schedule, self._settings = schedule, settings
        self._prompts: dict[int, _Collection] = {}
        for sample in schedule.waiting:
            own = self._prompts.setdefault(sample.request.number, _Collection(rule))
            own.running[sample.number] = sample
        for number, own in self._prompts.items():
            if own.running.keys() != set(rule.live):
                detail = f"samples {sorted(own.running)} of prompt {number}, {len(rule.live)} in all"
                raise EvenloadError("a rank keeps some of samples of which it has not all", detail)

    def left(self, sample: Running) -> float:
        """Tokens of a sample until it waits, or nobody needs it."""
        own = self._prompts.get(sample.request.number)
        return own.bar - len(sample.new) if own else 0

    def after(self, sample: Running, how: Ended | None) -> Iterator[Completion]:
        """What has become of samples when one has got tokens, with which it may have ended."""
        own = self._prompts.get(sample.request.number)
        if own is None or sample.number not in own.running:
            return
        if how:
            self._schedule.end(own.running.pop(sample.number))
            own.over[sample.number] = sample.ended(how)
            own.lengths[sample.number] = len(sample.new)
            for late in [one for one in own.running.values() if len(one.new) >= own.bar < own.state.next_border]:
                self._drop(own, late, "left")
        elif len(sample.new) >= own.bar:
            if own.bar < own.state.next_border:
                self._drop(own, sample, "left")
            else:
                self._schedule.suspend(sample)
        if not own.is_undecided:
            yield from self._decided(own, sample.request.number)

    def _decided(self, own: _Collection, prompt: int) -> Iterator[Completion]:
        """The next state of a prompt, and its samples when it is the last one."""
        own.state = own.state.at_border(own.lengths, self._scored(own))
        own.lengths = {}
        if own.state.live:
            for number in {*own.running} - {*own.state.live}:
                self._drop(own, own.running[number], "pruned")
            self._schedule.resume(list(own.running.values()))
            return
        for sample in list(own.running.values()):
            self._drop(own, sample, "left")
        kept = {number for _, number in own.state.ended}
        del self._prompts[prompt]
        yield from (own.over[number]._replace(kept=number in kept) for number in sorted(own.over))

    def _scored(self, own: _Collection) -> dict[int, float]:
        """Scores of the samples that the rule calls live, which the samples get, too."""
        if self._settings.scores is None:
            return {}
        partial = {number: sample.ended("left") for number, sample in own.running.items()}
        live = [own.over.get(number) or partial[number] for number in own.state.live]
        scores = dict(zip(own.state.live, self._settings.scores(live), strict=True))
        for number, score in scores.items():
            if number in own.over:
                own.over[number] = own.over[number]._replace(score=score)
            else:
                own.running[number].score = score
        return scores

    def _drop(self, own: _Collection, sample: Running, how: Ended) -> None:
        del own.running[sample.number]
        self._schedule.drop(sample)
        own.over[sample.number] = sample.ended(how)
