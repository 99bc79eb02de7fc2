"""The global batch of a Trainer's optimizer step: gathered from all ranks, and sent to where it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from ...core.errors import EvenloadError, of_request, refuse_first
from ...core.machine.layout import Layout
from ...core.machine.shape import Shape
from ...core.plan.step_plan import StepPlan
from ...core.plan.token_layout import ranks_of_samples
from ...core.planning.chain import PlanChain
from ...core.recipe.recipe import Recipe
from ...runtime.attention.copy_rows import ToHost
from ...runtime.attention.pack import IGNORE, Pack
from ...runtime.world.agreement import everyone, rank_and_size
from ...runtime.world.exchange import exchange_bytes
from ..huggingface.inputs import inputs_of
from ..huggingface.models import LengthWords, is_rotary, refuse_lengths, refuse_reach, shape_near, shape_of
from ..huggingface.refusals import raise_together
from ..huggingface.rows import PaddedForm, rows_of, split_pairs
from ..huggingface.samples import reach, split, with_all_labels, with_plain_positions
from ..unmodified.planned_loop import GlobalBatch
from ..unmodified.section import KEY, parse_section, recipe_of
from .multimodal.parts import NO_PARTS, PartForm, ReadParts, split_parts
from .multimodal.step import BroughtParts, FillerSample, PartsOfRank, StepParts, to_bytes
from .multimodal.work import seconds_beside, towers_of
from .pack_loss import PackLoss
from .supported import inner_model
from .traits import rule_of_layers, traits_of

LENGTHS = LengthWords("the longest sample of the step", "max_length of the SFTConfig or of the tokenizer call")
"""Of a step, in refusals."""


class StepForm(NamedTuple):
    """What the micro-batches of planned steps are."""

    packs: bool
    """Else padded groups."""
    left: bool = False
    """Rows of these are padded on the left."""
    parts: PartForm = ()
    """What samples have besides tokens."""


@dataclass(frozen=True, eq=False)
class StepSamples:
    """The samples of one optimizer step, and what the loop does with them."""

    samples: GlobalBatch[Tensor]
    """int64 [2, L] each, tokens and labels."""
    has_mask: bool
    """The script's batches have an ``attention_mask``."""
    rows: PaddedForm
    """How the rows of the script's batches look."""
    flattened: bool
    """Some rows hold several samples."""
    unseen: EvenloadError | None
    """Why the model does not see the whole of each sample; None: it does."""
    divisors: tuple[float, ...]
    """What a stock run divides the loss of each sample by."""
    num_batches: tuple[int, ...]
    """Of every rank."""
    hooked: bool
    """Gradients of parameters go through hooks on some rank."""
    changed: bool
    """The model of some rank is no longer composed as it was."""
    parts: StepParts | None
    """What samples have besides tokens; None: nothing."""

    @property
    def part_form(self) -> PartForm:
        return self.parts.form if self.parts else ()

    def exchange(self, plan: StepPlan) -> dict[int, Any]:
        """Tokens and labels, int64 [2, L], of the samples of which this rank computes some. Collective."""
        own = {i: sample.flatten().view(torch.uint8) for i, sample in self.samples.own.items()}
        sizes = [16 * length for length in plan.lengths.tolist()]
        parts = exchange_bytes(own, self.samples.source, ranks_of_samples(plan), sizes)
        return {i: part.cpu().view(torch.int64).view(2, -1).numpy() for i, part in parts.items()}

    def parts_of_rank(
        self, model: Any, form: StepForm, samples: Mapping[int, Any], plan: StepPlan, fillers: Sequence[FillerSample]
    ) -> PartsOfRank | None:
        """The parts of the samples of which this rank computes some, which `exchange` gave. Collective."""
        if self.parts is None:
            return None
        # Numbers below 0 count as padding, which in packs nobody attends to.
        first_filler = -len(fillers) if form.packs else len(plan.lengths)
        parts = self.parts.exchange(plan, self.samples)
        return PartsOfRank(model, form.parts, samples, parts, fillers, first_filler, plan.limits.round_tokens)

    def inputs_of(
        self, form: StepForm, loss: PackLoss | None, parts: PartsOfRank | None = None
    ) -> Callable[[Pack], dict[str, Any]]:
        """The arguments of the model's call for a micro-batch, whose tokens ``loss`` is told to weigh, with the
        ``parts`` of its samples."""

        def of_pack(pack: Pack) -> dict[str, Any]:
            pack = parts.filled(pack, rows=not form.packs) if parts else pack
            if loss is not None and form.packs:
                loss.refuse_unused()
                loss.weigh(pack, self.divisors)
            inputs = inputs_of(pack, with_mask=self.has_mask) if form.packs else rows_of(pack, self.rows)
            return inputs | parts.inputs_of(pack, rows=not form.packs, left=form.left) if parts else inputs

        return of_pack


class ParsedBatch(NamedTuple):
    """One batch as it came to a step, cut into samples."""

    samples: Sequence[Tensor] = ()
    """int64 [2, L] each, tokens and labels. Those without a target are left out: they give no gradient."""
    reach: int = 0
    """Positions that a stock run of the batch has."""
    divisor: float = 0.0
    """What the loop divides the loss of the batch by."""
    has_mask: bool = False
    rows: PaddedForm = PaddedForm(frozenset(), left=False, fill=0, start=None)
    """How its rows look."""
    flattened: bool = False
    """Some rows hold several samples."""
    parts: ReadParts = NO_PARTS
    """What its samples have besides tokens and labels."""
    error: EvenloadError | None = None
    """Why it cannot be cut, for all ranks to raise together."""


def reading(batch: Any, config: Any, num_items: Any) -> Callable[[], ParsedBatch]:
    """What cuts one batch of a loop for a model of this config, once it has come to the host: what is written to its
    tensors later changes nothing.

    Args:
        num_items: what the loop divides by, as it hands it to the model; None: nothing.
    """
    coming = {key: ToHost(value) if isinstance(value, Tensor) else value for key, value in batch.items()}
    divisor = ToHost(num_items) if isinstance(num_items, Tensor) else num_items
    return lambda: _read(coming, config, divisor)


def _read(coming: dict[str, Any], config: Any, divisor: Any) -> ParsedBatch:
    if isinstance(divisor, ToHost):  # the last to leave: the others have come before it
        divisor = divisor.read()
    read = {key: value.read() if isinstance(value, ToHost) else value for key, value in reversed(coming.items())}
    here = with_plain_positions(with_all_labels(read))
    try:
        pairs = getattr(config, "is_encoder_decoder", False)
        parts = NO_PARTS if pairs else split_parts(here, config)
        here = {key: value for key, value in here.items() if key not in {one.name for one in parts.form}}
        own = split_pairs(here, config) if pairs else split(here, rotary=is_rotary(config))
        of_samples = parts.of_samples(len(own))
    except EvenloadError as error:
        return ParsedBatch(error=error)
    except Exception as error:  # of batches that nobody here has seen
        what, do = "a batch cannot be read as samples", "leave evenload off for this script"
        return ParsedBatch(error=EvenloadError(what, f"{type(error).__name__}: {error}", do))
    samples = [torch.stack([*sample]) for sample in own]
    chosen = [*map(_is_computed, samples)]
    return ParsedBatch(
        [*compress(samples, chosen)],
        reach(here),
        sum(map(num_targets, samples)) if divisor is None else float(divisor),
        "attention_mask" in here,
        PaddedForm.of(here, config),
        len(samples) > len(here["input_ids"]),
        ReadParts(parts.form, [*compress(of_samples, chosen)]),
    )


class _Brought(NamedTuple):
    """What a rank tells the others of its batches."""

    batches: list[ParsedBatch]
    """Without their samples."""
    lengths: list[list[int]]
    parts: BroughtParts
    hooked: bool
    changed: bool


def gather(
    batches: Sequence[ParsedBatch], config: Any, *, hooked: bool = False, changed: bool = False
) -> StepSamples | None:
    """The samples of all ranks; None if no batch of any has a target. Collective.

    Args:
        batches: of this rank in the step.
        config: of the model.
        hooked: hooks of this rank may change gradients.
        changed: the model is no longer composed as it was.

    Raises EvenloadError, the same on all ranks, where the batches of one cannot be cut into samples, and where the
    model's rotary tables depend on what a sample stands next to.
    """
    content = [[*map(to_bytes, one.parts.of_rows)] for one in batches]
    lengths = [[sample.shape[1] for sample in one.samples] for one in batches]
    without_tensors = [one._replace(samples=(), parts=NO_PARTS) for one in batches]
    parts = BroughtParts.of([one.parts for one in batches], content)
    of_ranks = everyone(_Brought(without_tensors, lengths, parts, hooked, changed))
    of_batches = [one for of_rank in of_ranks for one in of_rank.batches]
    raise_together(one.error for one in of_batches if one.error is not None)
    rank, _ = rank_and_size()
    samples = GlobalBatch.of([one.lengths for one in of_ranks], [one.samples for one in batches], rank)
    if not samples.places:
        return None
    longest, unseen = int(samples.lengths.max()), None
    refuse_reach(config, longest, max(one.reach for one in of_batches), LENGTHS)
    try:
        refuse_lengths(config, longest, longest, LENGTHS, windows=False)
    except EvenloadError as error:
        unseen = error
    return StepSamples(
        samples,
        any(one.has_mask for one in batches),
        batches[-1].rows._replace(left=any(one.rows.left for one in of_batches)),
        any(one.flattened for one in of_batches),
        unseen,
        tuple(of_ranks[rank].batches[k].divisor for rank, k, _ in samples.places),
        tuple(len(one.batches) for one in of_ranks),
        any(one.hooked for one in of_ranks),
        any(one.changed for one in of_ranks),
        StepParts.of([one.parts for one in of_ranks], samples, [one.parts.of_rows for one in batches], content),
    )


def refuse_divisors(batch: StepSamples, num_items: Any) -> None:
    """Raise EvenloadError unless one number divides the losses of all batches: samples change places among them."""
    divisors = sorted(set(batch.divisors))
    refuse_first(
        (
            num_items is None or len(divisors) > 1,
            "the batches of one step are not divided by one number",
            f"num_items_in_batch = {', '.join(f'{one:g}' for one in divisors) if num_items is not None else None}",
            "call super().training_step(model, inputs, num_items_in_batch) with the number that the Trainer gives",
        )
    )


def _is_computed(sample: Tensor) -> bool:
    """Whether a sample gives a gradient."""
    return num_targets(sample) > 0


def num_targets(sample: Tensor) -> int:
    """Targets of a sample [2, L]."""
    return int((sample[1, 1:] != IGNORE).sum())


def chain_of(recipe: Recipe, trainer: Any, *, whole: bool, rows: int = 0) -> PlanChain:
    """The planners of a recipe for the model, the precision and the ranks of a Trainer; ``whole``: samples stay whole;
    ``rows``: of padded groups, that a sample is; 0: none. Raises EvenloadError."""
    args = trainer.args
    return chain_for(
        recipe,
        inner_model(trainer),
        zero_stage=zero_stage_of(trainer.accelerator),
        half=args.bf16 or args.fp16,
        whole=whole,
        rows=rows,
        micro_batch_size=args.per_device_train_batch_size,
    )


def chain_for(
    recipe: Recipe,
    model: Any,
    *,
    zero_stage: int,
    half: bool,
    whole: bool,
    rows: int = 0,
    micro_batch_size: int = 1,
) -> PlanChain:
    """The planners of a recipe for a Hugging Face model on all ranks of this job.

    Args:
        zero_stage: how weights and states are divided; 3 also for FSDP.
        half: passes run in half precision; also read off the model's weights.
        whole: samples stay whole.
        rows: of padded groups, that a sample is; 0: none.
        micro_batch_size: rows of a stock batch, which plans are compared with.
    """
    half = half or next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    rank, size = rank_and_size()
    traits = traits_of(zero_stage, "bf16" if half else "fp32")
    with of_request():
        refuse_first(rule_of_layers(recipe))
    chain = PlanChain.of_model(
        recipe, _shape(model), Layout(dp=size), traits, warn=rank == 0, whole=whole, orders=False
    )
    chain = replace(chain, micro_batch_size=micro_batch_size)
    return chain.in_rows(rows) if rows else chain


def with_work(chain: PlanChain, model: Any, batch: StepSamples) -> PlanChain:
    """The chain of a step, with what its samples have besides tokens weighed."""
    costs, values = chain.context.costs, batch.parts.values if batch.parts else ()
    if not values and not costs.beside:
        return chain
    return chain.with_beside(seconds_beside(values, towers_of(model), _shape(model), costs))


def _shape(model: Any) -> Shape:
    """The model's sizes; of one whose config does not say them all about those."""
    try:
        return shape_of(model.config)
    except Exception:  # of configs that nobody here has seen
        return shape_near(model)


def recipe_for(trainer: Any, recipe: Recipe) -> Recipe:
    """The recipe of a Trainer: where it runs DeepSpeed, the ``evenload`` section of its ds_config counts first."""
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    data = plugin.deepspeed_config.get(KEY) if plugin is not None else None
    return recipe_of(None if data is None else parse_section(data), recipe) or recipe


def zero_stage_of(accelerator: Any) -> int:
    """How an Accelerator has weights and states divided; 3 also for FSDP."""
    plugin = accelerator.state.deepspeed_plugin
    return int(plugin.zero_stage) if plugin else 3 if accelerator.distributed_type == DistributedType.FSDP else 0
