"""Training calls on TensorDicts, as verl's engine makes them: rows change micro-batches and ranks, nothing else.

    batch["input_ids"]      ragged rows; the user's ``forward_step_func`` packs them itself and tells the model
    loss                    divided by what is the whole step's (``batch_num_tokens``, ``global_batch_size``)

So a plan of whole samples in Megatron's own schedule is all there is to do: micro-batches are TensorDicts of the same
kind with other rows, and the loss of each is multiplied by what the schedule divides it by beyond the loop's own number
of micro-batches. Exact where the loss of a micro-batch is the sum of its rows' losses, which is tried on two rows
before the first step. A rank with fewer micro-batches than others repeats its shortest row with a loss of zero.

What the loss function reports of rows (``model_output``) goes back to the ranks and micro-batches that the rows came
from; sums of losses and metrics stay where they were computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from .....core.errors import EvenloadError, refuse_first
from .....core.plan.step_plan import StepPlan
from .....core.plan.token_layout import ranks_of_samples
from .....runtime.attributes import with_attributes
from .....runtime.world.agreement import all_or_none, everyone
from ....unmodified.planned_loop import GlobalBatch, LoopSession
from ..reading.rows import INPUT, Row, exchange_objects, joined, of_batch, refuse_uncommon, rows_of
from ..running.objective import RowStep
from ..running.order import with_dummies
from ..running.trial import FunctionTrial, try_first

log = logging.getLogger("evenload")

_OUTPUT = "model_output"
_CLOSE = 1e-2
"""Rows in other packs give other last digits, in bfloat16 many; a mean instead of a sum is off by half."""


@dataclass(frozen=True, eq=False)
class RowBatches:
    """The micro-batches of a training call, on a rank."""

    batches: Sequence[Any]
    samples: GlobalBatch[Row]
    places: list[list[int]]
    """Numbers of the rows of each in the global batch."""


def take_rows(batches: Sequence[Any], per_token: bool) -> RowBatches:
    """What all data-parallel ranks bring, in the order of Megatron's sampler. Collective. Raises EvenloadError on all
    of them. ``per_token``: losses are divided by all tokens, and not by the micro-batches of a rank."""
    group = parallel_state.get_data_parallel_group()
    rows = all_or_none(lambda: [rows_of(batch) for batch in batches], group)
    of_ranks = everyone(([[row.length for row in one] for one in rows], [of_batch(batch) for batch in batches]), group)
    counts = sorted({len(of_rank) for of_rank, _ in of_ranks})
    if len(counts) > 1 and not per_token:
        raise EvenloadError(
            "ranks bring unequal numbers of micro-batches, by which Megatron divides the losses of each",
            f"{' and '.join(map(str, counts))} micro-batches, calculate_per_token_loss False",
            "give every data-parallel rank as many, or set calculate_per_token_loss=True",
        )
    refuse_uncommon([values for _, of_rank in of_ranks for values in of_rank])
    rank = dist.get_rank(group)
    samples = GlobalBatch.of([lengths for lengths, _ in of_ranks], rows, rank)
    return RowBatches(batches, samples, samples.numbers_of(rank, len(batches)))


def prepare_rows(
    session: LoopSession, stock: Callable[..., Any], chunks: Sequence[Any], batches: Any, call: Mapping[str, Any]
) -> Callable[[], list[Any]]:
    """Runs a training call, and gives reports for the loop's micro-batches. Collective; raises EvenloadError where the
    call cannot be planned, on all ranks.

    Args:
        session: of the model's calls on rows.
        chunks: the model; one chunk.
        batches: TensorDicts, the micro-batches of the loop.
        call: the arguments of the schedule.
    """
    refuse_rows(chunks)
    config, function = get_model_config(chunks[0]), call["forward_step_func"]
    per_token = bool(config.calculate_per_token_loss)
    taken = take_rows(batches, per_token)
    if not session.has_run:
        _try(stock, chunks, taken, call)
    plan = _planned(session, taken)
    group = parallel_state.get_data_parallel_group()
    target = [rank for (rank,) in ranks_of_samples(plan)]
    portable = {i: row if target[i] == dist.get_rank(group) else row.cpu() for i, row in taken.samples.own.items()}
    rows = exchange_objects(portable, taken.samples.source, target, group)
    packs = [plan.micro_batches[i].slices for i in plan.of_rank(dist.get_rank(group))]
    shortest = min(taken.samples.own.values(), key=lambda row: row.length)
    own = [[rows[piece.sequence] for piece in slices] or [shortest] for slices in packs]
    log.info("%d rows in %d micro-batches on this rank instead of %d", len(rows), len(own), len(batches))
    joint = all_or_none(lambda: [joined(one, batches[0]) for one in own], group)
    step = RowStep(function, joint, [bool(slices) for slices in packs], own=len(batches), per_token=per_token)

    def run() -> list[Any]:
        with with_attributes(config, variable_seq_lengths=True):
            reports = stock(**{**call, "forward_step_func": step, "data_iterator": None, "num_microbatches": len(own)})
        real = [[piece.sequence for piece in slices] for slices in packs if slices]
        kept = [report for report, slices in zip(reports or packs, packs, strict=True) if slices]
        session.report(plan, micro_batch_size=len(batches[0]))
        return _home(kept, real, target, taken, group) if reports else reports

    return run


def _planned(session: LoopSession, taken: RowBatches) -> StepPlan:
    plan = session.plan(taken.samples.lengths)
    if not plan.in_host_schedule or plan.shared:
        raise EvenloadError(
            "batches of rows run in Megatron's own schedule, each row whole on one rank",
            f"a plan of {plan.made_by or 'hand'}",
            "enable plugins.packing alone, with slices=off",
        )
    return with_dummies(plan)


def _try(stock: Callable[..., Any], chunks: Sequence[Any], taken: RowBatches, call: Mapping[str, Any]) -> None:
    """Raise EvenloadError unless the loss of two rows is the sum of their losses. Collective."""
    rows = list(taken.samples.own.values())
    first, second = rows[0], rows[-1]
    tries = ([first, second], [first], [second])
    joint = all_or_none(
        lambda: [joined(one, taken.batches[0]) for one in tries], parallel_state.get_data_parallel_group()
    )
    config = get_model_config(chunks[0])
    step = RowStep(call["forward_step_func"], joint, [True] * 3, own=3, per_token=bool(config.calculate_per_token_loss))

    def run(trial: FunctionTrial) -> None:
        def answer(_: Any, chunk: Any, *more: Any) -> Any:
            return trial.answer(partial(step, _, chunk, *more), 1, config)

        stock(
            **{**call, "forward_step_func": answer, "data_iterator": None, "num_microbatches": 3, "forward_only": True}
        )

    try_first(chunks, run)
    # All ranks refuse, or none: stages before the last have no losses.
    for both, one, other in filter(None, everyone([float(loss) for loss in step.losses])):
        if not abs(both - one - other) > _CLOSE * (abs(one) + abs(other)):
            continue
        raise EvenloadError(
            "the loss of a micro-batch is not the sum of its rows' losses: with other rows next to them it changes",
            f"{both:g} for two rows, {one:g} and {other:g} for each by itself",
            "divide by what is the whole step's, as verl does by batch_num_tokens and global_batch_size, and not "
            "by the tokens or rows of the micro-batch; or disable evenload's plugins",
        )


def refuse_rows(chunks: Sequence[Any]) -> None:
    """Raise EvenloadError for a model that runs in another schedule, or whose loss is more than that of the rows."""
    config = get_model_config(chunks[0])
    experts, further = config.num_moe_experts, config.mtp_num_layers
    refuse_first(
        (
            len(chunks) > 1,
            "batches of rows are not planned for the interleaved pipeline schedule",
            f"{len(chunks)} model chunks on a rank",
            "leave virtual_pipeline_model_parallel_size unset, or disable evenload's plugins",
        ),
        (
            experts is not None,
            "routers do not know which tokens are padding in batches of rows",
            f"num_moe_experts {experts}",
            "train a model without experts, or disable evenload's plugins",
        ),
        (
            bool(further),
            "the losses of multi-token prediction are not known row by row",
            f"mtp_num_layers {further}",
            "train without mtp_num_layers, or disable evenload's plugins",
        ),
    )


def _home(
    reports: Sequence[Any], real: Sequence[Sequence[int]], target: Sequence[int], taken: RowBatches, group: Any
) -> list[Any]:
    """Reports with what they say of rows back where the rows came from. Collective at the last stage.

    Args:
        reports: of the micro-batches that ran with the rows ``real``, by place.
        target: rank that computed each place.
    """
    known = all(isinstance(report, Mapping) and isinstance(report.get(_OUTPUT), Mapping) for report in reports)
    ragged = {key for report in reports if known for key, value in report[_OUTPUT].items() if value.is_nested}
    of_ranks = everyone((known, ragged), group)
    if not all(known for known, _ in of_ranks):
        return list(reports)
    ragged = set().union(*(keys for _, keys in of_ranks))
    computed: dict[int, dict[str, Tensor]] = {place: {} for one in real for place in one}
    for places, report in zip(real, reports, strict=True):
        for key, value in report[_OUTPUT].items():
            for place, row in zip(places, value.unbind(), strict=True):
                computed[place][key] = row.detach().cpu().clone()
    own = exchange_objects(computed, target, taken.samples.source, group)
    where = taken.batches[0].get(INPUT).device
    entries = [{k: v for k, v in report.items() if k != _OUTPUT} for report in reports]
    entries += [{} for _ in taken.places[len(entries) :]]
    for entry, places in zip(entries, taken.places, strict=False):
        keys = own[places[0]]
        values = {key: [own[place][key].to(where) for place in places] for key in keys}
        entry[_OUTPUT] = {
            key: torch.nested.as_nested_tensor(rows, layout=torch.jagged) if key in ragged else torch.stack(rows)
            for key, rows in values.items()
        }
    return entries
