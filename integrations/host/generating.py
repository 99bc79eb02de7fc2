"""Samples that a host generates: they are dealt to the ranks that hold the whole model, or to groups of ranks that hold
it together, and each goes through its own at its own pace; where they are dealt again, from border to border.

Ranks of a group compute the same packs and pick the same tokens: with tensor parallelism all of them see all logits,
of a pipeline the last stage tells the others what it has picked. Who is done waits without a collective, which would
have a time limit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ...core.errors import RankError, Rule, refuse_first
from ...core.machine.layout import Layout
from ...core.planning.setting import costs_named
from ...core.recipe.recipe import Recipe
from ...core.recipe.sizes import shape_of
from ...runtime.adapters.adapters import Adapters
from ...runtime.attention.block_tables import BlockTables
from ...runtime.attention.cached import block_tokens_on
from ...runtime.attention.pack import Pack
from ...runtime.generate.dealing import Dealer, Dealing, Forwards, GenerationStats, WholePrompts, agreed
from ...runtime.generate.drafts import DraftCounts, Drafts
from ...runtime.generate.engine import Decoder, Quantizable, Serves, generate, of_nobody
from ...runtime.generate.quantized import LinearLayer
from ...runtime.generate.request import Completion, Generation, Request, Scoring, rules
from ...runtime.generate.schedule import refuse_small_cache
from ...runtime.world.agreement import Group, all_or_none, everyone, name_ranks, on_host, rank_and_size
from .moving import Migration
from .step import Mark

Ending = Callable[[Completion], object]
"""Is shown a sample that has ended."""
Counted = Callable[[int], object]
"""Is shown how many samples have ended on all ranks."""
RunStage = Callable[[Tensor | None, Pack, Tensor], Tensor]
"""What comes out of a stage by what the one before it has sent, a pack, and the slots whose logits are wanted [R]:
hidden states, of the last stage logits [R, V]."""


class Generating(Protocol):
    """What a generation asks of a host, see `Host`."""

    recipe: Recipe
    layout: Layout
    dp_cp_rank: int
    collects: bool
    device: torch.device

    @property
    def adapters(self) -> Adapters: ...

    def decoding(self) -> AbstractContextManager[Decoder]: ...


_LOOK_S = 0.1
_generations = itertools.count()


def samples_of(
    host: Generating,
    requests: Sequence[Request],
    settings: Generation,
    ended: Ending,
    counted: Counted,
    mark: Mark,
    dealer: Dealer,
) -> tuple[Completion, ...]:
    """Samples of requests that a host is asked for, see `Host.generate`."""
    refuse_unfit(host, requests, settings)
    rank, num_ranks = host.dp_cp_rank, host.layout.dp_cp_size
    dealing = Dealing.of_requests(requests, settings, num_ranks)
    if settings.collect is not None:
        dealer = WholePrompts()
    dealt = agreed(dealer, dealing)
    own = [_one(dealing, place) for place in dealt.ranks[rank].tolist()]
    count, samples, work = _Count(), [], [Forwards()]
    drafter = settings.drafter(settings.earlier) if settings.drafter else None
    costs = costs_named(host.recipe.costs) if drafter else None
    drafts = Drafts(drafter, host.recipe.model.vocab_size, costs.decode if costs else None)

    def at_start_of_border() -> None:
        mark("generation, a border")
        work.append(Forwards())

    mark("generation")
    if settings.scores is not None:
        settings = replace(settings, scores=_shared_scores(host, settings.scores))
    adapted: AbstractContextManager[Serves] = nullcontext(of_nobody)
    if host.recipe.adapts:
        adapted = host.adapters.serving()
    with host.decoding() as decoder, adapted as serves:
        migration = None
        if dealt.forwards is not None and num_ranks > 1:
            in_step = decoder.goes_on is not bool
            migration = Migration(dealer, dealing, dealt, settings, rank, in_step=in_step, arrived=at_start_of_border)
        for sample in generate(own, settings, replace(_counting(decoder, work), serves=serves), migration, drafts):
            samples.append(sample)
            mark("generation")
            if migration:
                migration.has(sample)
            if host.collects and sample.kept:
                ended(sample)
            counted(count.add(host.collects))
    for done in count.until_all():
        mark("generation")
        counted(done)
    of_ranks = everyone((rank, samples, (tuple(work), drafts.counts) if host.collects else None))
    works = {of: ran for of, _, ran in of_ranks if ran}
    moved, again = (migration.moved, migration.moved_tokens) if migration else (0, 0)
    in_order = [works[of] for of in range(num_ranks)]
    counts = reduce(DraftCounts.plus, (own for _, own in in_order))
    dealer.ran(GenerationStats(dealt.dealer, tuple(work for work, _ in in_order), moved, again, counts))
    return _merged(samples for _, samples, _ in of_ranks)


def _one(dealing: Dealing, place: int) -> Request:
    """The request of one sample alone."""
    request: Request = dealing.requests[dealing.of[place]]
    return request._replace(samples=(int(dealing.numbers[place]),))


def _counting(decoder: Decoder, work: list[Forwards]) -> Decoder:
    """A decoder that counts in the last of ``work`` what it computes."""

    def logits(pack: Pack, slots_R: Tensor) -> Tensor | None:
        work[-1] = work[-1].plus(pack.slices, pack.cached.drafted if pack.cached else None)
        return decoder.logits(pack, slots_R)

    return replace(decoder, logits=logits)


def refuse_unfit(host: Generating, requests: Sequence[Request], settings: Generation) -> None:
    """Raise EvenloadError for a model or requests that cannot be generated."""
    recipe = host.recipe
    here = host.adapters.numbers if recipe.adapts else ()
    refuse_first(
        *unfit(recipe), *_strangers(requests, here), *rules(requests, recipe.data.max_length, recipe.model.vocab_size)
    )
    refuse_small_cache(requests, settings, BlockTables(block_tokens_on(host.device), settings.cache_tokens))


def _shared_scores(host: Generating, scores: Scoring) -> Scoring:
    """Scores by one of the ranks that hold the model together, for all of them: a function of a user's may not give two
    ranks the same. Collective."""
    if host.layout.tp * host.layout.pp == 1:
        return scores
    planes = everyone(host.dp_cp_rank)
    rows = [[rank for rank, plane in enumerate(planes) if plane == own] for own in range(host.layout.dp_cp_size)]
    group = [dist.new_group(row, backend="gloo") for row in rows][host.dp_cp_rank]

    def of_one(samples: Sequence[Completion]) -> Sequence[float]:
        own = all_or_none(lambda: scores(samples) if host.collects else None, group)
        return next(filter(None, everyone(own, group)))

    return of_one


class _Count:
    """How many samples have ended on all ranks, and how many ranks are done, in the job's store. Made by all ranks
    together."""

    def __init__(self) -> None:
        self._key = f"evenload/generation/{next(_generations)}"
        self._store: Any = _get_default_store() if dist.is_initialized() else None
        self._alone = 0

    def add(self, more: int) -> int:
        self._alone += more
        return int(self._store.add(f"{self._key}/samples", int(more))) if self._store else self._alone

    def until_all(self) -> Iterator[int]:
        """The number again and again, until every rank has called this."""
        if not self._store:
            return
        _, size = rank_and_size()
        here = self._store.add(self._key, 1)
        while here < size:
            time.sleep(_LOOK_S)
            yield self.add(0)
            here = self._store.add(self._key, 0)


def _merged(of_ranks: Iterable[Sequence[Completion]]) -> tuple[Completion, ...]:
    """All samples in the order of prompts. Raises RankError where ranks that computed one together differ."""
    samples: dict[tuple[int, int], tuple[int, Completion]] = {}
    for rank, own in enumerate(of_ranks):
        for sample in own:
            first, other = samples.setdefault((sample.prompt, sample.sample), (rank, sample))
            if other.tokens != sample.tokens:
                raise RankError(
                    f"sample {sample.sample} of prompt {sample.prompt} differs between ranks that made it together",
                    f"{name_ranks([first, rank])}",
                    "run them on equal devices, with equal versions (`evenload doctor` on each host shows them)",
                )
    return tuple(samples[key][1] for key in sorted(samples))


def unfit(recipe: Recipe) -> Iterator[Rule]:
    """What recipes can be trained by, and not generate from."""
    ep, tp, experts = recipe.parallel.ep, recipe.parallel.tp, shape_of(recipe.model).experts
    yield ep > 1, "generation does not run experts that ranks share", f"parallel.ep {ep}", "set parallel.ep=1"
    what, do = "generation does not run experts of tensor-parallel ranks", "set parallel.tp=1 where samples are drawn"
    yield experts is not None and tp > 1, what, f"parallel.tp {tp}, {experts and experts.num_experts} experts", do
    capacity = recipe.model.moe.capacity_factor if recipe.model.moe else 0.0
    what = "generation does not drop tokens of experts, by what else is in a forward"
    yield bool(capacity), what, f"model.moe.capacity_factor {capacity}", "set model.moe.capacity_factor=0"
    what = "generation does not divide tokens over tensor-parallel ranks"
    do = "set megatron.sequence_parallel=false where samples are drawn, or use `evenload generate`"
    yield recipe.megatron.sequence_parallel, what, "megatron.sequence_parallel true", do
    do = "set plugins.pipeline.v_shape=false"
    yield recipe.v_shape, "generation does not run two stages a device", "plugins.pipeline.v_shape true", do


def _strangers(requests: Sequence[Request], here: Sequence[int]) -> Iterator[Rule]:
    """Requests of tenants that have no adapter."""
    for number, _, _, _, tenant in requests:
        what, do = f"prompt {number} is of a tenant that has no adapter here", "let the tenant join before"
        yield tenant is not None and tenant not in here, what, f"tenant {tenant}, here {list(here)}", do


def staged(
    run: RunStage, device: torch.device, group: Group, empty: Callable[[Pack], Tensor], linears: Sequence[LinearLayer]
) -> Decoder:
    """A decoder of the stages of a pipeline, which compute a pack one after the other.

    Args:
        group: of the stages, in their order.
        empty: what a stage receives of a pack, as large.
        linears: of this stage's layers.
    """
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())

    def logits(pack: Pack, slots_R: Tensor) -> Tensor | None:
        received = None
        if place > 0:
            received = empty(pack)
            dist.recv(received, ranks[place - 1], group=group)
        output = run(received, pack, slots_R)
        if place == len(ranks) - 1:
            return output
        dist.send(output.contiguous(), ranks[place + 1], group=group)
        return None

    def shared(picks_2R: Tensor) -> Tensor:
        dist.broadcast(picks_2R, ranks[-1], group=group)
        return picks_2R

    return Decoder(device, logits, shared, quantizable=Quantizable(linears, logits))


def any_rank(busy: bool) -> bool:
    """Whether any rank has something to compute. Collective."""
    flag = torch.tensor([int(busy)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=on_host())
    return bool(flag)
