"""The units of one optimizer step: which of TRL's Trainers have any, and those of all ranks as one global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from torch import Tensor

from ....core.errors import EvenloadError
from ....core.plan.step_plan import StepPlan
from ....core.plan.token_layout import ranks_of_samples
from ....core.planning.trees import Branch
from ....runtime.world.agreement import everyone, rank_and_size
from ....runtime.world.exchange import exchange_bytes
from ...huggingface.refusals import raise_together
from ...huggingface.units import Unit, UnitForm, split_units
from ...unmodified.planned_loop import GlobalBatch
from ..proof import STOCK

_TOKEN_LOSSES = "trl.trainer.sft_trainer"
_ROWS = {
    "trl.trainer.dpo_trainer": 2,
    "trl.trainer.reward_trainer": 2,
    "trl.trainer.kto_trainer": 1,
    "trl.trainer.grpo_trainer": 1,
    "trl.trainer.rloo_trainer": 1,
}
"""Rows of a unit, by the module of TRL's Trainer."""
_SORTED = ("aot", "aot_unpaired")
"""Losses that pair the answers of a micro-batch anew, by rank: where the policy is the reference none shows it."""


def unit_rows(trainer: Any) -> int | EvenloadError | None:
    """Rows of a unit of one of TRL's Trainers, or why its rows stay where they are; None where it has no units and its
    loss is one of tokens."""
    of_trl = [cls.__module__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]
    if not of_trl or of_trl[0] == _TOKEN_LOSSES:
        return None
    name, why = type(trainer).__name__, _why_not(trainer, of_trl[0])
    if why is not None:
        return EvenloadError(f"rows of a {name} stay where they are", why, STOCK)
    return _ROWS[of_trl[0]]


def _why_not(trainer: Any, module: str) -> str | None:
    """What a loss goes by that its value where training begins does not show."""
    if module not in _ROWS:
        return f"evenload does not know the batches of {module}"
    if getattr(trainer, "calculate_KL", False):
        return "its loss goes by a KL term that is the mean of the micro-batch"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile ranks the tokens of a micro-batch of all ranks"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "its entropy bonus is the mean over a micro-batch's tokens"
    ranked = [kind for kind in _SORTED if kind in getattr(trainer, "loss_types", ())]
    return f"loss_type {ranked[0]} sorts the answers of a micro-batch" if ranked else None


class ReadUnits(NamedTuple):
    """One batch as it comes to a step, cut into units: what is written to its tensors later changes nothing."""

    units: Sequence[Unit]
    form: UnitForm | None
    error: EvenloadError | None
    """Why it cannot be cut, for all ranks to know together."""


def read_units(batch: Mapping[str, Any], num_rows: int, config: Any) -> ReadUnits:
    """Cut one batch of a loop for a model of this config."""
    here = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in batch.items()}
    fill = getattr(config, "pad_token_id", None)
    try:
        return ReadUnits(*split_units(here, num_rows, fill if isinstance(fill, int) and fill >= 0 else 0), None)
    except EvenloadError as error:
        return ReadUnits((), None, error)


@dataclass(frozen=True, eq=False)
class UnitBatch:
    """The units of one optimizer step."""

    samples: GlobalBatch[Tensor]
    """As they go to other ranks, uint8 each, and as long as their longest row, or as all their rows in packs."""
    branches: tuple[Branch, ...]
    """What each computes where rows share what they begin with; empty: they do not."""
    sizes: tuple[int, ...]
    """Of each [bytes]."""
    form: UnitForm
    divisor: int | None
    """Units of every micro-batch of a stock run, which takes their mean; None: these differ."""
    is_one_step: bool
    """What belongs to the step is the same in all batches."""
    hooked: bool
    """Gradients of parameters go through hooks on some rank."""

    @property
    def shares(self) -> bool:
        """Whether rows begin with anything in common."""
        trees = [one.tree for one in self.branches if one.tree is not None]
        inside = any(one.tokens < length for one, length in zip(self.branches, self.samples.lengths, strict=False))
        return inside or len(set(trees)) < len(trees)

    def exchange(self, plan: StepPlan) -> dict[int, Unit]:
        """The units that this rank computes. Collective."""
        parts = exchange_bytes(self.samples.own, self.samples.source, ranks_of_samples(plan), self.sizes)
        return {i: Unit.of_bytes(part.cpu()) for i, part in parts.items()}


class _Brought(NamedTuple):
    """What a rank tells the others of its batches."""

    errors: list[EvenloadError]
    lengths: list[list[int]]
    branches: list[list[Branch]]
    sizes: list[list[int]]
    forms: list[UnitForm]
    of_step: set[tuple[tuple[str, float], ...]]
    hooked: bool


def gather_units(batches: Sequence[ReadUnits], *, packs: bool, trees: bool = False, hooked: bool) -> UnitBatch:
    """The units of all ranks. Collective. Raises EvenloadError, the same on all ranks, where the batches of one cannot
    be cut into units, or pad on another side than those of another.

    Args:
        batches: of this rank in the step.
        packs: micro-batches are computed without padding.
        trees: and what rows begin with in common once.
        hooked: hooks of this rank may change gradients.
    """
    whole = sum if packs else max
    own = [[unit.to_bytes() for unit in one.units] for one in batches]
    brought = _Brought(
        [one.error for one in batches if one.error is not None],
        [[whole(unit.lengths) for unit in one.units] for one in batches],
        [[unit.branch for unit in one.units] if trees else [] for one in batches],
        [[len(content) for content in of_batch] for of_batch in own],
        [one.form for one in batches if one.form is not None],
        {
            tuple(sorted((key, float(unit.values[key])) for key in one.form.of_step))
            for one in batches
            if one.form is not None
            for unit in one.units[:1]
        },
        hooked,
    )
    of_ranks = everyone(brought)
    raise_together(error for one in of_ranks for error in one.errors)
    samples = GlobalBatch.of([one.lengths for one in of_ranks], own, rank_and_size()[0])
    sizes = tuple(of_ranks[rank].sizes[k][row] for rank, k, row in samples.places)
    branches = tuple(of_ranks[rank].branches[k][row] for rank, k, row in samples.places) if trees else ()
    counts = {len(units) for one in of_ranks for units in one.lengths}
    forms = [form for one in of_ranks for form in one.forms]
    form = reduce(UnitForm.merged, forms)
    divisor = counts.pop() if len(counts) == 1 else None
    steps = {values for one in of_ranks for values in one.of_step}
    return UnitBatch(samples, branches, sizes, form, divisor, len(steps) == 1, any(one.hooked for one in of_ranks))
