"""The shared vocabulary: sequences, slices, micro-batches and the plan of one step.

A `StepPlan` is computed from lengths alone and is the same on every rank. It is the one object that the planner makes,
`laws.check` judges, the command line prints, the simulator times and the runtime executes.

Ranks in this module are *plane* ranks: positions 0 .. num_ranks-1 in the data-parallel x context-parallel plane. Peers
of a plane rank in tensor or pipeline parallelism run the same micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from .expert_policy import EXPERTS_AT_HOME, ExpertPolicy
from .limits import Limits

Lengths = npt.NDArray[np.int64]
"""Tokens of each sequence of a global batch [S]; a sequence's number is its place."""


def as_lengths(values: Any) -> Lengths:
    """Integers [S] in a list, an array or an iterator, as an array that nobody can write to."""
    known = isinstance(values, np.ndarray) and values.dtype == np.int64
    array: Lengths = values if known else np.array(list(values), dtype=np.int64)
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


class Sequence(NamedTuple):
    """One sequence of a plan, as an object (`StepPlan.sequences`)."""

    index: int  # type: ignore[assignment]  # a sequence's number, not tuple.index
    """Its place in the global batch, 0 .. len(batch)-1."""
    length: int
    """Tokens."""
    tenant: int = 0


class Slice(NamedTuple):
    """Tokens [start, stop) of a sequence; causal, attends to [0, stop) of the same sequence."""

    sequence: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


CpComm = Literal["", "ring", "all_gather", "all_to_all", "hybrid"]
"""How ranks share the attention of a sequence: keys and values go round, or to all at once; or queries, keys and values
change from token to head shards and back; or the latter inside groups of ranks and a ring across the groups."""


class MicroBatch(NamedTuple):
    """What a set of ranks runs at once. ``len(ranks)`` is its context-parallel degree, unless slices have own CP
    groups.

    A micro-batch without slices is a dummy: one token of weight zero, for hosts that need equal counts on every rank.
    How tokens are dealt to several ranks is said in `core.plan.token_layout`.
    """

    slices: tuple[Slice, ...]
    ranks: tuple[int, ...]
    """In the order in which they form a ring."""
    pad_to: int = 0
    """Every slice is padded to this many tokens (stock trainers do that); 0 means packed without padding."""
    cp_comm: CpComm = ""
    """Of all slices on several ranks; empty: the trainer's static context parallelism, which plans only predict."""
    ulysses_degree: int = 0
    """Ranks of a group that shares heads, where the cp_comm is hybrid."""
    cp_groups: tuple[tuple[int, ...], ...] = ()
    """For each slice the ranks that share its attention, some or all of ``ranks``; empty: all share every slice."""
    remap: bool = False
    """All modules but attention run on equally many tokens on every rank."""
    routed: bool = False
    """What travels between nodes is spread over all ranks of both nodes."""
    round_to: int = 0
    """On one rank: filled up after its last slice to a multiple of this many tokens; 0: not."""

    @property
    def ranks_of_slices(self) -> tuple[tuple[int, ...], ...]:
        """For each slice the ranks that share its attention."""
        return self.cp_groups or (self.ranks,) * len(self.slices)

    @property
    def can_be_rounded(self) -> bool:
        """Whether tokens without a slice can stand after the last one: no dummy, on one rank, not in padded rows."""
        return bool(self.slices) and len(self.ranks) == 1 and not self.pad_to

    @property
    def num_tokens(self) -> int:
        """Tokens of all slices that carry targets; padding is none."""
        return sum(s.stop - s.start for s in self.slices)

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        tokens = max(1, len(self.slices) * self.pad_to if self.pad_to else self.num_tokens)
        return tokens + -tokens % (self.round_to or 1)


PassKind = Literal["F", "B", "W"]
"""Forward, backward, and the weight gradients of a backward that computed its input's alone (zero-bubble pipelines, Qi
et al., arXiv 2401.10241, section 2)."""


class Op(NamedTuple):
    """One entry of a stage's order: run a pass of a micro-batch. W has the number of its backward."""

    kind: PassKind
    micro_batch: int


_FACTS: dict[str, frozenset[str]] = {}
"""The fields of a plan that each fact depends on, by the name under which a plan keeps the fact.

Of the limits a fact depends on the numbers of ranks, stages and ranks in step alone.
"""
_Fact = TypeVar("_Fact")


def fact(*fields: str) -> Callable[[Callable[[Any], _Fact]], cached_property[_Fact]]:
    """A property that is worked out of these fields of a plan, once."""

    def register(method: Callable[[Any], _Fact]) -> cached_property[_Fact]:
        _FACTS[method.__name__] = frozenset(fields)
        return cached_property(method)

    return register


def fact_of_plan(*fields: str) -> Callable[[Callable[..., _Fact]], Callable[..., _Fact]]:
    """A function of a plan and hashable arguments whose answers depend on these fields, each worked out once."""

    def register(function: Callable[..., _Fact]) -> Callable[..., _Fact]:
        name = f"{function.__module__}.{function.__qualname__}"
        _FACTS[name] = frozenset(fields)

        @wraps(function)
        def known(plan: StepPlan, *arguments: Any) -> _Fact:
            answers: dict[Any, _Fact] = vars(plan).setdefault(name, {})
            if arguments not in answers:
                answers[arguments] = function(plan, *arguments)
            return answers[arguments]

        return known

    return register


NO_TENANTS = NO_GROUPS = NO_TRUNKS = as_lengths([])


@dataclass(frozen=True, eq=False)
class StepPlan:
    """All work of one optimizer step.

    ``micro_batches`` are in launch order: every rank walks the list and skips what it is not in, so members of a group
    meet in one order. ``order`` holds one list of `Op` per pipeline stage; empty means the host's own schedule over the
    launch order. A backward whose W is in a stage's list leaves the weight gradients to it there; any other computes
    them itself. ``recompute`` holds, per stage, the number of recomputed layers of each micro-batch; empty means what
    the recipe says.

    ``backward`` groups the same tokens anew for the backward pass (asymmetric partitioning; SlimPack, arXiv
    2509.26246), in backward launch order: an op ``B j`` is then its j-th micro-batch. Empty: the groups of the forward.
    ``replayed`` lists the micro-batches of the backward pass (ascending) that keep nothing from the forward but prefix
    KV and the stage's input: their forward runs a second time, right before their backward. Those that are not listed
    equal a micro-batch of the forward, and its activations are kept.
    """

    lengths: Lengths
    """Tokens of each sequence of the global batch, int64 [S]; given as any integers."""
    micro_batches: tuple[MicroBatch, ...]
    limits: Limits
    order: tuple[tuple[Op, ...], ...] = ()
    recompute: tuple[tuple[int, ...], ...] = ()
    made_by: str = ""
    """Names of the planners that shaped it, in order: ``in_order``, ``packing`` ..."""
    bound_s: float = 0.0
    """No plan of the settings has run its last pass before [s], certified; 0 where nothing is."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    backward: tuple[MicroBatch, ...] = ()
    replayed: tuple[int, ...] = ()
    offload: tuple[float, ...] = ()
    """For each micro-batch of the forward the share of its inner layers' activations that waits in host memory for the
    backward; empty: none (ByteScale, arXiv 2502.21231, section 4)."""
    tenants: Lengths = field(default_factory=lambda: NO_TENANTS)
    """Whose each sequence is, int64 [S]; empty: all are of one tenant."""
    experts: ExpertPolicy = EXPERTS_AT_HOME
    """Where experts may run in the layers of this step."""
    groups: Lengths = field(default_factory=lambda: NO_GROUPS)
    """Number of each sequence's group, int64 [S]: those of one stay together; empty: each may be anywhere."""
    trunks: Lengths = field(default_factory=lambda: NO_TRUNKS)
    """Tokens that each sequence begins with and another one of its micro-batch computes for it, int64 [S]; its slice
    begins after them. Slices then stand as lines of code do: each continues the nearest one before it that begins
    earlier. Empty: each sequence computes all of its own."""
    merge: tuple[tuple[int, ...], ...] = ()
    """For each device of a pipeline that has two stages (`Limits.v_shape`) the stage of each of its passes: the k-th
    mention of a stage is the k-th pass of that stage's list in ``order``. Empty where each device has one stage."""

    def __post_init__(self) -> None:
        for name in ("groups", "lengths", "tenants", "trunks"):
            object.__setattr__(self, name, as_lengths(getattr(self, name)))

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences as objects, for readers of a plan; planners take `lengths`."""
        tenants = self.tenants.tolist() or [0] * len(self.lengths)
        return tuple(Sequence(i, n, t) for i, (n, t) in enumerate(zip(self.lengths.tolist(), tenants, strict=True)))

    def passes(self, kind: PassKind) -> tuple[MicroBatch, ...]:
        """The micro-batches of a direction, by the numbers that `Op.micro_batch` has there."""
        return self.backward if kind != "F" and self.backward else self.micro_batches

    @fact("order")
    def split(self) -> tuple[frozenset[int], ...]:
        """For each stage the backwards whose weight gradients are a pass of their own there; empty without an order."""
        return tuple(frozenset(op.micro_batch for op in ops if op.kind == "W") for ops in self.order)

    @fact("lengths", "micro_batches", "backward", "trunks")
    def cut(self) -> frozenset[int]:
        """Sequences that are in more than one slice, forward or backward: those that need prefix KV."""
        lengths = (self.lengths - self.trunks if len(self.trunks) else self.lengths).tolist()
        grouped = (*self.micro_batches, *self.backward)
        return frozenset(s.sequence for m in grouped for s in m.slices if s.stop - s.start < lengths[s.sequence])

    @fact("micro_batches", "backward")
    def shared(self) -> bool:
        """Whether any micro-batch runs on several ranks."""
        return any(len(m.ranks) > 1 for m in (*self.micro_batches, *self.backward))

    @fact("micro_batches", "order", "recompute", "offload")
    def in_host_schedule(self) -> bool:
        """Whether the trainer's own schedule runs it; static context parallelism is the trainer's too."""
        own = self.order or self.recompute or any(self.offload)
        return not (own or any(m.cp_comm and len(m.ranks) > 1 for m in self.micro_batches))

    def revised(self, **changes: Any) -> StepPlan:
        """A copy with these fields changed and derived facts that stay true. Raises PlanError for unknown fields."""
        if unknown := sorted(set(changes) - set(self.__dataclass_fields__)):
            fields = ", ".join(self.__dataclass_fields__)
            raise PlanError("a plan has no field of this name", ", ".join(unknown), f"change one of {fields}")
        other = replace(self, **changes)
        changed = set(changes)
        own, its = self.limits, other.limits
        if (own.shape, own.v_shape, own.layers) == (its.shape, its.v_shape, its.layers):
            changed.discard("limits")
        for name in _FACTS.keys() & vars(self).keys():
            if _FACTS[name].isdisjoint(changed):
                vars(other)[name] = vars(self)[name]
        return other

    def rounded(self) -> StepPlan:
        """The plan with its micro-batches filled up to ``limits.round_tokens``."""
        multiple = self.limits.round_tokens
        if multiple == 1:
            return self
        forward, backward = (
            tuple(m._replace(round_to=multiple if m.can_be_rounded else 0) for m in passes)
            for passes in (self.micro_batches, self.backward)
        )
        return self.revised(micro_batches=forward, backward=backward)

    @property
    def is_sortable(self) -> bool:
        """Whether micro-batches may run in any order: no slices, passes, or merged sums depend on it."""
        return not (self.cut or self.order or self.backward or self.merge or self.replayed)

    def with_micro_batches(
        self, micro_batches: Iterable[MicroBatch], limits: Limits, made_by: str, order: tuple[tuple[Op, ...], ...] = ()
    ) -> StepPlan:
        """A plan of the same sequences in these micro-batches; nothing else of this plan stays but its bound, its
        experts' policy and whose and in which groups its sequences are."""
        kept: dict[str, Any] = {name: getattr(self, name) for name in ("bound_s", "tenants", "experts", "groups")}
        return StepPlan(self.lengths, tuple(micro_batches), limits, order, made_by=made_by, **kept)

    @fact("micro_batches", "backward", "replayed")
    def forward_of(self) -> tuple[int | None, ...]:
        """For each micro-batch of the backward pass the forward one whose activations it uses; None: replayed."""
        replayed = frozenset(self.replayed)
        if not self.backward:
            return tuple(None if j in replayed else j for j in range(len(self.micro_batches)))
        same: dict[Any, list[int]] = {}  # dummies of a rank are all alike
        for i, m in enumerate(self.micro_batches):
            same.setdefault(m[:2], []).append(i)
        stored_forwards = (None if j in replayed else same.get(m[:2]) for j, m in enumerate(self.backward))
        return tuple(indices.pop(0) if indices else None for indices in stored_forwards)

    @fact("micro_batches", "backward", "replayed")
    def kept(self) -> frozenset[int]:
        """Micro-batches of the forward whose activations wait for their backward."""
        return frozenset(i for i in self.forward_of if i is not None)

    @fact("lengths", "trunks")
    def num_tokens(self) -> int:
        """Tokens of all sequences, those of a trunk counted where they are computed."""
        return int(self.lengths.sum() - self.trunks.sum())

    @fact("micro_batches")
    def num_padded_tokens(self) -> int:
        """Tokens computed over all micro-batches, padding and dummies included."""
        return sum(self.slots["F"])

    @fact("micro_batches", "backward")
    def slots(self) -> dict[PassKind, tuple[int, ...]]:
        """`MicroBatch.num_padded_tokens` of every micro-batch of a direction."""
        forward = tuple(m.num_padded_tokens for m in self.micro_batches)
        backward = tuple(m.num_padded_tokens for m in self.backward) if self.backward else forward
        return {"F": forward, "B": backward, "W": backward}

    @property
    def padding_frac(self) -> float:
        """Share of the computed tokens that carry no data."""
        return 1.0 - self.num_tokens / max(1, self.num_padded_tokens)

    def of_rank(self, rank: int, kind: Literal["F", "B"] = "F") -> tuple[int, ...]:
        """Indices of the micro-batches of a plane rank in a direction, in launch order."""
        return self._by_rank[kind][rank]

    @fact("micro_batches", "backward", "limits")
    def _by_rank(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        def indices(micro_batches: tuple[MicroBatch, ...]) -> tuple[tuple[int, ...], ...]:
            of_ranks: list[list[int]] = [[] for _ in range(self.limits.num_ranks)]
            for index, micro_batch in enumerate(micro_batches):
                for rank in micro_batch.ranks:
                    of_ranks[rank].append(index)
            return tuple(map(tuple, of_ranks))

        forward = indices(self.micro_batches)
        return {"F": forward, "B": indices(self.backward) if self.backward else forward}

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal on two ranks exactly when the plans are."""
        grouped = (*self.micro_batches, *self.backward)
        order = [[(op.kind, op.micro_batch) for op in stage] for stage in self.order]
        shared = [(i, _SHARING(m)) for i, m in enumerate(grouped) if len(m.ranks) > 1]
        texts: list[Any] = [(order, self.recompute, self.offload, shared)]
        texts += [tuple(value) for name, default in _TEXTS.items() if (value := getattr(self, name)) != default]
        tenants = self.tenants if len(self.tenants) else np.zeros_like(self.lengths)
        numbers: dict[str, Any] = {
            "slices": np.array([s for m in grouped for s in m.slices], dtype=np.int64).reshape(-1, 3),
            "counts": [len(m.slices) for m in grouped],
            "ranks": [r for m in grouped for r in m.ranks],
            "degrees": [len(m.ranks) for m in grouped],
            "pads": [m.pad_to for m in grouped],
            "sequences": np.stack([np.arange(len(self.lengths)), self.lengths, tenants], axis=1),
            "replayed": [len(self.backward), *self.replayed],
        }
        numbers |= {name: values for name in _OF_SEQUENCES if len(values := getattr(self, name))}
        numbers |= {name: values for name, of in _OF_MICRO_BATCHES.items() if any(values := list(map(of, grouped)))}
        digest = hashlib.blake2b("".join(map(repr, texts)).encode(), digest_size=16)
        for name, values in numbers.items():
            array = np.asarray(values, dtype=np.int64)
            digest.update(f"{name}:{array.shape};".encode())
            digest.update(array.tobytes())
        return digest.digest()


_SHARING = attrgetter("cp_comm", "ulysses_degree", "cp_groups", "remap", "routed")
"""What a digest has of the micro-batches on several ranks alone. A new field stands in one of the tables that follow,
of which digests have what is not at its default: plans without it keep theirs."""
_TEXTS: dict[str, Any] = {"experts": EXPERTS_AT_HOME, "merge": ()}
"""Fields of a plan that are written out, and their defaults;"""
_OF_SEQUENCES = ("groups", "trunks")
"""those that are a number for each sequence, or empty;"""
_OF_MICRO_BATCHES = {"rounds": attrgetter("round_to")}
"""and numbers of each micro-batch, 0 by default, by their names in digests."""
