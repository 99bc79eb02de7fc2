"""The global batch of a Trainer's optimizer step: gathered from all ranks, and sent to where it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import EvenloadError, refuse_first
from ...core.machine.layout import Layout
from ...core.plan.step_plan import Lengths, StepPlan, as_lengths
from ...core.planning.chain import PlanChain
from ...core.recipe.recipe import Recipe
from ...runtime.attention.pack import IGNORE
from ...runtime.world.agreement import everyone, rank_and_size
from ...runtime.world.exchange import exchange
from ..deepspeed.unmodified.section import KEY, parse_section, recipe_of
from ..huggingface.models import LengthWords, is_rotary, refuse_lengths, shape_of
from ..huggingface.refusals import raise_together
from ..huggingface.samples import reach, split
from .supported import inner_model
from .traits import rule_of_layers, traits_of

_LENGTHS = LengthWords("the longest sample of the step", "max_length of the SFTConfig or of the tokenizer call")


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The samples of one optimizer step, in the order of a stock run: micro-batch by micro-batch, rank by rank."""

    lengths: Lengths
    source: tuple[int, ...]
    """The rank that has read the sample at each place."""
    own: Mapping[int, Tensor]
    """int64 [2, L], tokens and labels, of the samples that this rank has read, by their place."""
    has_mask: bool
    """The script's batches have an ``attention_mask``."""
    divisors: tuple[float, ...]
    """What a stock run divides the loss of the sample at each place by."""
    hooked: bool
    """Gradients of parameters go through hooks on some rank."""

    def exchange(self, plan: StepPlan) -> dict[int, Any]:
        """Tokens and labels, int64 [2, L], of the samples of which this rank computes some. Collective."""
        ranks: list[set[int]] = [set() for _ in self.lengths]
        for micro_batch in (*plan.micro_batches, *plan.backward):
            for piece in micro_batch.slices:
                ranks[piece.sequence] |= set(micro_batch.ranks)
        samples = exchange(self.own, self.source, [sorted(r) for r in ranks], self.lengths.tolist(), rows=2)
        return {where: sample.numpy() for where, sample in samples.items()}


class Read(NamedTuple):
    """One batch as it comes to a step, cut into samples: what is written to its tensors later changes nothing."""

    samples: Sequence[Tensor]
    """int64 [2, L] each, tokens and labels."""
    reach: int
    """Positions that a stock run of the batch has."""
    has_mask: bool
    divisor: float | None
    """What the loop divides the loss of the batch by; None: the number of its targets."""
    error: EvenloadError | None
    """Why it cannot be cut, for all ranks to raise together."""


def read(batch: Any, config: Any, num_items: Any) -> Read:
    """Cut one batch of a loop for a model of this config.

    Args:
        num_items: what the loop divides by, as it hands it to the model; None: nothing.
    """
    here = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in batch.items()}
    divisor, has_mask = None if num_items is None else float(num_items), "attention_mask" in batch
    try:
        samples = [torch.stack([*sample]) for sample in split(here, rotary=is_rotary(config))]
    except EvenloadError as error:
        return Read((), 0, has_mask, divisor, error)
    return Read(samples, reach(here), has_mask, divisor, None)


def gather(batches: Sequence[Read], config: Any, *, hooked: bool = False) -> GlobalBatch | None:
    """The samples of all ranks; None if no batch of any has a target. Collective. Samples without a target are left
    out: they give no gradient.

    Args:
        batches: of this rank in the step.
        config: of the model.
        hooked: hooks of this rank may change gradients.

    Raises EvenloadError, the same on all ranks, where the batches of one cannot be cut into samples, and where the
    model does not see the whole of one.
    """
    facts = [[(sample.shape[1], int((sample[1, 1:] != IGNORE).sum())) for sample in one.samples] for one in batches]
    errors, divisors = [one.error for one in batches], [one.divisor for one in batches]
    of_ranks = everyone((errors, facts, divisors, max((one.reach for one in batches), default=0), hooked))
    raise_together(error for errors, *_ in of_ranks for error in errors if error is not None)
    order = [
        (rank, k, row)
        for k in range(max(len(rows) for _, rows, *_ in of_ranks))
        for rank, (_, rows, *_) in enumerate(of_ranks)
        for row in range(len(rows[k]) if k < len(rows) else 0)
        if _is_computed(rows[k][row])
    ]
    if not order:
        return None
    lengths = as_lengths([of_ranks[rank][1][k][row][0] for rank, k, row in order])
    refuse_lengths(config, int(lengths.max()), max(positions for *_, positions, _ in of_ranks), _LENGTHS)
    me = rank_and_size()[0]
    return GlobalBatch(
        lengths,
        tuple(rank for rank, _, _ in order),
        {i: batches[k].samples[row] for i, (rank, k, row) in enumerate(order) if rank == me},
        any(one.has_mask for one in batches),
        tuple(_divisor(of_ranks[rank][1][k], of_ranks[rank][2][k]) for rank, k, _ in order),
        any(hooked for *_, hooked in of_ranks),
    )


def _divisor(rows: Sequence[tuple[int, int]], counted: float | None) -> float:
    """What a stock run divides the loss of a batch of these tokens and targets by."""
    return sum(targets for _, targets in rows) if counted is None else counted


def _is_computed(row: tuple[int, int]) -> bool:
    """Whether a sample of so many tokens and targets gives a gradient."""
    return row[1] > 0


def chain_of(recipe: Recipe, trainer: Any, *, whole: bool) -> PlanChain:
    """The planners of a recipe for the model, the precision and the ranks of a Trainer; ``whole``: samples stay whole.
    Raises EvenloadError."""
    args = trainer.args
    return chain_for(
        recipe,
        inner_model(trainer),
        zero_stage=_zero_stage(trainer),
        half=args.bf16 or args.fp16,
        whole=whole,
        micro_batch_size=args.per_device_train_batch_size,
    )


def chain_for(
    recipe: Recipe, model: Any, *, zero_stage: int, half: bool, whole: bool, micro_batch_size: int = 1
) -> PlanChain:
    """The planners of a recipe for a Hugging Face model on all ranks of this job.

    Args:
        zero_stage: how weights and states are divided; 3 also for FSDP.
        half: passes run in half precision; also read off the model's weights.
        whole: samples stay whole.
        micro_batch_size: rows of a stock batch, which plans are compared with.
    """
    refuse_first(rule_of_layers(recipe))
    half = half or next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    rank, size = rank_and_size()
    traits = traits_of(zero_stage, "bf16" if half else "fp32")
    chain = PlanChain.of_model(
        recipe, shape_of(model.config), Layout(dp=size), traits, warn=rank == 0, whole=whole, orders=False
    )
    return replace(chain, micro_batch_size=micro_batch_size)


def recipe_for(trainer: Any, recipe: Recipe) -> Recipe:
    """The recipe of a Trainer: where it runs DeepSpeed, the ``evenload`` section of its ds_config counts first."""
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    data = plugin.deepspeed_config.get(KEY) if plugin is not None else None
    return recipe_of(None if data is None else parse_section(data), recipe) or recipe


def _zero_stage(trainer: Any) -> int:
    if trainer.is_deepspeed_enabled:
        return int(trainer.accelerator.state.deepspeed_plugin.zero_stage)
    return 3 if trainer.is_fsdp_enabled else 0
