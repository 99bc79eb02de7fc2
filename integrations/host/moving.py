"""Samples that go on on another rank: at a border ranks tell each other how many tokens each sample has, and what then
moves is a pure function of these numbers, so that all decide alike and nothing more is said where nothing moves.

What travels is a sample's tokens with their log-probabilities, straight from rank to rank; its keys are computed again
where it goes on, as after an eviction. Noise depends on sample and place alone, so the tokens that follow are the same.
Where ranks hold a model together, each sends to its counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...core.aliases import Ints
from ...core.errors import RankError
from ...runtime.generate.dealing import Dealer, Dealing, SampleAssignment, again
from ...runtime.generate.noise import stream_of
from ...runtime.generate.request import Completion, Generation
from ...runtime.generate.schedule import Running, Schedule
from ...runtime.world.agreement import everyone, on_host, rank_and_size

_COUNTING, _MOVING, _WRONG = "counts", "moves samples", "has other samples than were dealt to it"
_ALL = (_COUNTING, _MOVING, _WRONG)


class Migration:
    """The borders of this rank's forwards. Made by all ranks together.

    Args:
        dealing: what was dealt at the beginning.
        dealt: how.
        rank: of this one among those that have samples of their own.
        in_step: ranks run equally many forwards.
        arrived: is called when this rank gets to a border.
    """

    def __init__(
        self,
        dealer: Dealer,
        dealing: Dealing,
        dealt: SampleAssignment,
        settings: Generation,
        rank: int,
        *,
        in_step: bool,
        arrived: Callable[[], None],
    ) -> None:
        self._dealer = dealer
        self._settings = settings
        self._rank = rank
        self._in_step = in_step
        self._arrived = arrived
        self._dealing = replace(dealing, ranks=dealt.places(len(dealing.of)))
        self._use(dealt)
        pairs = zip(dealing.of.tolist(), dealing.numbers.tolist(), strict=True)
        self._places = {(dealing.requests[of].number, number): place for place, (of, number) in enumerate(pairs)}
        of_ranks = everyone(rank)
        own = [world for world, other in enumerate(of_ranks) if other == rank]
        place = own.index(rank_and_size()[0])
        self._peers = [
            [world for world, other in enumerate(of_ranks) if other == one][place] for one in range(dealing.num_ranks)
        ]
        self._seen = torch.zeros(len(dealing.of), dtype=torch.int64)
        """Tokens of each sample, times 2, and 1 more where it has ended, as far as ranks have told."""
        self.moved = self.moved_tokens = self._borders = 0

    def has(self, sample: Completion) -> None:
        """A sample of this rank has ended."""
        self._seen[self._places[sample.prompt, sample.sample]] = 2 * len(sample.tokens) + 1

    def cross(self, schedule: Schedule) -> bool:
        """See `Borders`. Raises RankError where ranks were told different things."""
        self._arrived()
        own = (*schedule.live, *schedule.waiting)
        places = {self._places[sample.request.number, sample.number]: sample for sample in own}
        for place, sample in places.items():
            self._seen[place] = 2 * len(sample.new)
        dealt_here = np.flatnonzero((self._dealing.ranks == self._rank) & (self._seen.numpy() % 2 == 0))
        self._tell(_COUNTING if sorted(places) == dealt_here.tolist() else _WRONG, self._borders)
        self._borders += 1
        tokens, ended = self._seen.numpy() // 2, self._seen.numpy() % 2
        before = self._dealing = replace(self._dealing, tokens=tokens, ended=ended)
        if ended.all():
            return False
        dealt = again(self._dealer, before, self._dealt)
        self._use(dealt)
        now = np.where(ended == 0, dealt.places(len(ended)), before.ranks)
        if (moving := np.flatnonzero(now != before.ranks)).size:
            self._tell(_MOVING, int.from_bytes(dealt.digest[:7], "little"))
            self._move(schedule, places, moving, now)
            self._dealing = replace(before, ranks=now)
        return True

    def _use(self, dealt: SampleAssignment) -> None:
        assert dealt.forwards is not None
        self._dealt = dealt
        self.forwards = int(dealt.forwards.min() if self._in_step else dealt.forwards[self._rank])

    def _tell(self, what: str, word: int) -> None:
        """Learn what other ranks have, and that all of them say the same of ``what`` they are about to do."""
        said = torch.tensor([_ALL.index(what), word])
        most = torch.cat([said, -said, self._seen])
        if dist.is_initialized():
            dist.all_reduce(most, dist.ReduceOp.MAX, group=on_host())
        if not torch.equal(most[:2], -most[2:4]) or what == _WRONG:
            raise RankError(
                f"border {self._borders}: ranks do not move the same samples",
                f"this one {what} ({word})",
                "give every rank the same recipe, prompts and evenload version (`evenload doctor` on each shows them)",
            )
        self._seen = most[4:]

    def _move(self, schedule: Schedule, places: dict[int, Running], moving: Ints, now: Ints) -> None:
        """Send and receive samples, those between two ranks in one message whose size both know."""
        group, sends = on_host() if dist.is_initialized() else None, []
        before, tokens, wait = self._dealing.ranks, self._dealing.tokens, []
        for source, target in sorted({(int(before[i]), int(now[i])) for i in moving}):
            samples = [i for i in moving.tolist() if (before[i], now[i]) == (source, target)]
            self.moved += int((tokens[samples] > 0).sum())
            self.moved_tokens += sum(int(tokens[i]) + self._prompt(i) for i in samples if tokens[i])
            size = int(tokens[samples].sum())
            if source == self._rank:
                for i in samples:
                    schedule.drop(places[i])
                rows = _rows([places[i] for i in samples])
                sends.append(rows)
                if size and (work := dist.isend(rows, self._peers[target], group=group)):
                    wait.append(work)
            elif target == self._rank:
                rows = torch.empty(2, size, dtype=torch.float64)
                if size:
                    dist.recv(rows, self._peers[source], group=group)
                for i, part in zip(samples, torch.split(rows, tokens[samples].tolist(), dim=1), strict=True):
                    schedule.put(self._sample(i, part))
        for work in wait:
            work.wait()

    def _prompt(self, sample: int) -> int:
        return len(self._dealing.requests[self._dealing.of[sample]].tokens)

    def _sample(self, place: int, rows_2N: Tensor) -> Running:
        request, number = self._dealing.requests[self._dealing.of[place]], int(self._dealing.numbers[place])
        stream = stream_of(self._settings.seed, request.number, number)
        tokens, log_probs = rows_2N.tolist()
        return Running(request, number, stream, new=[int(token) for token in tokens], log_probs=log_probs)


def _rows(samples: Sequence[Running]) -> Tensor:
    """Tokens and log-probabilities of samples, one after the other, float64 [2, N]."""
    columns = [row for sample in samples for row in zip(sample.new, sample.log_probs, strict=True)]
    return torch.tensor(columns, dtype=torch.float64).reshape(-1, 2).T.contiguous()
