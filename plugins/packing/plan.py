"""Which slices of which sequences form each micro-batch of each rank.

A small portfolio, judged by one prediction (`core.predict`):

    whole   no sequence is cut (`whole`); only where none is longer than a micro-batch may be
    long    the longest are cut into as few slices of equal cost as the token cap allows
    even    every micro-batch of the batch costs alike (`dispatch`, `slicing`), costlier sequences in slices

``even`` is taken where its predicted step is at most `EVENNESS_COSTS` longer than the best: equal micro-batches need
less memory at once and leave smaller bubbles, but every further one is a further launch. What is even is the cost of a
micro-batch forward and backward together, as both run the same groups. With ``train.recompute`` a backward replays its
forward anyway, so its groups are free (asymmetric partitioning; SlimPack, arXiv 2509.26246): forward and backward are
then each cut for their own cost. Without, groups of its own would cost the backward one more forward, and the
prediction decides.

512 sequences of Wikipedia up to 256K tokens on 64 ranks: see benchmarks/planner.py for time and evenness. The global
batch is unchanged: only who computes which tokens, and beside which others. A sequence that costs more than a rank's
mean share still bounds the step, since its slices stay on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...core.costs import Costs, PassCost
from ...core.errors import EvenloadError
from ...core.partition import Ints, Load, balance
from ...core.predict import micro_batch_imbalance, pass_seconds, predict
from ...core.registry import Situation
from ...core.workload import Limits, Slice, StepPlan
from .assemble import assemble
from .bound import lower_bound_s
from .config import PackingConfig
from .dispatch import dispatch, slots
from .replay import GIB, DoesNotFitError, fit_memory
from .slicing import Packs, fill
from .whole import whole_packs

EVENNESS_COSTS = 0.005
"""Share of the step that equal micro-batches may cost."""
_MOST_TRIES = 8
"""Numbers of micro-batches tried where the first leaves too much in one of them."""


def plan(bare: StepPlan, situation: Situation, config: PackingConfig) -> StepPlan:
    """The packed plan of the same batch. Raises EvenloadError for what no setting here can plan."""
    lengths = np.array([s.length for s in bare.sequences], dtype=np.int64)
    limits = limits_for(bare, config)
    cuts = config.slices != "off" and not limits.whole_sequences
    if not cuts:
        refuse_longer(lengths, config)
    bound_s = lower_bound_s(lengths, limits, situation.costs)
    ways = _ways(bare, lengths, limits, situation, config, bound_s) if cuts else None
    found: list[_Judged] = []
    problem: DoesNotFitError | None = None
    for candidate in ways or [_whole(bare, lengths, limits, situation.costs, bound_s)]:
        try:
            found.append(_judge(fit_memory(candidate), situation.costs))
        except DoesNotFitError as error:
            problem = error
    if not found:
        assert problem is not None
        raise problem
    least = min(judged.step_s for judged in found)
    good = [judged for judged in found if judged.step_s <= least * (1 + EVENNESS_COSTS)]
    best = min(good, key=lambda judged: round(max(judged.uneven), 3))
    return replace(best.plan, bound_s=bound_s, notes=(*best.plan.notes, *_notes(best, situation.costs)))


class _Judged(NamedTuple):
    plan: StepPlan
    step_s: float
    uneven: tuple[float, float]


def _judge(plan: StepPlan, costs: Costs) -> _Judged:
    passes = pass_seconds(plan, costs)
    return _Judged(plan, predict(plan, costs, passes).step_s, micro_batch_imbalance(plan, costs, passes))


def limits_for(bare: StepPlan, config: PackingConfig) -> Limits:
    """The host's limits with the plugin's caps. Raises EvenloadError for a cap below one block."""
    if config.max_tokens < config.block_tokens and config.slices != "off":
        raise EvenloadError(
            "plugins.packing.max_tokens is smaller than one block",
            f"max_tokens {config.max_tokens}, block_tokens {config.block_tokens}",
            "raise max_tokens, or lower block_tokens",
        )
    cap = config.activation_gib * GIB if config.activation_gib else bare.limits.max_activation_bytes
    return replace(bare.limits, max_tokens=config.max_tokens, max_activation_bytes=cap)


def refuse_longer(lengths: Ints, config: PackingConfig) -> None:
    """Raise EvenloadError for a sequence over the token cap, where none may be cut."""
    if len(lengths) and lengths.max() > config.max_tokens:
        index = int(lengths.argmax())
        raise EvenloadError(
            "a sequence is longer than plugins.packing.max_tokens",
            f"sequence {index} has {lengths[index]} tokens, the cap is {config.max_tokens}",
            "raise max_tokens, let it be cut (plugins.packing.slices=even, where the host can), or lower "
            "data.max_length (longer samples are split, truncated or dropped)",
        )


def _ways(
    bare: StepPlan, lengths: Ints, limits: Limits, situation: Situation, config: PackingConfig, bound_s: float
) -> Iterator[StepPlan]:
    """The portfolio."""
    costs = situation.costs
    fits = not len(lengths) or int(lengths.max()) <= limits.max_tokens
    if fits:
        yield _whole(bare, lengths, limits, costs, bound_s)
    if not len(lengths) or (fits and config.slices == "long"):
        return
    if not fits:
        items = _by_launches(lengths, limits, costs, bound_s)
        yield assemble(bare, limits, _filled(items, None, lengths, _both(costs), limits, config))
    if config.slices == "even":
        for per_rank in _slots_per_rank(lengths, limits, costs):
            yield from _even(bare, lengths, limits, costs, config, per_rank)


def _whole(bare: StepPlan, lengths: Ints, limits: Limits, costs: Costs, bound_s: float) -> StepPlan:
    sizes = lengths.tolist()
    packs = whole_packs(lengths, limits, costs, bound_s)
    return assemble(bare, limits, [[[Slice(i, 0, sizes[i]) for i in b] for b in mine] for mine in packs])


def _by_launches(lengths: Ints, limits: Limits, costs: Costs, bound_s: float) -> list[list[int]]:
    """Sequences of each rank, balanced with the launches that their tokens need."""
    load = Load(costs.launch_s, limits.max_tokens)
    ranks = balance(costs.sequence_s(lengths), lengths, limits.num_ranks, load, target=bound_s)
    items: list[list[int]] = [[] for _ in range(limits.num_ranks)]
    for item, rank in enumerate(ranks.tolist()):
        items[rank].append(item)
    return items


def _slots_per_rank(lengths: Ints, limits: Limits, costs: Costs) -> list[int]:
    """How many micro-batches an ordinary rank may have: as many as hold short sequences for its share of the cost, or
    more where a pipeline gains by them."""
    cost_s = costs.sequence_s(lengths)
    own = cost_s > cost_s.sum() / limits.num_ranks
    # Outliers have ranks of their own; the mean is that of the others.
    mean_s = float(cost_s[~own].sum()) / max(1, limits.num_ranks - int(own.sum()))
    token_s = costs.forward.token_s + costs.backward.token_s
    fewest = max(1, -(-int(lengths.sum()) // (limits.max_tokens * limits.num_ranks)))
    if token_s:
        fewest = max(fewest, min(2 * fewest, int(np.ceil(mean_s / (token_s * limits.max_tokens)))))
    if limits.num_stages == 1:
        return [fewest]

    def step_s(count: int) -> float:
        return (count + limits.num_stages - 1) * (mean_s / count + costs.launch_s)

    tried = sorted({max(fewest, round(fewest * factor)) for factor in (1, 1.5, 2, 3, 4, 6, 8, 12, 16)}, key=step_s)
    return tried[:2]


def _even(
    bare: StepPlan, lengths: Ints, limits: Limits, costs: Costs, config: PackingConfig, per_rank: int
) -> Iterator[StepPlan]:
    """Equal micro-batches, more of them until none is over the cap.

    Groups of its own cost the backward one more forward, unless it runs one anyway; a replay holds all activations of
    its micro-batch at once, so under a memory cap both forms are offered.
    """
    forms: list[tuple[PassCost, ...]] = [(_both(costs),)]
    if config.asymmetric and costs.recompute:
        forms = [(costs.forward, costs.backward), *(forms if limits.max_activation_bytes < float("inf") else [])]
    for prices in forms:
        for more in range(_MOST_TRIES):
            plan, fits = _in_slots(bare, lengths, limits, config, prices, per_rank + more)
            if fits:
                break
        yield plan


def _in_slots(
    bare: StepPlan, lengths: Ints, limits: Limits, config: PackingConfig, prices: tuple[PassCost, ...], per_rank: int
) -> tuple[StepPlan, bool]:
    """A plan of equal micro-batches, and whether ordinary ranks got along with ``per_rank`` of them.

    One price groups both directions alike; two are those of the forward and the backward, each with its own groups.
    """
    order = np.argsort(-lengths, kind="stable")
    weights = np.array([price.seconds(lengths[order] * 1.0) for price in prices])
    ways = slots(weights, limits.num_ranks, per_rank)
    items = [order[mine].tolist() for mine in dispatch(weights, ways, config.polish_nodes)]
    fits, grouped = True, []
    for way, price in zip(ways, prices, strict=True):
        wanted = [max(way.counts)] * limits.num_ranks if limits.equal_counts else way.counts
        packs = _filled(items, wanted, lengths, price, limits, config)
        fits = fits and all(len(mine) <= count for mine, count in zip(packs, wanted, strict=True))
        grouped.append(packs)
    if len(grouped) == 1:
        return assemble(bare, limits, grouped[0]), fits
    forward, backward = grouped
    return assemble(bare, limits, forward, [mine[::-1] for mine in backward], made_by="packing (asymmetric)"), fits


def _filled(
    items: list[list[int]],
    counts: list[int] | None,
    lengths: Ints,
    price: PassCost,
    limits: Limits,
    config: PackingConfig,
) -> list[Packs]:
    """Micro-batches of every rank, as few as the token cap allows, or ``counts`` equal ones (more where it demands)."""
    cap, block, even = limits.max_tokens, config.block_tokens, counts is not None
    out = []
    for rank, mine in enumerate(items):
        count = max(counts[rank] if counts else 1, -(-int(lengths[mine].sum()) // cap), 1)
        packs = fill(mine, lengths, price, count, cap, block, even=even) if mine else []
        while packs is None:
            count += 1
            packs = fill(mine, lengths, price, count, cap, block, even=even)
        out.append(packs)
    return out


def _both(costs: Costs) -> PassCost:
    """Forward and backward together, as one price."""
    f, b = costs.forward, costs.backward
    return PassCost(launch_s=f.launch_s + b.launch_s, token_s=f.token_s + b.token_s, pair_s=f.pair_s + b.pair_s)


def _notes(best: _Judged, costs: Costs) -> list[str]:
    forward, backward = best.uneven
    notes = [f"micro-batches, costliest over mean: forward {forward:.3f}, backward {backward:.3f}"]
    if best.plan.backward:
        notes.append("asymmetric: the backward pass groups slices anew" + (" at no cost" if costs.recompute else ""))
    elif best.plan.replayed:
        notes.append(
            f"{len(best.plan.replayed)} of {len(best.plan.micro_batches)} micro-batches are replayed to save memory"
        )
    return notes
