"""The training loader of an unmodified script, planned: the same samples in every step, other ranks and packs.

A step of the script is ``gradient_accumulation_steps`` micro-batches on every rank; its global batch is what the stock
sampler would have put into them. Every rank reads its own stock samples, all ranks exchange lengths and target counts,
all make the same plan, and each then loads what the plan gives it (samples that changed hands are read again, so the
dataset must give the same sample for the same index). A batch has the keys of the script's own collate function.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from ....core.errors import EvenloadError
from ....core.plan.action import DUMMY
from ....core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from ....core.planning.chain import PlanChain, warn_once
from ....runtime.attention.pack import IGNORE, Pack, build_pack
from ....runtime.world.agreement import everyone
from ...planned_runs import report_step

log = logging.getLogger("evenload")

_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")


class Sample(NamedTuple):
    """One sample as the script's collate function gives it, padding taken off."""

    tokens: torch.Tensor
    """int64 [L]"""
    labels: torch.Tensor
    """int64 [L], not shifted, as Hugging Face models take them; `IGNORE` where there is no loss."""

    @property
    def num_targets(self) -> int:
        return int((self.labels[1:] != IGNORE).sum())


@dataclass(frozen=True, eq=False)
class Planned:
    """A micro-batch that the loader has handed out."""

    pack: Pack
    weight: float
    """Target tokens of this micro-batch / those of the global batch."""
    place: int
    """Of the micro-batch in its step, 0 .. gradient_accumulation_steps - 1."""


class PlannedLoader:
    """Stands in for `DeepSpeedDataLoader`; what it does not know itself it asks the stock loader.

    Args:
        num_micro_batches: of each rank in each step.
        handed_out: receives every micro-batch before the script does.
        active: false once evenload is disabled; the loader is then the stock one again.
    """

    def __init__(
        self,
        stock: Any,
        chain: PlanChain,
        num_micro_batches: int,
        handed_out: deque[Planned],
        active: Callable[[], bool],
    ) -> None:
        self.stock = stock
        self._chain, self._num_micro_batches = chain, num_micro_batches
        self._handed_out, self._lives = handed_out, active
        self._has_warned = False
        self._warned: set[str] = set()
        self._has_mask = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def __len__(self) -> int:
        length = len(self.stock)
        return length - length % self._num_micro_batches if self._lives() else length

    def __iter__(self) -> Iterator[Any]:
        return self._steps() if self._lives() else iter(self.stock)

    def _steps(self) -> Iterator[Any]:
        order, size = list(self.stock.data_sampler), self.stock.batch_size
        stock_batches = [order[i : i + size] for i in range(0, len(order), size)][: len(self.stock)]
        whole = len(stock_batches) - len(stock_batches) % self._num_micro_batches
        if whole < len(stock_batches) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the last %d micro-batches of an epoch do not fill a step of gradient_accumulation_steps=%d; a planned "
                "loader leaves them out",
                len(stock_batches) - whole,
                self._num_micro_batches,
            )
        for first in range(0, whole, self._num_micro_batches):
            indices = [index for batch in stock_batches[first : first + self._num_micro_batches] for index in batch]
            for batch, planned in self._plan_step(indices):
                if not self._lives():
                    raise EvenloadError(
                        "evenload was disabled inside an epoch",
                        f"a planned loader is at micro-batch {planned.place} of a step",
                        "disable it between epochs, or start a new iterator",
                    )
                if self.stock.tput_timer:
                    self.stock.tput_timer.start()
                self._handed_out.append(planned)
                yield batch

    def _plan_step(self, indices: list[int]) -> list[tuple[dict[str, torch.Tensor], Planned]]:
        """Batches of this rank in one step, whose stock samples on this rank are `indices`. Collective."""
        own = {index: self._read(index) for index in indices}
        row = [(index, len(own[index].tokens), own[index].num_targets) for index in indices]
        samples = [entry for one in everyone(row) for entry in one]
        num_targets = sum(targets for _, _, targets in samples)
        if num_targets == 0:
            raise EvenloadError("a batch has no target token", f"{len(samples)} samples", "check labels and data")
        micro_batches = self._micro_batches([length for _, length, _ in samples])

        def sample(place: int) -> Sample:
            index, length, _ = samples[place]
            item = own[index] if index in own else own.setdefault(index, self._read(index))
            if len(item.tokens) != length:
                raise EvenloadError(
                    "the dataset gives another sample for the same index",
                    f"sample {index} had {length} tokens on one rank and has {len(item.tokens)} on another",
                    "make it deterministic: planned samples may be read by any rank",
                )
            return item

        return [
            _batch(micro_batch, sample, num_targets, place, has_mask=self._has_mask)
            for place, micro_batch in enumerate(micro_batches)
        ]

    def _micro_batches(self, lengths: list[int]) -> tuple[MicroBatch, ...]:
        """This rank's share of the plan, `num_micro_batches` long."""
        batch = as_lengths(lengths)
        plan = self._chain.plan(batch)
        if dist.get_rank() == 0:
            warn_once(plan, self._warned)
        if max(len(plan.of_rank(r)) for r in range(plan.limits.num_ranks)) > self._num_micro_batches:
            # Evened by cost, one rank may need a micro-batch more than there are; in rounds all need the same.
            plan = replace(self._chain, limits=replace(self._chain.limits, equal_counts=True)).plan(batch)
        report_step("DeepSpeed", self._chain, plan, micro_batch_size=self.stock.batch_size)
        return into_exactly(plan, self._num_micro_batches)[dist.get_rank()]

    def _read(self, index: int) -> Sample:
        """The sample, through the script's own collate function."""
        collate = self.stock.collate_fn or default_collate
        row = collate([self.stock.dataset[index]])
        keys = set(row) if isinstance(row, dict) or hasattr(row, "keys") else set()
        if not {"input_ids", "labels"} <= keys or not keys <= set(_KEYS):
            raise EvenloadError(
                "evenload packs batches of input_ids, labels and attention_mask",
                f"collate_fn gives {', '.join(sorted(map(str, keys))) or type(row).__name__}",
                "give these keys, or leave the evenload section out of ds_config",
            )
        tokens_L, labels_L = row["input_ids"][0], row["labels"][0]
        if "attention_mask" in keys:
            self._has_mask = True
            real = row["attention_mask"][0].bool()
            tokens_L, labels_L = tokens_L[real], labels_L[real]
        if not len(tokens_L):
            raise EvenloadError("a sample has no tokens", f"sample {index}", "leave empty samples out of the dataset")
        return Sample(tokens_L, labels_L)


def _batch(
    micro_batch: MicroBatch, sample: Callable[[int], Sample], num_targets: int, place: int, *, has_mask: bool
) -> tuple[dict[str, torch.Tensor], Planned]:
    """The batch that the script gets, and what its forward and backward need to know of it."""
    if micro_batch.slices:
        pack = build_pack(micro_batch, lambda i: sample(i).tokens.numpy())
        labels_T = torch.cat([sample(s.sequence).labels for s in micro_batch.slices]).clone()
        # The first token of a sequence would be the label of the sequence before it.
        labels_T[list(pack.segments[:-1])] = IGNORE
        own_targets = int((labels_T != IGNORE).sum())
    else:
        # Two tokens and one label: a loss that is a mean stays finite, its weight is 0.
        two = MicroBatch((Slice(0, 0, 2),), micro_batch.ranks)
        pack, own_targets = build_pack(two, lambda _: np.zeros(2, dtype=np.int64)), 0
        labels_T = torch.tensor([IGNORE, 0])
    batch = {"input_ids": pack.tokens_T[None], "labels": labels_T[None]}
    if has_mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch, Planned(pack, own_targets / num_targets, place)


def into_exactly(plan: StepPlan, count: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """`count` micro-batches for every rank, dummies where the plan has fewer: ``result[rank][k]``. Raises EvenloadError
    where a rank has more, or shares one with others, or layers are to be recomputed."""
    if any(layers for row in plan.recompute for layers in row):
        raise EvenloadError(
            "a training loop of your own decides itself what is recomputed",
            f"a plan made by {plan.made_by or 'hand'} that says it by micro-batch",
            "set plugins.pipeline.recompute=off, or use `evenload train`",
        )
    if plan.shared:
        raise EvenloadError(
            "a training loop of your own runs every micro-batch on one rank",
            f"a plan made by {plan.made_by or 'hand'} that shares micro-batches",
            "plan under limits.whole_sequences, or use `evenload train`",
        )
    own = [[plan.micro_batches[i] for i in plan.of_rank(rank)] for rank in range(plan.limits.num_ranks)]
    most = max(map(len, own))
    if most > count:
        raise EvenloadError(
            "the batch does not fit into the micro-batches of a step",
            f"{plan.num_tokens} tokens on {plan.limits.num_ranks} ranks need {most} micro-batches of "
            f"{plan.limits.max_tokens} tokens, gradient_accumulation_steps is {count}",
            f"raise gradient_accumulation_steps to {most}, or packing.max_tokens",
        )
    return tuple(tuple(m) + (DUMMY,) * (count - len(m)) for m in own)
