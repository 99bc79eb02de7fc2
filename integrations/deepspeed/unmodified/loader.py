"""The training loader of an unmodified script, planned: the same samples in every step, other ranks and packs.

A step of the script is ``gradient_accumulation_steps`` micro-batches on every rank; its global batch is what the stock
sampler would have put into them. Every rank reads its own stock samples, all ranks exchange lengths and target counts,
all make the same plan, and each then loads what the plan gives it (samples that changed hands are read again, so the
dataset must give the same sample for the same index; a digest tells). A batch has the keys of the script's own collate
function.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate

from ....core.errors import EvenloadError, refuse_first
from ....core.plan.step_plan import Lengths, MicroBatch, StepPlan
from ....core.planning.chain import PlanChain
from ....runtime.world.agreement import everyone
from ...huggingface.models import LengthWords, is_rotary, refuse_lengths
from ...huggingface.refusals import raise_together
from ...huggingface.samples import Sample, reach, split
from ...unmodified.exact_number import into_exactly
from ...unmodified.planned_loop import GlobalBatch, LoopSession
from .micro_batches import PlannedMicroBatch, build_batch

log = logging.getLogger("evenload")

_LENGTHS = LengthWords("the longest sample of the step", "max_length (with truncation=True) in the tokenizer call")


class SampleEntry(NamedTuple):
    """A sample with a target as all ranks know it."""

    rows: tuple[int, ...]
    """Of the dataset, collated to read it: its own, or those of the stock micro-batch of a flattening collator."""
    place: int
    """Among the samples of these rows."""
    length: int
    num_targets: int
    digest: bytes
    """Of its tokens and labels."""

    @classmethod
    def of(cls, rows: tuple[int, ...], place: int, sample: Sample) -> SampleEntry:
        both = torch.cat([sample.tokens, sample.labels]).cpu().numpy().tobytes()
        return cls(rows, place, len(sample.tokens), sample.num_targets, blake2b(both, digest_size=16).digest())


class OwnSamples(NamedTuple):
    """What a rank reads of the samples that the stock sampler gave it, for all ranks to know."""

    entries: list[list[SampleEntry]]
    """By stock micro-batch."""
    reach: int
    """Positions that stock runs of these samples have; see `huggingface.samples.reach`."""
    errors: list[EvenloadError]
    """Refusals of its samples, in their order."""


class PlannedLoader:
    """Stands in for `DeepSpeedDataLoader`; what it does not know itself it asks the stock loader.

    Args:
        session: of the engine; once that stays as it is, this is the stock loader again.
        config: of the Hugging Face model.
        num_micro_batches: of each rank in each step.
        handed_out: receives every micro-batch before the script does.
    """

    def __init__(
        self,
        stock: Any,
        session: LoopSession,
        config: Any,
        num_micro_batches: int,
        handed_out: deque[PlannedMicroBatch],
    ) -> None:
        self.stock = stock
        self._session = session
        self._num_micro_batches = num_micro_batches
        self._handed_out = handed_out
        self._has_planned = False
        self._has_warned = False
        self._has_compared = False
        self._config = config
        self._keys: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def __len__(self) -> int:
        length = len(self.stock)
        return length if self._session.stays else length - length % self._num_micro_batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stock) if self._session.stays else self._steps()

    def _steps(self) -> Iterator[Any]:
        # Read step by step: a sampler may draw later steps by what earlier ones have shown.
        rows, size, num_batches = iter(self.stock.data_sampler), self.stock.batch_size, len(self.stock)
        whole = num_batches - num_batches % self._num_micro_batches
        if whole < num_batches and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the last %d micro-batches of an epoch do not fill a step of gradient_accumulation_steps=%d; a planned "
                "loader leaves them out",
                num_batches - whole,
                self._num_micro_batches,
            )
        for _ in range(0, whole, self._num_micro_batches):
            stock_batches = [list(islice(rows, size)) for _ in range(self._num_micro_batches)]
            if not stock_batches[-1]:
                return  # a sampler that has gone on from a state since its loader was made has fewer
            try:
                step = self._plan_step(stock_batches)
            except EvenloadError as error:
                if self._has_planned:
                    raise
                self._session.leave(error)
                self._session.close()
                for of_batch in chain(stock_batches, iter(lambda: list(islice(rows, size)), [])):
                    if self.stock.tput_timer:
                        self.stock.tput_timer.start()
                    yield self._stock_batch(of_batch)
                return
            for batch, planned in step:
                if self._session.stays:
                    raise EvenloadError(
                        "evenload was disabled inside an epoch",
                        f"a planned loader is at micro-batch {planned.place} of a step",
                        "disable it between epochs, or start a new iterator",
                    )
                if self.stock.tput_timer:
                    self.stock.tput_timer.start()
                self._handed_out.append(planned)
                yield batch

    def _plan_step(self, stock_batches: list[list[int]]) -> list[tuple[dict[str, Tensor], PlannedMicroBatch]]:
        """Batches of this rank in one step, whose stock micro-batches on this rank have these rows. Collective. Raises
        EvenloadError, the same on all ranks: samples that cannot be regrouped, or do not fit."""
        samples: dict[tuple[int, ...], list[Sample]] = {}
        of_ranks = everyone(self._read_own(stock_batches, samples))
        raise_together(error for own in of_ranks for error in own.errors)
        lengths = [[[entry.length for entry in one] for one in own.entries] for own in of_ranks]
        batch = GlobalBatch.of(lengths, of_ranks[dist.get_rank()].entries, dist.get_rank())
        entries = [of_ranks[rank].entries[place][row] for rank, place, row in batch.places]
        refuse_first((not entries, "a batch has no target token", "no label but -100", "check labels and data"))
        longest = int(batch.lengths.max())
        refuse_lengths(self._config, longest, max(own.reach for own in of_ranks), _LENGTHS, windows=True)

        def sample(number: int) -> Sample:
            entry = entries[number]
            if entry.rows not in samples:
                samples[entry.rows] = split(self._collate(entry.rows), rotary=is_rotary(self._config))
            return _same(entry, samples[entry.rows])

        num_targets = sum(entry.num_targets for entry in entries)
        of_batches = {sum(entry.num_targets for entry in one) for own in of_ranks for one in own.entries}
        if len(of_batches) > 1 and not self._has_compared and dist.get_rank() == 0:
            log.warning(
                "a planned step's loss is the mean over all its targets; a script that takes the mean of each "
                "micro-batch gives those in small ones more weight (here they have %d to %d targets)",
                min(of_batches),
                max(of_batches),
            )
        self._has_compared |= len(of_batches) > 1
        plan, micro_batches = self._planned(batch.lengths)
        return [
            build_batch(plan, micro_batch, sample, num_targets, place, self._keys)
            for place, micro_batch in enumerate(micro_batches)
        ]

    def _read_own(self, stock_batches: list[list[int]], samples: dict[tuple[int, ...], list[Sample]]) -> OwnSamples:
        """Read the samples of stock micro-batches into `samples`, collated as in a stock run: only there is the padding
        that its loss may count. A sample without a target changes no gradient and is not planned."""
        entries: list[list[SampleEntry]] = []
        errors: list[EvenloadError] = []
        positions = 0
        for rows in stock_batches:
            entries.append([])
            try:
                batch = self._collate(rows)
                of_batch = split(batch, rotary=is_rotary(self._config))
            except EvenloadError as error:
                errors.append(error)
                continue
            self._keys |= set(batch)
            positions = max(positions, reach(batch))
            single = len(of_batch) == len(rows)
            for place, sample in enumerate(of_batch):
                entry = (
                    SampleEntry.of((rows[place],), 0, sample) if single else SampleEntry.of(tuple(rows), place, sample)
                )
                samples.setdefault(entry.rows, of_batch[place : place + 1] if single else of_batch)
                if entry.num_targets:
                    entries[-1].append(entry)
        return OwnSamples(entries, positions, errors)

    def _planned(self, lengths: Lengths) -> tuple[StepPlan, list[MicroBatch]]:
        """The plan of a step and this rank's share of it, `num_micro_batches` long."""
        plan = self._session.plan(lengths, self._plan)
        rows = into_exactly(plan, self._num_micro_batches, self._session.chain.context.costs)
        self._session.report(plan, micro_batch_size=self.stock.batch_size)
        self._has_planned = True
        return plan, rows[dist.get_rank()]

    def _plan(self, chain: PlanChain, batch: Lengths) -> StepPlan:
        """The chain's plan of a batch, with at most as many micro-batches on a rank as the script's step has."""
        plan = chain.plan(batch)
        if max(len(plan.of_rank(r)) for r in range(plan.limits.num_ranks)) <= self._num_micro_batches:
            return plan
        # Evened by cost, one rank may need a micro-batch more than there are; in rounds all need the same.
        return replace(chain, limits=replace(chain.limits, all_in_step=True)).plan(batch)

    def _stock_batch(self, rows: Iterable[int]) -> Any:
        """Rows of the dataset, through the script's own collate function."""
        return (self.stock.collate_fn or default_collate)([self.stock.dataset[row] for row in rows])

    def _collate(self, rows: Iterable[int]) -> Mapping[str, Any]:
        """`_stock_batch`, of which samples can be made. Raises EvenloadError."""
        batch = self._stock_batch(rows)
        if not isinstance(batch, Mapping):
            raise EvenloadError(
                "evenload regroups batches of input_ids and labels",
                f"collate_fn gives {type(batch).__name__}",
                "give a dict with input_ids, labels and attention_mask, or leave evenload out of ds_config",
            )
        return batch


def _same(entry: SampleEntry, samples: list[Sample]) -> Sample:
    """The sample of an entry. Raises EvenloadError where it is not what the rank that drew it read."""
    if entry.place >= len(samples) or SampleEntry.of(entry.rows, entry.place, samples[entry.place]) != entry:
        lengths = [len(sample.tokens) for sample in samples]
        raise EvenloadError(
            "the dataset or collate_fn gives another sample for the same index",
            f"row {entry.rows[0]} had {entry.length} tokens on one rank and gives {lengths} on another, or other ones",
            "make both deterministic and independent of the other rows: planned samples may be read by any rank",
        )
    return samples[entry.place]
