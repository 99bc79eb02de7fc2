"""The plan of one training call: the samples of all data ranks as one global batch, how a rank lays out packs, and
what a planned step does otherwise than a stock one on purpose."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state

from .....core.aliases import Floats
from .....core.errors import EvenloadError, RankError
from .....core.plan.step_plan import MicroBatch, Slice, StepPlan
from .....core.plan.token_layout import ranks_of_samples, tokens_of_ranks
from .....runtime.world.agreement import everyone
from ....unmodified.planned_loop import GlobalBatch, Place
from ...base.plane import open_plane
from ...model.experts import SEQUENCE_LOSS
from ..reading.batches import Batches
from ..reading.context_parallel import CpShards
from ..reading.samples import PackForm, exchange, lay_out
from ..refusals.layers import losses_of_routers
from ..refusals.supported import tokens_multiple
from ..running.chunks import required_microbatches
from ..running.experts import StockMicroBatches
from ..running.forward_step import LayOut, UserStep
from ..running.objective import weights_of
from ..running.order import with_dummies
from .sharing import plan_in_rounds
from .user_loop import UserLoop

log = logging.getLogger("evenload")


class CallPlan(NamedTuple):
    """The plan of a training call, and what this rank knows of its samples."""

    plan: StepPlan
    lay: LayOut
    cp_shards: CpShards
    own: list[list[int]]
    """The shards that this rank has, in the stock loop, of each of the loop's own micro-batches."""
    places: Sequence[Place]
    """Where the loop has each sequence."""
    weights: Floats
    """Of a token of each shard, where micro-batches are averaged."""
    stock_micro_batches: StockMicroBatches
    padded: bool
    """Rows of the loop hold more than the tokens of samples, on some rank, and the model is not told where."""
    packed: StepPlan | None
    """The loop's own step, where a row of it holds several samples on some rank."""

    def two_whole(self, rank: int) -> MicroBatch:
        """The two shortest samples of which this rank computes something, whole."""
        lengths = self.plan.lengths
        own = [number for number, ranks in enumerate(ranks_of_samples(self.plan)) if rank in ranks]
        shortest = sorted(own, key=lambda number: (lengths[number], number))[:2]
        return MicroBatch(tuple(Slice(number, 0, int(lengths[number])) for number in shortest), (rank,))


def data_group() -> Any:
    """All data x context ranks with the same part of the model."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def plan_call(batches: Batches, loop: UserLoop, gpt: Any, interleaved: bool) -> CallPlan:
    """The plan of a training call. Collective; raises EvenloadError.

    ``interleaved``: Megatron runs its interleaved schedule.
    """
    gathered = _gathered(batches)
    try:
        return _plan_call(gathered, batches, loop, gpt, interleaved)
    except RankError:
        raise
    except EvenloadError:
        if loop.only_stock is not None and loop.chain.orders:
            raise EvenloadError(*loop.only_stock) from None  # why samples had to stay whole
        raise


def _gathered(batches: Batches) -> list[tuple[Any, ...]]:
    """What every data rank brings: lengths, targets, places of a row and of all, whether a row holds several samples,
    trouble. Collective; raises, on all of them, what one has met."""
    # Context-parallel ranks are given the same samples: the first brings them.
    first = parallel_state.get_context_parallel_rank() == 0
    brought = batches.lengths if first else [[] for _ in batches.lengths]
    of_rank = (brought, batches.targets, batches.row, batches.slots, batches.several, batches.trouble)
    gathered: list[tuple[Any, ...]] = everyone(of_rank, data_group())
    if trouble := next((one for *_, one in gathered if one is not None), None):
        raise trouble
    return gathered


def _plan_call(
    gathered: Sequence[tuple[Any, ...]], batches: Batches, loop: UserLoop, gpt: Any, interleaved: bool
) -> CallPlan:
    """The plan of one step, with as many micro-batches on this rank as on every other, and how this rank lays one
    of them out. Collective."""
    group, ranks = data_group(), parallel_state.get_context_parallel_world_size()
    me, place_in_row = dist.get_rank(group), parallel_state.get_context_parallel_rank()
    lengths_of_ranks, targets_of_ranks, rows, slots_of_ranks, several, _ = zip(*gathered, strict=True)
    batch = GlobalBatch.of(lengths_of_ranks, batches.samples, me)
    plan = loop.plan(batch.lengths, plan_in_rounds)
    plan = with_dummies(plan, partial(required_microbatches, interleaved, gpt.config))
    like = batches.samples[0][0]
    samples = exchange(batch.own, batch.source, ranks_of_samples(plan), batch.lengths.tolist(), group, like=like)
    config = gpt.config
    form = PackForm(like, batches.form, tokens_multiple(config), next(gpt.parameters()).device)
    lay = partial(lay_out, samples=samples, form=form, plane=loop.plane_of(plan, open_plane))
    slots = [tokens_of_ranks(plan.micro_batches[index])[me] for index in plan.of_rank(me)]
    log.info(
        "step %d: %d samples in %d micro-batches of %d tokens at most; %d tokens on this rank instead of %d",
        loop.steps,
        len(batch.places),
        len(slots),
        max(slots),
        sum(slots),
        batches.slots,
    )
    cp_shards = CpShards(ranks, [rows[rank] for rank in batch.source])
    own = [
        [cp_shards.number(i, place_in_row) for i in numbers]
        for numbers in batch.numbers_of(me - place_in_row, len(batches.lengths))
    ]
    stock_micro_batches = [lengths_of_ranks[rank][place] for rank, place, _ in batch.places]
    padded = sum(slots_of_ranks) > batch.lengths.sum() and "padding_mask" not in batches.form.looks
    weights = weights_of(targets_of_ranks, batch.places)
    packed = batch.packed(plan.limits) if any(several) else None
    return CallPlan(plan, lay, cp_shards, own, batch.places, weights, stock_micro_batches, padded, packed)


def warn_of_differences(loop: UserLoop, config: Any, planned: CallPlan, step: UserStep, said: set[str]) -> None:
    """Say why the losses of this step are not stock's. Collective in the first step with several samples in a row.

    Args:
        step: which has run.
        said: reasons that have been given; grows.
    """
    if planned.packed and loop.mixes_rows is None:
        loop.mixes_rows = any(everyone(step.left_borders_out))
    reasons = []
    if planned.padded and (counting := _counting_padding(config)):
        reasons.append(f"padding of rows counts in Megatron's routers and not here ({', '.join(counting)})")
    if planned.packed and loop.mixes_rows:
        reasons.append(
            "samples of one row see each other in Megatron's pipeline stages that forward_step gives no "
            "packed_seq_params, and not here"
        )
    if (new := [reason for reason in reasons if reason not in said]) and dist.get_rank() == 0:
        log.warning("losses and norms differ from stock's, on purpose: %s", "; ".join(new))
    said.update(new)


def _counting_padding(config: Any) -> list[str]:
    """Settings of routers whose effect depends on the padding of rows."""
    if config.num_moe_experts is None:
        return []
    names = ("moe_router_enable_expert_bias", "moe_z_loss_coeff")
    return [name for name in names if getattr(config, name)] + [SEQUENCE_LOSS] * (
        SEQUENCE_LOSS in losses_of_routers(config)
    )
