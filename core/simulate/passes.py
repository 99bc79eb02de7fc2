"""What every pass of a plan takes at every stage: compute, a forward that runs again, and what no compute hides.

Costs are those of a stage by its number of layers, experts among them; the last one has the output layer, which the
others have not. What runs is what the program says (`plan.program`): a forward that nobody keeps has no head, and at
the last stage often no slice. Ranks of a micro-batch have equal work unless its slices have CP groups of their own or
its tokens are moved: then each has its own seconds, and the pass takes as long as the slowest. Where ranks share
experts, each pass has the seconds of its round at them on top of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from ..aliases import Floats
from ..costs.context import Direction, PlanningContext
from ..costs.costs import Costs, is_even, rank_works
from ..costs.exposed import exposed_of_ranks, exposed_s, gathering_s, links_up, offload_s
from ..costs.memory import offloaded_bytes
from ..costs.offload import KEPT_LAYERS
from ..costs.rounds import rounds_of
from ..machine.layout import share_of
from ..plan.order import DIRECTIONS
from ..plan.program import forwards_that_run
from ..plan.step_plan import MicroBatch, Op, PassKind, StepPlan
from ..plan.token_layout import token_counts, tokens_of_ranks
from .predict import (
    beside_shared_experts,
    busy_seconds,
    expert_seconds,
    kv_seconds,
    layers_again,
    own_costs,
    pass_seconds,
    rank_seconds,
)

Part = Literal["R", "F", "B", "W", "C"]
_Seconds = dict[PassKind, list[float]]


class _Unlike(NamedTuple):
    """Seconds of the ranks of a micro-batch, float64 [ranks] in their order."""

    again: Floats
    """Of the forward inside a backward."""
    compute: Floats
    """All of it."""
    exposed: Floats
    places: dict[int, int]
    """Of its ranks, in these arrays."""


class HandOvers:
    """Seconds from a pass to the arrival of its result at the next stage, in either direction."""

    def __init__(self, plan: StepPlan, context: PlanningContext) -> None:
        self._plan, self._at = plan, context
        self._links = [links_up(context, stage) for stage in range(plan.limits.num_stages - 1)]
        self._first_alike = [self._links.index(links) for links in self._links]
        self._known: dict[tuple[int, Op], float] = {}

    def alike(self, stage: int) -> int:
        """The first stage that hands over as fast as this one."""
        return self._first_alike[stage]

    def __call__(self, stage: int, op: Op) -> float:
        """Between ``stage`` and the next; no time inside a device."""
        device_of = self._plan.limits.device_of_stage
        if (op.kind == "B" and self._at.forward_only) or device_of(stage) == device_of(stage + 1):
            return 0.0
        key = self._first_alike[stage], op
        if key not in self._known:
            micro_batch, links = self._plan.passes(op.kind)[op.micro_batch], self._links[stage]
            state_bytes = self._at.traffic.state_bytes_per_token * self._at.traffic.handed_frac
            alike = dict.fromkeys(micro_batch.ranks, _tokens_each(self._plan, op))
            each: Mapping[int, float] = alike if is_even(micro_batch) else tokens_of_ranks(micro_batch)
            self._known[key] = max(links[rank].send_s(n * state_bytes) for rank, n in each.items())
        return self._known[key]


class PassTimes:
    """Seconds of every pass of a plan at every stage."""

    def __init__(self, plan: StepPlan, context: PlanningContext) -> None:
        self._plan, self._at = plan, context
        stages, full = range(plan.limits.num_stages), own_costs(plan, context.costs)
        self._expert_s = expert_seconds(plan, full)
        alike = {id(own): beside_shared_experts(own_costs(plan, own.costs)) for own in map(context.at, stages)}
        self._costs = [alike[id(context.at(stage))] for stage in stages]
        self._heads = [context.beyond(stage, plan.limits.num_stages) for stage in stages]
        self._layers_again = [layers_again(plan, stage) for stage in stages]
        self._replayed = frozenset() if full.recompute else frozenset(plan.replayed)
        self._kv = kv_seconds(plan, self._costs[-1], context.head_frac)
        self._of_ranks = self._seconds_of_ranks()
        self.compute = self._seconds_of_stages()
        """By stage, direction and micro-batch, on its busiest ranks."""
        self._last, self._at_last = plan.limits.num_stages - 1, forwards_that_run(plan, True)
        backwards = range(len(plan.passes("B")))
        self._whole_again = frozenset(backwards if full.recompute else plan.replayed)
        self._expert_again_s = full.forward.expert_s * full.expert_imbalance
        self._add_experts()
        most = [np.max(_tokens_of(m)) for m in plan.passes("B")] if any(plan.split) else []
        weights_s = {id(own): [float(own.weights_s(n, context.head_frac)) for n in most] for own in alike.values()}
        self._weights_s = [weights_s[id(costs)] for costs in self._costs]
        """Of each backward's weight gradients on its busiest rank; empty where none is a pass of its own."""
        layout, traffic = context.layout, context.traffic
        self._routes = layout.ep > 1 and traffic.expert_bytes_per_token > 0
        self._moves = layout.tp > 1 or plan.shared or self._routes or any(plan.offload)
        self._gathers = {k: gathering_s(context, n) for k, n in (("F", 1), ("B", 2))}
        self.talks = self._moves or self._gathers["F"] > 0
        """Whether passes hold communication at all."""
        self.hand_over = HandOvers(plan, context)
        self._alike = _stages_alike(plan, context)
        self._known: dict[tuple[int, Op, float], Any] = {}
        self._unlike: dict[tuple[int, Op], _Unlike] = {}

    def _seconds_of_ranks(self) -> dict[Op, list[Floats]]:
        plan = self._plan
        result: dict[Op, list[Floats]] = {}
        for costs, stages in _neighbours(self._costs):
            for op, mean in rank_seconds(plan, costs).items():
                kind, number = op
                micro_batch = plan.passes(kind)[number]
                linear_s = {"F": costs.forward, "B": costs.backward}[kind].token_s * token_counts(micro_batch)
                if kind == "B" and number in self._replayed:
                    linear_s = linear_s + costs.forward.token_s * token_counts(micro_batch)
                rows = [mean + self._heads[n] * linear_s if self._heads[n] else mean for n in stages]
                for place, stage in enumerate(stages) if kind == "B" else ():
                    if number in (again := self._layers_again[stage]):
                        rows[place] = rows[place] + again[number] * _layers_of(micro_batch, self._at, costs)
                result.setdefault(op, []).extend(rows)
        for number, seconds in self._kv.items():
            if (op := Op("F", number)) in result:
                result[op][-1] = seconds
        return result

    def _seconds_of_stages(self) -> list[_Seconds]:
        plan, result = self._plan, list[_Seconds]()
        for costs, stages in _neighbours(self._costs):
            mean = dict(zip(DIRECTIONS, pass_seconds(plan, costs), strict=True))
            heads = [self._heads[stage] for stage in stages]
            by_share = {more: _with_head(plan, mean, more, costs, self._replayed) for more in set(heads)}
            result += [by_share[more] for more in heads]
        if not (self._of_ranks or plan.recompute or self._kv):
            return result
        result = [{kind: list(row) for kind, row in of_stage.items()} for of_stage in result]
        for i, seconds_of_ranks in self._kv.items():
            result[-1]["F"][i] = float(seconds_of_ranks.max())
        for costs, stages in _neighbours(self._costs):
            layers_s: dict[int, float] = {}
            for stage in stages:
                for j, share in self._layers_again[stage].items():
                    if j not in layers_s:
                        layers_s[j] = costs.layers_s(plan.passes("B")[j], self._at.head_frac)
                    result[stage]["B"][j] += share * layers_s[j]
        for (kind, number), rows in self._of_ranks.items():
            for seconds, row in zip(result, rows, strict=True):
                seconds[kind][number] = float(row.max())
        return result

    def _add_experts(self) -> None:
        """What the rounds of shared experts take, onto what passes take by themselves."""
        for stage, expert_s in enumerate(self._expert_s if any(self._expert_s) else ()):
            # Stages may have their numbers in common.
            self.compute[stage] = {kind: list(row) for kind, row in self.compute[stage].items()}
            for op, seconds in expert_s.items():
                self.compute[stage][op.kind][op.micro_batch] += seconds
                if op in self._of_ranks:
                    self._of_ranks[op][stage] = self._of_ranks[op][stage] + seconds

    def seconds(self, stage: int, op: Op) -> float:
        """Compute and exposed communication of a pass, on the rank for which they are most."""
        if op in self._of_ranks:
            unlike = self._unlike_of(stage, op)
            return float((unlike.compute + unlike.exposed).max()) - self._later_s(stage, op)
        compute_s = self._computing_s(stage, op)
        return compute_s + self._even_s(stage, op) if self.talks and op.kind != "W" else compute_s

    def _computing_s(self, stage: int, op: Op) -> float:
        """Compute of a pass whose ranks have equal work; a W takes from its backward what it does later."""
        if op.kind == "W":
            return self._weights_s[stage][op.micro_batch]
        return self.compute[stage][op.kind][op.micro_batch] - self._later_s(stage, op)

    def _later_s(self, stage: int, op: Op) -> float:
        """What a backward leaves to a pass of its own."""
        split = op.kind == "B" and self._plan.split and op.micro_batch in self._plan.split[stage]
        return self._weights_s[stage][op.micro_batch] if split else 0.0

    def _again_s(self, stage: int, op: Op) -> Any:
        """Forward that runs again inside a pass: a number where its ranks have equal work, else float64 [ranks]."""
        if op.kind != "B":
            return 0.0
        costs, micro_batch = self._costs[stage], self._plan.passes("B")[op.micro_batch]
        share, again_s = self._layers_again[stage].get(op.micro_batch, 0.0), 0.0
        if op in self._expert_s[stage]:
            own = share_of(self._at.layout.layers, stage)
            forwards = (op.micro_batch in self._whole_again) + share
            again_s = own * forwards * self._expert_again_s * rounds_of(self._plan, stage, costs.ep)[op].mean
        if op.micro_batch in self._whole_again:
            forward_s = costs.micro_batch_s(micro_batch) if is_even(micro_batch) else costs.rank_s(micro_batch)
            again_s = again_s + forward_s[0] + self._heads[stage] * costs.forward.token_s * _tokens_of(micro_batch)
        return again_s + share * _layers_of(micro_batch, self._at, costs) if share else again_s

    def _routed(self, stage: int, op: Op) -> float | None:
        """Tokens of the rank of the pass's round that sends or receives most; None where experts are nobody's."""
        if not self._routes:
            return None
        brought = rounds_of(self._plan, stage, self._at.layout.ep)[op]
        return max(brought.most, self._at.costs.expert_imbalance * brought.mean)

    def whole_s(self, stage: int) -> tuple[list[float], list[float]]:
        """`seconds` of every forward and backward at a stage, weight gradients among them whenever they run."""
        passes = ([Op(kind, i) for i in range(len(self._plan.passes(kind)))] for kind in DIRECTIONS)
        forward, backward = ([self.seconds(stage, op) + self._later_s(stage, op) for op in ops] for ops in passes)
        return forward, backward

    def exposed_s(self, stage: int, op: Op, rank: int) -> float:
        """Communication inside a pass that nothing hides on a rank."""
        if op in self._of_ranks:
            unlike = self._unlike_of(stage, op)
            return float(unlike.exposed[unlike.places[rank]])
        return self._even_s(stage, op) if op.kind != "W" else 0.0

    def parts(self, stage: int, op: Op, rank: int) -> list[tuple[Part, float]]:
        """What a pass consists of on a rank, in order; nothing that takes no time."""
        if op in self._of_ranks:
            unlike = self._unlike_of(stage, op)
            place = unlike.places[rank]
            again, compute_s = float(unlike.again[place]), float(unlike.compute[place]) - self._later_s(stage, op)
        else:
            again, compute_s = self._again_s(stage, op), self._computing_s(stage, op)
        exposed = self.exposed_s(stage, op, rank)
        parts: list[tuple[Part, float]] = [("R", again), (op.kind, compute_s - again), ("C", exposed)]
        return [part for part in parts if part[1] > 0]

    def alike(self, stage: int) -> tuple[int, tuple[int, ...]]:
        """Equal for stages whose passes take equal seconds, where all stages run one order."""
        unlike = self.talks or any(self._expert_s) or self._at.layout.layers
        likely = self._alike[stage] if unlike else int(stage == self._last)
        return likely, self._plan.recompute[stage] if self._plan.recompute else ()

    def busy_s(self) -> Floats:
        """Compute of every rank [stages, ranks]."""
        rows = []
        for stage, seconds in enumerate(self.compute):
            of_ranks = {key: stages[stage] for key, stages in self._of_ranks.items()}
            rows.append(busy_seconds(self._plan, (seconds["F"], seconds["B"]), of_ranks))
        return np.array(rows)

    def _runs(self, stage: int, op: Op) -> MicroBatch | None:
        """What computes in a pass: at the last stage a forward that nobody keeps runs what a replay reads."""
        if op.kind == "F" and stage == self._last:
            return self._at_last[op.micro_batch]
        return self._plan.passes(op.kind)[op.micro_batch]

    def _even_s(self, stage: int, op: Op) -> float:
        micro_batch = self._runs(stage, op)
        if micro_batch is None:
            return 0.0
        if not self._moves:
            return self._gathers[op.kind]
        total = float(self._moving_s(stage, op, micro_batch, exposed_s))
        if self._plan.offload:
            total += float(self._offload_s(stage, op, self.compute[stage][op.kind][op.micro_batch]))
        return total

    def _moving_s(self, stage: int, op: Op, micro_batch: MicroBatch, exposed: Callable[..., Any]) -> Any:
        """What a pass moves between ranks of its stage, that nothing hides; worked out once for stages alike."""
        again = self._layers_again[stage].get(op.micro_batch, 0.0) if op.kind == "B" else 0.0
        key = self._alike[stage], op, again
        if key not in self._known:
            total: Any = self._gathers[op.kind]
            for direction, share in self._directions(stage, op):
                total = total + share * exposed(self._at.at(stage), direction, micro_batch, self._routed(stage, op))
            self._known[key] = total
        return self._known[key]

    def _unlike_of(self, stage: int, op: Op) -> _Unlike:
        if (stage, op) not in self._unlike:
            micro_batch = self._plan.passes(op.kind)[op.micro_batch]
            compute_s = self._of_ranks[op][stage]
            exposed = np.zeros_like(compute_s)
            if self._runs(stage, op) is not None:
                exposed += self._moving_s(stage, op, micro_batch, exposed_of_ranks)
            if self._plan.offload:
                exposed += self._offload_s(stage, op, compute_s)
            again = np.zeros_like(compute_s) + self._again_s(stage, op)
            places = {rank: place for place, rank in enumerate(micro_batch.ranks)}
            self._unlike[stage, op] = _Unlike(again, compute_s, exposed, places)
        return self._unlike[stage, op]

    def _directions(self, stage: int, op: Op) -> list[tuple[Direction, float]]:
        """What a pass moves, each in which share of the layers. A backward that runs a forward again moves values a
        second time."""
        costs = self._costs[stage]
        if op.kind == "F":
            return [(Direction(costs.forward, 1, stage), 1.0)]
        share = (op.micro_batch in self._whole_again) + self._layers_again[stage].get(op.micro_batch, 0.0)
        again = [(Direction(costs.forward, 1, stage), share)] if share else []
        return [(Direction(costs.backward, 2, stage), 1.0), *again]

    def _offload_s(self, stage: int, op: Op, compute_s: Any) -> Any:
        """What leaves for the host in a forward, or comes back in a backward, beyond the compute of as many layers."""
        plan, layers = self._plan, self._plan.limits.at(stage).layers_per_stage
        number = op.micro_batch if op.kind == "F" else plan.forward_of[op.micro_batch]
        if number not in plan.kept or not plan.offload[number]:
            return 0.0
        waiting_bytes = offloaded_bytes(plan, stage, number, _tokens_of(plan.micro_batches[number]))
        return offload_s(self._at.cluster, waiting_bytes, compute_s * (max(0, layers - KEPT_LAYERS) / layers))


def _neighbours(of_stages: list[Costs]) -> Iterator[tuple[Costs, list[int]]]:
    """Neighbouring stages of equal costs, ascending."""
    for _, stages in groupby(range(len(of_stages)), lambda stage: id(of_stages[stage])):
        numbers = list(stages)
        yield of_stages[numbers[0]], numbers


def _with_head(plan: StepPlan, mean: _Seconds, more: float, costs: Costs, replayed: Collection[int]) -> _Seconds:
    """Seconds at a stage with ``more`` linear work than its costs, if ranks have equal work and all of it runs."""
    if not more:
        return mean
    linear: dict[PassKind, float] = {"F": costs.forward.token_s, "B": costs.backward.token_s}
    zipped = {kind: zip(mean[kind], plan.slots[kind], plan.passes(kind), strict=True) for kind in DIRECTIONS}
    rows = {kind: [s + more * linear[kind] * (n / len(m.ranks)) for s, n, m in row] for kind, row in zipped.items()}
    for j in replayed:
        rows["B"][j] += more * costs.forward.token_s * _tokens_each(plan, Op("B", j))
    return rows


def _tokens_each(plan: StepPlan, op: Op) -> float:
    return plan.slots[op.kind][op.micro_batch] / len(plan.passes(op.kind)[op.micro_batch].ranks)


def _tokens_of(micro_batch: MicroBatch) -> Any:
    """Tokens of each rank: a number where all have equal work, else float64 [ranks]."""
    return micro_batch.num_padded_tokens / len(micro_batch.ranks) if is_even(micro_batch) else token_counts(micro_batch)


def _stages_alike(plan: StepPlan, context: PlanningContext) -> list[int]:
    """For each stage one whose passes hold the same communication, if they recompute as much. First and last stage have
    their own, and so have those of other numbers of layers. Between them nodes lie alike where every stage begins with
    a node."""
    layout, last = context.layout, plan.limits.num_stages - 1
    differ = layout.dp_cp_size * layout.tp % context.cluster.ranks_per_node or plan.offload
    layers = layout.layers or (1,) * (last + 1)
    return [stage if differ or stage in (0, last) else layers.index(layers[stage], 1) for stage in range(last + 1)]


def _layers_of(micro_batch: MicroBatch, context: PlanningContext, costs: Costs) -> Any:
    """Forward seconds of the layers on each rank: a number where all have equal work, else float64 [ranks]."""
    if is_even(micro_batch):
        return costs.layers_s(micro_batch, context.head_frac)
    return np.array([costs.layers_of(work, context.head_frac) for work in rank_works(micro_batch).values()])
