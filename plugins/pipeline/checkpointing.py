"""How many layers of every chunk run again at every stage, so that each fits (InfiniPipe's adaptive checkpointing).

InfiniPipe, arXiv 2509.21275, section IV, Alg. 2. Recomputation of the k-th backward of a rank at stage p delays the
(k+1)-th at stage p+1, and so on to the last stage; what one pass of such a diagonal spends, the others would wait for.
So they share one number of layers, where stages have equally many,

    c(p, k) = C[k + P - 1 - p]            P stages, k in the order of the backwards

and the program (`program`) has n + P - 1 variables instead of n P. Its rows are exact (`rows`). Then each stage by
itself gives up layers that it does not need: first stages hold most, the last one hardly anything. Fewer layers at a
stage never make a step longer, as the order stays. Two more answers start from all layers of all and lower diagonals,
then stages, or stages at once. A team of ranks takes the one with which it ends soonest, which no sum can tell.

Ranks that share no micro-batch have a program each. A shared one stands on the diagonal of its first rank.

Predicted for 13B, 4 stages, 120 to 240 chunks of 512 sequences where 16 to 34 GB are left for activations: 3 to 13 %
faster than one number of layers for all; up to 2.6 % (on average 0.6 %) faster with the program than without it; at
most 1.5 % over a linear program of the whole step, its start times and fractions of layers. 0.06 to 0.35 s on one core,
0.04 to 0.07 without the program.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.costs.context import PlanningContext
from ...core.costs.memory import activation_budget_bytes, fixed_bytes
from ...core.errors import EvenloadError
from ...core.input.format import GIB
from ...core.plan.order import orders_of_stage
from ...core.plan.step_plan import StepPlan
from ...core.simulate.events import play
from ...core.simulate.passes import PassTimes
from ...core.simulate.predict import own_costs
from .config import PipelineConfig
from .elastic import teams_of
from .memory_rows import MemoryRows, Most, Probes, fullest, joined, levels_of
from .recompute_milp import alike, lowered, solved

_ROUNDS = 3
"""Times that the room is tightened should the exact walk disagree with the rows."""


class DoesNotFitError(EvenloadError):
    """A stage holds too much with every layer recomputed."""

    def __init__(self, most: Most, missing_bytes: float, observed: str, do: str, enough_gib: float | None) -> None:
        self.most, self.missing_bytes = most, missing_bytes
        self.enough_gib = enough_gib
        """The cap on activations with which it would fit, if a device has as much."""
        super().__init__(f"stage {most.stage} of the pipeline does not fit into memory", observed, do)


def keeping_all(plan: StepPlan, context: PlanningContext, config: PipelineConfig) -> StepPlan:
    """The plan with nothing recomputed where plans may say so, whatever the recipe recomputes."""
    if not context.costs.recompute or config.recompute == "off" or plan.backward:
        return plan
    return plan.revised(recompute=((0,) * len(plan.micro_batches),) * plan.limits.num_stages)


def fitted(plan: StepPlan, context: PlanningContext, config: PipelineConfig, *, solver: bool = True) -> StepPlan:
    """The plan with as little recomputation as brings every rank of every stage into its memory.

    ``plan`` is a lawful one, but for its memory; what it recomputes now does not matter. Without ``solver`` the integer
    program is left out, as with ``solver_ms=0``. Raises DoesNotFitError, about the stage that lacks most.
    """
    budget_bytes = activation_budget_bytes(context.cluster, context.costs.memory, plan.limits)
    plain = plan.revised(recompute=())
    if plan.backward:  # groups of its own: no law says which layers of which forward a backward would run again
        most = fullest(plain, levels_of(plain))
        if most.held_bytes > budget_bytes:
            raise _refusal(most, plain, context, budget_bytes)
        return plain
    probes, layers = Probes(plan), plan.limits.layers_per_stage
    if fullest(plan, probes.levels(0)).held_bytes <= budget_bytes:
        return probes.plan_of(0) if plan.limits.memory.replay_bytes_per_token else plain
    most = fullest(plan, probes.levels(layers))
    if most.held_bytes > budget_bytes:
        raise _refusal(most, probes.plan_of(layers), context, budget_bytes)
    tightened = budget_bytes
    for _ in range(_ROUNDS):
        chosen = _chosen(probes, tightened, context, config.solver_ms if solver else 0)
        over = fullest(chosen, levels_of(chosen)).held_bytes - budget_bytes
        if over <= 0:
            return chosen
        tightened -= 2 * over
    return probes.plan_of(layers)


def _chosen(probes: Probes, budget_bytes: float, context: PlanningContext, solver_ms: int) -> StepPlan:
    """The plan with those layers, of three answers, with which each team of ranks ends soonest."""
    plan = probes.plan
    backwards, seconds = _backwards(plan), _layer_seconds(plan, context)
    teams = [_Team(probes, budget_bytes, seconds, backwards, ranks) for ranks in teams_of(plan)]
    answers = [[team.by_stage() for team in teams]]
    if not plan.limits.layers:
        answers.append([team.by_diagonal() for team in teams])
    if solver_ms and not plan.limits.layers:
        searched = [team.by_program(solver_ms) for team in teams]
        answers.append([a if b is None else b for a, b in zip(answers[1], searched, strict=True)])
    ends = np.array([_ends(_with(plan, teams, one), teams, context) for one in answers])
    soonest = alike(ends, ends.min(axis=0)).argmax(axis=0)
    return _with(plan, teams, [answers[which][at] for at, which in enumerate(soonest.tolist())])


class _Team:
    """Ranks that have micro-batches in common, and no other: what they recompute is theirs alone to choose."""

    def __init__(
        self, probes: Probes, budget_bytes: float, seconds: Floats, backwards: list[list[int]], ranks: list[int]
    ) -> None:
        plan, self.ranks = probes.plan, ranks
        self.numbers = sorted({i for rank in ranks for i in backwards[rank]})
        columns = {number: column for column, number in enumerate(self.numbers)}
        stages = range(plan.limits.num_stages)
        self._rows = [probes.rows(stage, ranks, columns, budget_bytes) for stage in stages]
        self._diagonals = _diagonals(plan, backwards, self.numbers)
        self._seconds = seconds[self.numbers]
        self._layers = plan.limits.layers_per_stage
        self._most = np.array([plan.limits.at(stage).layers_per_stage for stage in stages], dtype=np.int64)
        self._size = int(self._diagonals.max(initial=-1)) + 1
        self._weights = np.zeros(self._size)
        for diagonal in self._diagonals:
            np.maximum.at(self._weights, diagonal, self._seconds)

    def by_stage(self) -> Ints:
        """Layers by stage and micro-batch, int64 [P, n]: all of all, lowered."""
        return self._lowered(np.zeros_like(self._diagonals) + self._most[:, None])

    def by_diagonal(self) -> Ints:
        """Layers chosen as one number for each diagonal, then lowered where a micro-batch needs fewer."""
        layers = np.full(self._size, self._layers, dtype=np.int64)
        return self._lowered(lowered(self._tied, self._weights, layers)[self._diagonals])

    def by_program(self, solver_ms: int) -> Ints | None:
        """Layers chosen by the program, which says what a diagonal has; None where it gives no answer."""
        layers = solved(self._tied, self._weights, self._layers, solver_ms=solver_ms)
        return None if layers is None else self._lowered(layers[self._diagonals])

    @cached_property
    def _tied(self) -> MemoryRows:
        rows = zip(self._rows, self._diagonals, strict=True)
        return joined([of.on(places, self._size) for of, places in rows])

    def _lowered(self, layers: Ints) -> Ints:
        rows = [lowered(rows, self._seconds, of_stage) for rows, of_stage in zip(self._rows, layers, strict=True)]
        return np.array(rows, dtype=np.int64)


def _with(plan: StepPlan, teams: list[_Team], chosen: list[Ints]) -> StepPlan:
    layers = np.zeros((plan.limits.num_stages, len(plan.micro_batches)), dtype=np.int64)
    for team, of_team in zip(teams, chosen, strict=True):
        layers[:, team.numbers] = of_team
    return plan.revised(recompute=tuple(map(tuple, layers.tolist())))


def _ends(plan: StepPlan, teams: list[_Team], context: PlanningContext) -> list[float]:
    """When each team is done, hand-overs included, for which a plan that says what it recomputes never waits [s]."""
    times = PassTimes(plan, context)
    done = [0.0] * plan.limits.num_ranks
    for event in play(plan, times.seconds, times.hand_over):
        for rank in event.ranks:
            done[rank] = max(done[rank], event.free_s)
    return [max(done[rank] for rank in team.ranks) for team in teams]


def _layer_seconds(plan: StepPlan, context: PlanningContext) -> Floats:
    """What a recomputed layer of each micro-batch costs, float64 [micro-batches]."""
    costs = own_costs(plan, context.costs)
    each = [costs.layers_s(m, context.head_frac) for m in plan.micro_batches]
    return np.array(each) / plan.limits.mean_layers


def _backwards(plan: StepPlan) -> list[list[int]]:
    """For each rank the micro-batches whose activations wait for their backwards, in the order of these."""
    kept = plan.kept
    return [[i for kind, i in ops if kind == "B" and i in kept] for ops in orders_of_stage(plan, 0)]


def _diagonals(plan: StepPlan, backwards: list[list[int]], numbers: list[int]) -> Ints:
    """The diagonal on which each micro-batch stands at each stage, int64 [stages, numbers], in the order of time."""
    stages = plan.limits.num_stages
    first = [min(plan.micro_batches[i].ranks) for i in numbers]
    place = {(rank, i): at for rank in sorted(set(first)) for at, i in enumerate(backwards[rank])}
    keys = [
        [(place[rank, i] + stages - 1 - stage, rank) for rank, i in zip(first, numbers, strict=True)]
        for stage in range(stages)
    ]
    known = {key: at for at, key in enumerate(sorted({key for row in keys for key in row}))}
    return np.array([[known[key] for key in row] for row in keys], dtype=np.int64).reshape(stages, len(numbers))


def _refusal(most: Most, plan: StepPlan, context: PlanningContext, budget_bytes: float) -> DoesNotFitError:
    """With the numbers. What is said to fit does: it is what the walk found to be held, and the cluster has it."""
    missing = most.held_bytes - budget_bytes
    if budget_bytes <= 0:
        memory, has = context.costs.memory, context.cluster.memory_bytes
        observed = (
            f"weights, gradients and optimizer states of a rank take {fixed_bytes(memory, plan.limits) / GIB:.3g} GiB, "
            f"a device has {has / GIB:.3g} GiB, of which a tenth is left free"
        )
        return DoesNotFitError(most, missing, observed, "use more tensor or pipeline parallelism", None)
    how = "with all its layers recomputed" if plan.recompute else "whose backward has groups of its own"
    where = {"F": "forward", "B": "backward", "W": "weight gradients"}[most.op.kind]
    observed = (
        f"rank {most.rank} of stage {most.stage}, {how}, holds {most.held_bytes / GIB:.3g} GiB in the {where} of "
        f"micro-batch {most.op.micro_batch}: {missing / GIB:.3g} GiB more than the {budget_bytes / GIB:.3g} GiB "
        "there are for activations and prefix KV"
    )
    uncapped = replace(plan.limits, max_activation_bytes=float("inf"))
    least = rounded_up(most.held_bytes / GIB)
    if least * GIB <= activation_budget_bytes(context.cluster, context.costs.memory, uncapped):
        do = f"raise plugins.pipeline.activation_gib to {least:g} or more"
        return DoesNotFitError(most, missing, observed, do, least)
    do = "lower plugins.pipeline.max_tokens or data.max_length, or use more tensor or pipeline parallelism"
    return DoesNotFitError(most, missing, observed, do, None)


def rounded_up(value: float) -> float:
    """To three digits, never down."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit) * unit:.12g}")
