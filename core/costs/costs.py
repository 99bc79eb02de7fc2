"""What work costs: seconds forward and backward, bytes held, seconds on a link.

A pass over ``n`` tokens of one sequence that follow ``p`` earlier tokens of it costs

    seconds(n, p) = launch_s / slices + (token_s + expert_s) * n + pair_s * n * (p + n / 2)

``token_s`` is the linear part of every token (projections, MLP, norms, routers, head) [s/token], ``expert_s`` a token's
part at all experts to which it is routed [s/token], ``pair_s`` the causal attention [s per (query, key) pair],
``launch_s`` the constant of one micro-batch [s]. Where ranks share experts, a rank has those parts of the tokens of all
of them that fall to its own experts (`core.costs.rounds`). Forward and backward have coefficients of their
own; where only totals are published, backward counts 2x the forward's linear part and 2.5x its attention
(FlashAttention's backward multiplies five matrices where the forward multiplies two; Dao, arXiv 2307.08691, section 3).
All sums over the passes of a rank are linear in the coefficients, so whole steps of any plan can be fitted (`fit`).

Coefficients describe the whole model on one device; `of_stage` gives one pipeline stage of one tensor-parallel rank.
They come from ``evenload profile``, from a preset that names its source, or from `analytic`. What the model leaves out:
kernel tile effects on short sequences and cache effects. Contention between the ranks of a host is in what a profile of
that many ranks measures, in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat

from ..aliases import Floats
from ..errors import EvenloadError, nearest, shorten, shown
from ..input import reading
from ..input.bounds import AmountOrNone, LayerCount, RankCount, refuse_odd_numbers
from ..input.validation import Frozen, described
from ..machine.cluster import Cluster, Link
from ..machine.layout import Layout
from ..machine.shape import Shape
from ..plan.limits import COUNTED, NO_MEMORY, NO_SHARES, MemoryCost
from ..plan.step_plan import MicroBatch
from ..plan.token_layout import tokens_of_ranks
from .busy import OtherLoad, warn_of_busy
from .decode import DecodeCost
from .kept_values import kept_values

BACKWARD_LINEAR = 2.0
BACKWARD_ATTENTION = 2.5


class Work(NamedTuple):
    """What a rank computes in one direction of a step: the factors of the coefficients."""

    launches: float
    tokens: float
    """Padding included."""
    pairs: float
    """(query, key) pairs of causal attention."""


def work_of(micro_batches: Iterable[MicroBatch]) -> Work:
    """The work of each rank of these micro-batches, summed. A dummy is one token."""
    launches, tokens, pairs = 0, 0.0, 0.0
    for m in micro_batches:
        slices, ranks, pad, *_ = m
        rows = [(pad or s.stop - s.start, s.start) for s in slices] or [(1, 0)]
        launches += 1
        tokens += (m.num_padded_tokens if m.round_to else sum(n for n, _ in rows)) / len(ranks)
        pairs += sum(n * (p + 0.5 * n) for n, p in rows) / len(ranks)
    return Work(launches, tokens, pairs)


def works_of(micro_batches: Sequence[MicroBatch]) -> Floats:
    """`work_of` each micro-batch, float64 [M, 3]: launches, tokens, pairs."""
    counts = np.array([len(m.slices) for m in micro_batches], dtype=np.int64)
    rows = np.array([s for m in micro_batches for s in m.slices], dtype=np.int64).reshape(-1, 3)
    pads, owners = np.repeat([m.pad_to for m in micro_batches], counts), np.repeat(np.arange(len(counts)), counts)
    prefix, n = rows[:, 1], np.where(pads > 0, pads, rows[:, 2] - rows[:, 1]).astype(np.float64)
    tokens, pairs = (np.bincount(owners, each, len(counts)) for each in (n, n * (prefix + 0.5 * n)))
    dummies = counts == 0
    tokens[dummies], pairs[dummies] = 1.0, 0.5
    tokens += -tokens % np.array([m.round_to or 1 for m in micro_batches])
    degrees = np.array([len(m.ranks) for m in micro_batches])
    return np.stack([np.ones(len(counts)), tokens / degrees, pairs / degrees], axis=1)


def is_even(micro_batch: MicroBatch) -> bool:
    """Whether all its ranks have the same work and traffic: its slices have no CP groups of their own."""
    return not (micro_batch.cp_groups or micro_batch.remap)


def rank_works(micro_batch: MicroBatch) -> dict[int, Work]:
    """The work of each rank of one micro-batch, whose slices may have CP groups of their own."""
    if not micro_batch.cp_groups:
        return dict.fromkeys(micro_batch.ranks, work_of([micro_batch]))
    pairs = dict.fromkeys(micro_batch.ranks, 0.0)
    for s, cp_group in zip(micro_batch.slices, micro_batch.cp_groups, strict=True):
        share = (s.stop - s.start) * (s.start + 0.5 * (s.stop - s.start)) / len(cp_group)
        for rank in cp_group:
            pairs[rank] += share
    return {rank: Work(1, tokens, pairs[rank]) for rank, tokens in tokens_of_ranks(micro_batch).items()}


class PassCost(Frozen):
    """Coefficients of one direction, forward or backward."""

    launch_s: NonNegativeFloat = 0.0
    token_s: NonNegativeFloat
    """Of a token, without the experts to which it is routed."""
    expert_s: NonNegativeFloat = 0.0
    """Of a token at all of these, in all layers."""
    pair_s: NonNegativeFloat = 0.0

    @property
    def linear_s(self) -> float:
        """Seconds of all linear work of a token, its experts included."""
        return self.token_s + self.expert_s

    def seconds(self, length: Any, prefix: Any = 0) -> Any:
        """Seconds for ``length`` tokens after ``prefix`` tokens (arrays broadcast), launch left out."""
        return self.linear_s * length + self.pair_s * length * (prefix + 0.5 * length)

    def tokens_within(self, prefix: int, budget_s: float) -> float:
        """How many tokens after ``prefix`` cost ``budget_s``."""
        if budget_s <= 0:
            return 0.0
        # The root that subtracts nothing, since after a long prefix ``linear`` is nearly the square root; per budget.
        linear, square = (self.linear_s + self.pair_s * prefix) / budget_s, self.pair_s / budget_s
        slope = linear + math.sqrt(linear * linear + 2 * square)
        return 2 / slope if slope else math.inf

    def of(self, work: Work) -> float:
        """Seconds of all of it."""
        return self.launch_s * work.launches + self.linear_s * work.tokens + self.pair_s * work.pairs

    def of_each(self, works: Floats) -> Floats:
        """Seconds of each row of (launches, tokens, pairs), float64 [N, 3] -> [N]."""
        seconds: Floats = self.launch_s * works[:, 0] + self.linear_s * works[:, 1] + self.pair_s * works[:, 2]
        return seconds

    def plus(self, other: PassCost) -> PassCost:
        """What both cost, one after the other."""
        own, more = self.model_dump(), other.model_dump()
        return PassCost(**{name: own[name] + more[name] for name in own})

    def scaled(self, compute: float, launch: float) -> PassCost:
        names = ("token_s", "expert_s", "pair_s")
        return PassCost(launch_s=self.launch_s * launch, **{name: getattr(self, name) * compute for name in names})

    def at_experts(self, share: float) -> PassCost:
        """This cost with a share of its seconds at experts."""
        return self.model_copy(update={"expert_s": self.expert_s * share}) if self.expert_s else self


Sharding = Literal["none", "optimizer", "parameters"]
"""What data-parallel ranks divide between them: nothing, gradients and optimizer states, or the weights as well."""


class SettingCosts(Frozen):
    """What ranks of one more setting took: of a degree of tensor parallelism times that degree."""

    forward: PassCost
    backward: PassCost
    update_s: NonNegativeFloat = 0.0
    memory: MemoryCost = NO_MEMORY


class Costs(Frozen):
    """The cost model of one model on one device."""

    source: str
    """Where the numbers come from: paper and table, or machine, versions and command."""
    forward: PassCost
    backward: PassCost
    memory: MemoryCost = NO_MEMORY
    num_layers: LayerCount = 1
    recompute: bool = False
    """Backward holds a second forward already (`recomputed`), so a replay costs nothing more."""
    update_s: NonNegativeFloat = 0.0
    """Of a step, beyond its passes and collectives: clipping, the optimizer, the trainer's bookkeeping, all weights on
    one rank. Ranks that share the optimizer (and tensor and pipeline peers) share these seconds."""
    intra: Link | None = None
    """Link inside a node as measured along with these costs; it replaces the cluster's."""
    inter: Link | None = None
    """Link between nodes, likewise."""
    fit_error: float | None = None
    """Mean absolute relative error of the fit, where the numbers were fitted here."""
    decode: DecodeCost | None = None
    """Of decode steps, for `evenload generate`; null: not measured."""
    busy: OtherLoad | None = None
    """What else ran while these numbers were measured, where that makes them too high; null: the machine was quiet."""
    tp: RankCount | None = None
    """Degree of tensor parallelism at which these numbers were measured; null: not said, so they are for any."""
    by_tp: dict[RankCount, SettingCosts] = Field(default={})
    """What was measured along with them at other degrees (`core.costs.by_setting`)."""
    sharding: Sharding | None = None
    """What ranks divided while these numbers were measured; null: not said, so they are for any."""
    by_sharding: dict[Sharding, SettingCosts] = Field(default={})
    """What was measured along with them where ranks divide otherwise."""
    frozen_base: bool | None = None
    """The weights stayed as they are while these numbers were measured, so backwards are without their gradients; null:
    they were trained."""
    ep: RankCount = Field(default=1, exclude=True)
    """Neighbouring ranks that share the experts of a layer. It is the layout's, so in no cost model."""
    expert_imbalance: float = Field(default=1.0, ge=1.0, exclude=True)
    """Tokens of the busiest of these ranks' experts over those of the mean one; 1: routing is even."""
    beside: tuple[tuple[float, float], ...] = Field(default=(), exclude=True)
    """(forward, backward) seconds of each sequence of one batch besides its tokens, such as those of its pictures,
    where sequences stay whole; empty: none. The batch's, so in no cost model."""

    def sequence_s(self, lengths: Any) -> Floats:
        """Forward and backward seconds of whole sequences, launch left out. lengths int [S] -> float64 [S]."""
        n = np.asarray(lengths, dtype=np.float64)
        beside_s = self.beside_s(len(n)) if self.beside else 0.0
        return np.asarray(self.forward.seconds(n) + self.backward.seconds(n) + beside_s, dtype=np.float64)

    def beside_s(self, count: int) -> Floats:
        """`beside`, both passes together, of the batch's sequences, float64 [S]."""
        seconds: Floats = np.array(self.beside).reshape(count, 2).sum(axis=1) if self.beside else np.zeros(count)
        return seconds

    @property
    def launch_s(self) -> float:
        """Constant seconds of one micro-batch, forward and backward together."""
        return self.forward.launch_s + self.backward.launch_s

    @property
    def both(self) -> PassCost:
        """A pass forward and a pass backward, one after the other."""
        return self.forward.plus(self.backward)

    def micro_batch_s(self, micro_batch: MicroBatch) -> tuple[float, float]:
        """(forward, backward) seconds of a micro-batch, compute only: on each of its ranks, or on the busiest one."""
        if is_even(micro_batch):
            work = work_of([micro_batch])
            beside = [self.beside[s.sequence] for s in micro_batch.slices] if self.beside else []
            return self.forward.of(work) + sum(f for f, _ in beside), self.backward.of(work) + sum(b for _, b in beside)
        forward, backward = self.rank_s(micro_batch)
        return float(forward.max()), float(backward.max())

    def micro_batches_s(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[float], list[float]]:
        """`micro_batch_s` of each, forward and backward."""
        works = works_of(micro_batches)
        forward, backward = (cost.of_each(works).tolist() for cost in (self.forward, self.backward))
        for number, m in enumerate(micro_batches):
            if self.beside or not is_even(m):
                forward[number], backward[number] = self.micro_batch_s(m)
        return forward, backward

    def rank_s(self, micro_batch: MicroBatch) -> tuple[Floats, Floats]:
        """(forward, backward) seconds of each rank of a micro-batch, in their order, compute only: float64 [ranks]."""
        works = np.array(list(rank_works(micro_batch).values()))
        return self.forward.of_each(works), self.backward.of_each(works)

    def layers_s(self, micro_batch: MicroBatch, head_frac: float = 0.0) -> float:
        """Forward seconds of a micro-batch without launch and without the output layer, on its busiest rank.

        ``head_frac``: share of ``token_s`` that is the output layer's.
        """
        works = [work_of([micro_batch])] if is_even(micro_batch) else rank_works(micro_batch).values()
        return max(self.layers_of(work, head_frac) for work in works)

    def layers_of(self, work: Work, head_frac: float) -> float:
        linear_s = self.forward.token_s * (1.0 - head_frac) + self.forward.expert_s
        return linear_s * work.tokens + self.forward.pair_s * work.pairs

    def weights_s(self, tokens: Any, head_frac: float = 0.0) -> Any:
        """Seconds of the weight gradients of ``tokens`` in all layers: a product of matrices for each of the forward's.

        Those of experts are left out, since a backward computes them at once.
        Linear work of a backward is two such products and what is no product; of that nothing is counted here.
        """
        return _of_weights_s(self) * (1.0 - head_frac) * tokens

    def of_settings(self, change: Callable[[SettingCosts], SettingCosts]) -> dict[str, Any]:
        """The fields with what was measured at other settings, each of these changed."""
        names = ("by_tp", "by_sharding")
        return {name: {at: change(one) for at, one in getattr(self, name).items()} for name in names}

    def holding(self, **changes: float) -> Costs:
        """These costs, of every setting, with other bytes in the named fields of their memory."""

        def held(memory: MemoryCost) -> dict[str, MemoryCost]:
            return {"memory": memory.model_copy(update=changes)}

        others = self.of_settings(lambda one: one.model_copy(update=held(one.memory)))
        return self.model_copy(update={**held(self.memory), **others})

    def recomputed(self, kept_bytes_per_token: float) -> Costs:
        """Costs under full activation recomputation: backward runs the forward again and keeps only some bytes."""
        whole = self.memory.activation_bytes_per_token
        holding = self.holding(activation_bytes_per_token=kept_bytes_per_token, replay_bytes_per_token=whole)
        return holding.model_copy(update={"backward": self.both, "recompute": True})

    def frozen(self) -> Costs:
        """These costs where the model's weights are frozen: a backward leaves out their gradients, there is no update.
        Nothing must be recomputed yet."""
        if self.frozen_base:
            return self

        def without_weights(costs: Costs | SettingCosts) -> dict[str, Any]:
            token_s = costs.backward.token_s - _of_weights_s(costs)
            return {"backward": costs.backward.model_copy(update={"token_s": token_s}), "update_s": 0.0}

        others = self.of_settings(lambda one: one.model_copy(update=without_weights(one)))
        return self.model_copy(update={**without_weights(self), **others, "frozen_base": True})

    def kept(self) -> Costs:
        """The costs without recomputation, from which `recomputed` started."""
        names = PassCost.model_fields
        less = {name: max(0.0, getattr(self.backward, name) - getattr(self.forward, name)) for name in names}
        whole = self.memory.replay_bytes_per_token
        holding = self.holding(activation_bytes_per_token=whole, replay_bytes_per_token=0.0)
        return holding.model_copy(update={"backward": PassCost(**less), "recompute": False})

    def of_stage(self, layout: Layout, shares: Mapping[str, float] = NO_SHARES) -> Costs:
        """Costs of one pipeline stage on one tensor-parallel rank: compute is shared by tp * stages, launches by
        stages, and the update is that of a device. ``shares``: see `MemoryCost.of_stage`."""
        compute, launch = 1.0 / (layout.tp * layout.num_stages), 1.0 / layout.num_stages
        forward, backward = self.forward.scaled(compute, launch), self.backward.scaled(compute, launch)
        update_s = self.update_s * (1.0 / (layout.tp * layout.pp))
        changes = {"memory": self.memory.of_stage(layout, shares), "update_s": update_s, "ep": layout.ep}
        return self.model_copy(update={"forward": forward, "backward": backward, **changes})

    def of_share(self, share: float) -> Costs:
        """Costs of a stage with so many times the layers, the output layer's part likewise."""
        forward, backward = self.forward.scaled(share, share), self.backward.scaled(share, share)
        changes = {
            "beside": tuple((share * f, share * b) for f, b in self.beside),
            "memory": self.memory.of_share(share),
        }
        return self.model_copy(update={"forward": forward, "backward": backward, **changes})

    def at_experts(self, share: float) -> Costs:
        """These costs with a share of both passes' seconds at experts."""
        passes = {"forward": self.forward.at_experts(share), "backward": self.backward.at_experts(share)}
        return self.model_copy(update=passes)


def from_totals(source: str, *, token_s: float, square_s: float, launch_s: float = 0.0, **rest: Any) -> Costs:
    """Costs from published totals (forward + backward): ``square_s * n^2 + token_s * n + launch_s`` [s]."""
    attention = 2 * square_s / (1 + BACKWARD_ATTENTION)
    linear, launch = token_s / (1 + BACKWARD_LINEAR), launch_s / (1 + BACKWARD_LINEAR)
    forward = PassCost(launch_s=launch, token_s=linear, pair_s=attention)
    return Costs(source=source, forward=forward, backward=_backward_of(forward), **rest)


def _backward_of(forward: PassCost) -> PassCost:
    linear = forward.scaled(BACKWARD_LINEAR, BACKWARD_LINEAR)
    return linear.model_copy(update={"pair_s": BACKWARD_ATTENTION * forward.pair_s})


def analytic(shape: Shape, cluster: Cluster, bytes_per_value: int = 2) -> Costs:
    """Costs counted from the model's shape: two FLOPs a weight and token, four a hidden unit and (query, key) pair.

    The rate is the cluster's ``flops_per_s``. Only the ratio of linear to attention work matters for balance; absolute
    seconds are as good as that rate.
    """
    layers = shape.num_layers
    token_s, expert_s = (2 * weights / cluster.flops_per_s for weights in (shape.dense_weights, shape.routed_weights))
    pair_s = 4 * layers * shape.query_size / cluster.flops_per_s
    forward = PassCost(launch_s=cluster.launch_s, token_s=token_s, expert_s=expert_s, pair_s=pair_s)
    # Korthikanti et al., arXiv 2205.05198, section 4.1: 34 s b h bytes a dense layer at 16 bits, without the score
    # matrix.
    of_experts = sum(kept_values(shape._replace(num_layers=shape.moe_layers))) if shape.moe_layers else 0
    activation_bytes = bytes_per_value * (17 * shape.hidden_size * (layers - shape.moe_layers) + of_experts)
    return Costs(
        source=f"counted FLOPs at {cluster.flops_per_s:.3g} FLOP/s ({cluster.name})",
        forward=forward,
        backward=_backward_of(forward),
        memory=MemoryCost(
            fixed_bytes=16.0 * shape.parameters,
            activation_bytes_per_token=activation_bytes,
            cut_saves_bytes_per_token=2 * bytes_per_value * shape.kv_size * layers,
            # One float32 copy of the logits is kept for the loss, another is taken for their gradient (as measured).
            head_bytes_per_token=4 * shape.vocab_size + 2 * bytes_per_value * shape.hidden_size,
            head_working_bytes_per_token=4 * shape.vocab_size,
            kv_bytes_per_token=2 * bytes_per_value * shape.kv_size * layers,
        ),
        num_layers=layers,
    )


def fit(work: npt.ArrayLike, seconds: npt.ArrayLike) -> tuple[PassCost, float]:
    """Least-squares coefficients of one direction, none negative, and the fit's mean absolute relative error.

    ``work`` float [N, 3]: `Work` of a rank in each sample; ``seconds`` float [N]. Rows are weighted by 1/seconds, so
    that short samples count as much as long ones.
    """
    target = np.asarray(seconds, dtype=np.float64)
    coefficients, error = solve(work, target, target)
    return PassCost(**dict(zip(("launch_s", "token_s", "pair_s"), coefficients.tolist(), strict=True))), error


def solve(columns: npt.ArrayLike, target: npt.ArrayLike, unit: npt.ArrayLike) -> tuple[Floats, float]:
    """Non-negative x of least sum of ((columns x - target) / unit)^2, and the mean of |columns x - target| / unit.

    ``columns`` float [N, k], k small: every subset of the columns is tried, which is exact.
    """
    rows = np.asarray(columns, dtype=np.float64) / (per := np.asarray(unit, dtype=np.float64))[:, None]
    wanted = np.asarray(target, dtype=np.float64) / per
    size = np.linalg.norm(rows, axis=0)
    scaled = rows / np.where(size > 0, size, 1.0)
    best, best_left = np.zeros(rows.shape[1]), float(wanted @ wanted)
    for count in range(1, rows.shape[1] + 1):
        for chosen in map(list, combinations(range(rows.shape[1]), count)):
            part, *_ = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)
            left = float(np.square(scaled[:, chosen] @ part - wanted).sum())
            if (part >= 0).all() and left < best_left:
                best, best_left = np.zeros(rows.shape[1]), left
                best[chosen] = part / np.where(size > 0, size, 1.0)[chosen]
    return best, float(np.abs(rows @ best - wanted).mean())


def load(name: str, folder: Path) -> Costs:
    """Read costs from a YAML file, or a preset of that name in ``folder``. Raises EvenloadError.

    The file holds the fields of `Costs`, or ``totals`` with the arguments of `from_totals`.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not reading.is_file(path):
        presets = sorted(p.stem for p in folder.glob("*.yaml"))
        do = f"give a file or a preset; {nearest(name, ['auto', *presets])}"
        raise EvenloadError("there is no such cost model", shown(name), do)
    file, do = shorten(str(path)), "write one with `evenload profile`"
    fault = f"{file} is not a cost model"
    data = reading.read_yaml(path, f"the cost model {file}", do)
    costs = described(_without_totals(data, fault, do), Costs, fault, do)
    if counted := sorted(COUNTED & (data.get("memory") or {}).keys()):
        raise EvenloadError(fault, f"memory.{counted[0]}, which is counted from the recipe", "leave it out")
    refuse_odd_numbers(data, file)
    for name in ("ep", "expert_imbalance"):
        if name in data:
            raise EvenloadError(fault, f"{name}, which is the layout's", "leave it out")
    if costs.busy:
        warn_of_busy(file, costs.busy)
    for name, cost in (("forward", costs.forward), ("backward", costs.backward)):
        if not (cost.linear_s or cost.pair_s):
            raise EvenloadError(fault, f"{name} takes no time, however many tokens", do)
    return costs


def _of_weights_s(costs: Costs | SettingCosts) -> float:
    """`Costs.weights_s` of a token, the output layer's included."""
    return min(costs.forward.token_s, 0.5 * costs.backward.token_s)


class _Totals(Frozen):
    token_s: AmountOrNone
    square_s: AmountOrNone
    launch_s: AmountOrNone = 0.0


def _without_totals(data: Any, fault: str, do: str) -> Any:
    """The fields of `Costs` that a file with ``totals`` stands for; other data as it is. Raises EvenloadError."""
    if not isinstance(data, dict) or "totals" not in data:
        return data
    both = sorted({"forward", "backward"} & data.keys())
    if both:
        raise EvenloadError(fault, f"what a pass costs twice, in totals and in {both[0]}", "leave one of them out")
    passes = from_totals("", **described(data["totals"], _Totals, fault, do).model_dump())
    rest = {key: value for key, value in data.items() if key != "totals"}
    return {**rest, "forward": passes.forward.model_dump(), "backward": passes.backward.model_dump()}
