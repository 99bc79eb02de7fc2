"""A certified lower bound on the passes of a step: no lawful plan of the settings ends its last pass sooner.

Every stage has all of the work, so each term holds for any plan, whoever made it, and the largest stage counts:

    compute     linear work and pairs of all tokens, over all ranks; replays, padding and dummies only add to it
    head        all tokens go through the output layer, which the last stage has alone
    traffic     tensor parallelism and experts' all-to-all move each token in each pass, and nothing hides them
    launches    none holds more than its cap of tokens; j busy ranks of N have no less to do than N of them would,
                (W + j L) / j >= (W + N L) / N, so N launches are no loss. Latencies of tensor parallelism are in a
                launch, and so are weights that are gathered for it (ZeRO 3)
    way in      the first pass of stage s follows s forwards, each a launch at the least, and s hops
    way out     likewise after its last backward; nothing where weight gradients may fill that time
    ramp        few micro-batches are long, and stages wait for the first of them and for what one takes through all
                stages and back; many take as many launches (`_ramp_s`)
    memory      all forwards of a sequence come before its first backward, so what its rank cannot keep by then runs
                again, or has layers that do. A last stage need not run a replay's first forward but for keys and
                values, and not at all for the slice that runs backward first, which is then held whole
    longest     where ranks share no sequence, one has all of the costliest, of its parts at experts an ep-th
    beside      what sequences take less than their tokens do (`Costs.beside`) is taken off; what they take more, not on

Where the recipe recomputes, a backward holds a forward, so replays are free, and the last stage may skip forwards but
for keys and values: those of all tokens but the most that one slice can hold. Devices of two stages have the work of
both, the way of their earlier one, and no ramp; replays free all their forwards. Where plans say themselves what is
recomputed (``orders``), costs are those of none. Only recomputing settings offer backwards in groups of their own: no
ramp counts there, nor where ranks share experts, which nothing is held for here either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..aliases import Floats, Ints
from ..costs.context import Direction, PlanningContext
from ..costs.costs import PassCost, Work
from ..costs.exposed import exposed_s, gathering_s
from ..plan.limits import Limits
from ..plan.step_plan import MicroBatch, Slice

_PROBE = 1 << 20
"""Tokens of a micro-batch that says what another one moves: traffic grows by as much with every token."""
_COUNTS = np.arange(1, 97)
"""Micro-batches of a rank for which a ramp is asked; more of them launch at least as often as one more than these."""
_IDLES = 1.07 ** np.arange(64)
"""Idle seconds for which it is, over the least of them."""
_LINEAR, _ALL = ("launch_s", "linear_s"), ("launch_s", "linear_s", "pair_s")
_STAGES = "_stage_costs"
"""Under which a context keeps them."""


class StageCost(NamedTuple):
    """What a stage takes, traffic that nothing hides among the seconds of a token and of a launch."""

    forward: PassCost
    backward: PassCost
    in_s: float
    """Least seconds before its first pass."""
    out_s: float
    """Least seconds after its last backward."""

    @property
    def both(self) -> PassCost:
        return self.forward.plus(self.backward)


def passes_bound_s(
    lengths: Ints,
    limits: Limits,
    context: PlanningContext,
    *,
    shares: bool = False,
    orders: bool = False,
    room_bytes: float = np.inf,
) -> float:
    """No plan of these sequences has run its last pass before [s]. lengths int [K] in tokens.

    Args:
        shares: ranks may share a sequence.
        orders: plans say themselves what is recomputed.
        room_bytes: the most that passes hold on a rank; plans that hold more may take less.
    """
    if not len(lengths):
        return 0.0
    if orders and context.costs.recompute:
        context = context.without_recomputation
    stages = stage_costs(context)
    # Equal stages between first and last have equal costs, and the last of them the longest way.
    numbers = range(len(stages)) if context.layout.layers else sorted({0, max(0, len(stages) - 2), len(stages) - 1})
    return max(_of_stage(stages[: number + 1], lengths, limits, context, shares, room_bytes) for number in numbers)


def stage_costs(context: PlanningContext) -> list[StageCost]:
    """The costs of every stage, or of every device of two stages, worked out once for a context."""
    known: dict[str, list[StageCost]] = vars(context)
    if _STAGES not in known:
        known[_STAGES] = list(_stages(context))
    return known[_STAGES]


def _stages(context: PlanningContext) -> Iterator[StageCost]:
    layout, hop_s = context.layout, _hop(context).launch_s
    in_s = out_s = 0.0
    for stage in range(layout.pp):
        forward, backward = (_pass_cost(context, stage, passes) for passes in (1, 2))
        if layout.v_shape:
            later = [_pass_cost(context, layout.num_stages - 1 - stage, passes) for passes in (1, 2)]
            yield StageCost(forward.plus(later[0]), backward.plus(later[1]), in_s, out_s)
        else:
            yield StageCost(forward, backward, in_s, out_s)
        in_s += forward.launch_s + hop_s
        out_s += 0.0 if context.forward_only else backward.launch_s + hop_s


def _pass_cost(context: PlanningContext, stage: int, passes: int) -> PassCost:
    """Compute of a stage in a direction, its part of the head, and traffic that is in every pass."""
    more = context.beyond(stage, context.layout.num_stages)
    context = context.at(stage)
    costs = context.costs
    cost = costs.forward if passes == 1 else costs.backward
    again = [Direction(costs.forward, 1, stage)] if passes > 1 and costs.recompute else []
    few, many = (
        sum(_moved_s(context, direction, tokens) for direction in (Direction(cost, passes, stage), *again))
        for tokens in (1, 1 + _PROBE)
    )
    token_s = (many - few) / _PROBE
    return cost.model_copy(
        update={
            "token_s": cost.token_s * (1.0 + more) + token_s,
            "launch_s": cost.launch_s + max(0.0, few - token_s) + gathering_s(context, passes),
        }
    )


def _moved_s(context: PlanningContext, direction: Direction, tokens: int) -> float:
    """Tensor and expert parallelism of a micro-batch of one rank, the one of the best links."""
    layout, node = context.layout, context.cluster.ranks_per_node
    group = layout.tp * layout.ep
    alike = node % group == 0 or group % node == 0
    at = replace(context, traffic=replace(context.traffic, expert_weight_bytes=0.0))
    slices = (Slice(0, 0, tokens),)
    leads = (0,) if alike else range(layout.dp_cp_size)
    return min(exposed_s(at, direction, MicroBatch(slices, (lead,))) for lead in leads)


def _hop(context: PlanningContext) -> PassCost:
    """Least seconds of a hand-over between neighbouring stages, and of a token in it."""
    cluster, layout, traffic = context.cluster, context.layout, context.traffic
    state_bytes = traffic.state_bytes_per_token * traffic.handed_frac
    apart = layout.dp_cp_size * layout.tp >= cluster.ranks_per_node
    links = [cluster.inter] if apart else [cluster.intra, cluster.inter]
    token_s = min(state_bytes / link.bytes_per_s for link in links)
    return PassCost(launch_s=min(link.latency_s for link in links), token_s=token_s)


def _of_stage(
    stages: list[StageCost], lengths: Ints, limits: Limits, context: PlanningContext, shares: bool, room_bytes: float
) -> float:
    """No plan has run all passes before, by what the last of these stages has to do [s]."""
    own, ranks, cap = stages[-1], limits.num_ranks, limits.max_tokens
    at, costs = context.at(len(stages) - 1), context.costs
    has_last = len(stages) == context.layout.pp or limits.v_shape
    skips = costs.recompute and has_last and not limits.whole_sequences
    both = own.backward if skips else own.both
    way_s = own.in_s + (0.0 if limits.splits_backward else own.out_s)
    n, total = lengths.astype(np.float64), int(lengths.sum())
    more = np.zeros(len(n)) if shares else _again_s(n, limits.at(len(stages) - 1), at, room_bytes, skips=skips)
    less = np.minimum(0.0, at.costs.beside_s(len(n)))
    more = more + less
    pairs = 0.5 * float(n @ n)
    mean_s = (
        both.linear_s * total + both.pair_s * pairs + float(more.sum()) + max(ranks, -(-total // cap)) * both.launch_s
    ) / ranks
    # The rank of most tokens has at least the mean number, and their launches.
    most_s = both.linear_s * total / ranks + -(-total // (ranks * cap)) * both.launch_s
    seconds = max(mean_s, most_s) + way_s
    if not shares:
        alone = both.at_experts(1.0 / costs.ep).seconds(n) + more + -(-lengths // cap) * both.launch_s
        seconds = max(seconds, float(alone.max()) + way_s)
    ramps = len(stages) == context.layout.pp > 1 and not limits.v_shape and not less.any()
    if ramps and not costs.recompute and limits.in_step == 1:
        work, largest = Work(0, total / ranks, pairs / ranks), (min(total, cap), int(lengths.max()))
        seconds = max(seconds, _ramp_s(stages, context, work, largest, splits=limits.splits_backward))
    return seconds


def _again_s(n: Floats, limits: Limits, context: PlanningContext, room_bytes: float, *, skips: bool) -> Floats:
    """Least seconds in which layers of each sequence run forward beyond once, or beyond a backward that holds a forward
    where the stage skips forwards, float64 [K]."""
    costs, memory, none = context.costs, limits.memory, np.zeros(len(n))
    layers = costs.forward.model_copy(update={"token_s": costs.forward.token_s * (1.0 - context.head_frac)})
    if skips:
        return np.asarray(layers.at_experts(1.0 / costs.ep).seconds(np.maximum(0.0, n - limits.max_tokens)))
    whole = memory.activation_bytes_per_token
    cut = whole - memory.cut_saves_bytes_per_token
    if costs.recompute or memory.replay_bytes_per_token or limits.in_step > 1 or cut <= 0 or np.isinf(room_bytes):
        return none
    room_bytes -= memory.pass_bytes
    tokens = np.maximum(0.0, room_bytes - memory.kv_bytes_per_token * n) / cut
    tokens = np.where(n <= limits.max_tokens, np.maximum(tokens, room_bytes / whole), tokens)
    # Of all tokens the first are those that run again soonest.
    return np.asarray(layers.seconds(np.maximum(0.0, n - tokens)))


def _ramp_s(
    stages: list[StageCost], context: PlanningContext, work: Work, largest: tuple[int, int], *, splits: bool
) -> float:
    """Least seconds of a rank with mean work at the last of these stages, over all numbers of micro-batches.

    Let the stage be the one after s others, x_k what the k-th of K micro-batches takes forward at the least of these,
    b_k what its backward takes there without weight gradients, h_k each hand-over, w_k what it takes at the stage, g_k
    of it for weight gradients, G those of all, I what the rank idles. Links keep their order, so a forward starts at
    the stage no sooner than after x_1 + ... + x_k + (s - 1) x_k + s h_k, and until then the stage has done no more than
    w_1 + ... + w_(k-1). After the end of a backward at the stage the same holds in the order of backwards from the
    last one, and the stage has no more to do than G and the w_i - g_i after it:

        s (x_k + h_k) <= I + (w - x) of those before       s (b_k + h_k) <= I + G + (w - g - b) of those after

    With w + h <= r (x + h) these grow no faster than (1 + (r - 1) / s)^k, so of both orders, each from its end, the
    k-th largest is under the k-th of both rows. Nothing is done twice: of another micro-batch i the time before this
    forward and that after this backward together hold no more than w_i, and where they hold any of it but g_i, stages
    before have x_i to do in the one, b_i in the other, or both. So for each of them

        s (x_k + b_k + 2 h_k) <= I + g_k + (w_i - min(x_i, b_i)) of all others

    which caps it by K. All x + h must sum up to those of the rank. What runs again counts as idle, and so may what
    pairs take beyond r x, so that r need not be theirs: some rank has the mean work without it, or more. I is cut into
    steps of 7 %, and the least of each is taken with the fewest micro-batches of its most.

    Args:
        work: tokens and pairs of a mean rank.
        largest: tokens of a micro-batch on a rank, and those that each of them attends to, at most.
    """
    own, before, depth = stages[-1], stages[:-1], len(stages) - 1
    *each_s, apart_s = _apart_s(context, len(stages), splits=splits)
    ahead, left = _least([one.forward for one in before]), _without(own.both, apart_s)
    behind = _least([_without(one.backward, s) for one, s in zip(before, each_s, strict=True)])
    hop, out_s = _hop(context), 0.0 if splits else own.out_s
    back = PassCost(token_s=0.0) if context.forward_only else hop
    sooner = _least([ahead, behind])
    ahead, behind, others = ahead.plus(hop), behind.plus(back), _beyond(own.both, sooner)
    # Of one micro-batch both ways, and what the others can fill of them.
    there_and_back = ahead.plus(behind).scaled(depth, depth).plus(_beyond(left, sooner))
    filled_s = others.linear_s * work.tokens + others.pair_s * work.pairs + _COUNTS * others.launch_s
    largest_s = ahead.launch_s + float(ahead.seconds(*largest))
    best = 0.0
    for names in (_LINEAR, _ALL):
        ratio = _ratio(own.both.plus(hop), ahead, names)
        if np.isinf(ratio):
            continue
        pair_s = min(own.both.pair_s, ratio * ahead.pair_s)
        work_s = own.both.linear_s * work.tokens + pair_s * work.pairs
        idle = max(own.in_s + out_s, 1e-6 * work_s) * _IDLES
        deferred_s = work_s * apart_s / own.both.linear_s if apart_s else 0.0
        forwards = _row((idle - out_s) / depth, ratio, depth)
        most = np.minimum(forwards, largest_s)
        if np.isfinite(growth := _ratio(left.plus(back), behind)):
            most = np.minimum(most, _ratio(ahead, behind) * _row((idle - own.in_s + deferred_s) / depth, growth, depth))
        cap = _ratio(ahead, there_and_back) * np.maximum(0.0, idle[:, None] + filled_s)
        grown_s = work_s + hop.token_s * work.tokens
        enough = _sums(most, cap) >= grown_s / ratio + _COUNTS * ahead.launch_s
        fewest = np.where(enough.any(axis=1), enough.argmax(axis=1) + 1, len(_COUNTS) + 1)
        best = max(best, work_s + float((idle + np.append(fewest[1:], 1) * own.both.launch_s).min()))
    return best


def _row(first: Floats, ratio: float, depth: int) -> Floats:
    """What the k-th micro-batch takes at most, float64 [idle seconds, counts]."""
    growth = np.minimum(700.0, np.arange(len(_COUNTS)) * np.log1p(max(0.0, ratio - 1.0) / depth))
    return np.asarray(np.maximum(0.0, first)[:, None] * np.exp(growth))


def _sums(most: Floats, cap: Floats) -> Floats:
    """Sums of the first K of ascending rows, each at most what ``cap`` has for K, float64 [idle seconds, counts]."""
    sums = np.concatenate([np.zeros((len(most), 1)), np.cumsum(most, axis=1)], axis=1)
    below = np.array([np.searchsorted(row, own) for row, own in zip(most, cap, strict=True)])
    below = np.minimum(below, _COUNTS)
    return np.asarray(np.take_along_axis(sums, below, axis=1) + (_COUNTS - below) * cap)


def _beyond(cost: PassCost, less: PassCost) -> PassCost:
    """What a cost has of each coefficient beyond another, not below none."""
    return PassCost(**{name: max(0.0, value - getattr(less, name)) for name, value in cost.model_dump().items()})


def _apart_s(context: PlanningContext, count: int, *, splits: bool) -> list[float]:
    """Seconds of a token's weight gradients at the first stages, where they are a pass of their own."""
    return [context.at(n).costs.weights_s(1.0, context.head_frac) if splits else 0.0 for n in range(count)]


def _without(cost: PassCost, apart_s: float) -> PassCost:
    """What a cost has without so many seconds of a token."""
    return cost.model_copy(update={"token_s": max(0.0, cost.token_s - apart_s)})


def _least(costs: list[PassCost]) -> PassCost:
    """The least of each coefficient."""
    rows = [cost.model_dump() for cost in costs]
    return PassCost(**{name: min(row[name] for row in rows) for name in rows[0]})


def _ratio(over: PassCost, under: PassCost, names: tuple[str, ...] = _ALL) -> float:
    """Most seconds of one cost for a second of the other, infinite where that has none of them."""
    pairs = [(getattr(over, name), getattr(under, name)) for name in names]
    return max((a / b if b else np.inf for a, b in pairs if a > 0), default=1.0)
