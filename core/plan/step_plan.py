"""The shared vocabulary: sequences, slices, micro-batches and the plan of one step.

A `StepPlan` is computed from lengths alone and is the same on every rank. It is the one object that the planner makes,
`check` judges, the command line prints, the simulator times and the runtime executes.

Ranks in this module are *plane* ranks: positions 0 .. num_ranks-1 in the data-parallel x context-parallel plane. Peers
of a plane rank in tensor or pipeline parallelism run the same micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np


class Sequence(NamedTuple):
    """One training sample, known by its length alone."""

    index: int  # type: ignore[assignment]  # a sample's index, not tuple.index
    """Position of the sample in the global batch, 0 .. len(batch)-1."""
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

    @property
    def num_tokens(self) -> int:
        """Target-carrying tokens, without padding."""
        return sum(s.stop - s.start for s in self.slices)

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return max(1, len(self.slices) * self.pad_to if self.pad_to else self.num_tokens)


PassKind = Literal["F", "B", "W"]
"""Forward, backward, and the weight gradients of a backward that computed its input's alone (zero-bubble pipelines, Qi
et al., arXiv 2401.10241, section 2)."""


class Op(NamedTuple):
    """One entry of a stage's order: run a pass of a micro-batch. W has the number of its backward."""

    kind: PassKind
    micro_batch: int


class Beside(NamedTuple):
    """Bytes that `core.costs.memory` counts beside activations and prefix KV, for one stage of one tensor-parallel
    rank."""

    cut_saves_bytes_per_token: float = 0.0
    """Per token and layer: what a token of a cut sequence keeps less, as its K and V are in the store already; in
    micro-batches of cut sequences alone."""
    head_bytes_per_token: float = 0.0
    """Per token at the last stage: logits and what else the output layer and the loss keep for the backward."""
    head_working_bytes_per_token: float = 0.0
    """Per token at the last stage: what output layer and loss take while they run."""
    working_bytes_per_token: float = 0.0
    """Per token: what the backward of one layer takes while it runs."""
    pass_bytes: float = 0.0
    """What any pass takes while it runs, however many tokens: the gradient of one weight before it is added up."""
    gradient_bytes: float = 0.0
    """Gradients that the trainer makes in a step's first backward; 0 where they are there throughout."""


NOTHING_BESIDE = Beside()


@dataclass(frozen=True)
class Limits:
    """What the trainer and the machine allow; `check` holds every plan to it."""

    num_ranks: int
    max_tokens: int
    """Tokens (padding included) that one rank may hold in one micro-batch."""
    num_stages: int = 1
    layers_per_stage: int = 1
    equal_counts: bool = False
    """Every rank must run the same number of micro-batches (ZeRO-3, expert parallelism)."""
    max_activation_bytes: float = float("inf")
    """Activations and prefix KV that one rank of one stage may hold at once."""
    activation_bytes_per_token: float = 0.0
    """Per token and layer, kept from forward to backward when nothing is recomputed."""
    kv_bytes_per_token: float = 0.0
    """Per token and layer: K and V of a sequence that is cut, kept for its later slices."""
    kv_grad_bytes_per_token: float = 0.0
    """Per token and layer: dK and dV of a cut sequence, kept from its first backward to its last."""
    replay_bytes_per_token: float = 0.0
    """Per token and layer while a replayed micro-batch runs backward; 0 means ``activation_bytes_per_token``."""
    input_bytes_per_token: float = 0.0
    """Per token: the stage input that a replayed micro-batch keeps (the first stage has the token ids instead)."""
    beside: Beside = NOTHING_BESIDE
    whole_sequences: bool = False
    """The host runs whole sequences only, forward and backward of one micro-batch after the other."""
    heads: int = 0
    """Query heads of one tensor-parallel rank, which ranks that share heads divide; 0: not known."""
    node_ranks: int = 0
    """Neighbouring plane ranks that share a node; 0: all do."""
    splits_backward: bool = False
    """The host can run weight gradients as passes of their own (W)."""
    deferred_bytes_per_token: float = 0.0
    """Per token and layer, kept from a split backward to its W: inputs of linear layers, gradients of their outputs."""


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

    sequences: tuple[Sequence, ...]
    micro_batches: tuple[MicroBatch, ...]
    limits: Limits
    order: tuple[tuple[Op, ...], ...] = ()
    recompute: tuple[tuple[int, ...], ...] = ()
    made_by: str = ""
    """Names of the planners that shaped it, in order: ``in_order``, ``packing`` ..."""
    bound_s: float = 0.0
    """Certified lower bound on the busy time of the busiest rank [s]; 0 where none was computed."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    backward: tuple[MicroBatch, ...] = ()
    replayed: tuple[int, ...] = ()
    offload: tuple[float, ...] = ()
    """For each micro-batch of the forward the share of its inner layers' activations that waits in host memory for the
    backward; empty: none (ByteScale, arXiv 2502.21231, section 4)."""

    def passes(self, kind: PassKind) -> tuple[MicroBatch, ...]:
        """The micro-batches of a direction, by the numbers that `Op.micro_batch` has there."""
        return self.backward if kind != "F" and self.backward else self.micro_batches

    @cached_property
    def split(self) -> tuple[frozenset[int], ...]:
        """For each stage the backwards whose weight gradients are a pass of their own there; empty without an order."""
        return tuple(frozenset(op.micro_batch for op in ops if op.kind == "W") for ops in self.order)

    @cached_property
    def cut(self) -> frozenset[int]:
        """Sequences that are in more than one slice, forward or backward: those that need prefix KV."""
        lengths = {s.index: s.length for s in self.sequences}
        grouped = (*self.micro_batches, *self.backward)
        return frozenset(s.sequence for m in grouped for s in m.slices if s.stop - s.start < lengths[s.sequence])

    @cached_property
    def shared(self) -> bool:
        """Whether any micro-batch runs on several ranks."""
        return any(len(m.ranks) > 1 for m in (*self.micro_batches, *self.backward))

    @cached_property
    def in_host_schedule(self) -> bool:
        """Whether the trainer's own schedule runs it; static context parallelism is the trainer's too."""
        own = self.order or self.recompute or any(self.offload)
        return not (own or any(m.cp_comm and len(m.ranks) > 1 for m in self.micro_batches))

    @cached_property
    def orders_known(self) -> dict[int, list[list[Op]]]:
        """What `core.plan.order` has found."""
        return {}

    @cached_property
    def parts_known(self) -> dict[Any, Any]:
        """What `core.costs.memory` has found of what ranks have of the micro-batches."""
        return {}

    def revised(self, **changes: Any) -> StepPlan:
        """The same micro-batches run otherwise: another order, recomputation or offload, other replays, caps or notes.

        What the changes do not touch is not worked out again.
        """
        other = replace(self, **changes)
        known = ["cut", "slots", "num_tokens", "num_slots", "_by_rank", "shared", "parts_known"]
        known += [] if "order" in changes else ["orders_known", "split"]
        known += [] if "replayed" in changes else ["forward_of", "kept"]
        vars(other).update({name: vars(self)[name] for name in known if name in vars(self)})
        return other

    @cached_property
    def forward_of(self) -> tuple[int | None, ...]:
        """For each micro-batch of the backward pass the forward one whose activations it uses; None: replayed."""
        replayed = frozenset(self.replayed)
        if not self.backward:
            return tuple(None if j in replayed else j for j in range(len(self.micro_batches)))
        same: dict[Any, list[int]] = {}  # dummies of a rank are all alike
        for i, m in enumerate(self.micro_batches):
            same.setdefault(m[:2], []).append(i)
        stored_forwards = (None if j in replayed else same.get(m[:2]) for j, m in enumerate(self.backward))
        return tuple(found.pop(0) if found else None for found in stored_forwards)

    @cached_property
    def kept(self) -> frozenset[int]:
        """Micro-batches of the forward whose activations wait for their backward."""
        return frozenset(i for i in self.forward_of if i is not None)

    @cached_property
    def num_tokens(self) -> int:
        return sum(s.length for s in self.sequences)

    @cached_property
    def num_padded_tokens(self) -> int:
        """Tokens computed over all micro-batches, padding and dummies included."""
        return sum(self.slots["F"])

    @cached_property
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

    @cached_property
    def _by_rank(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        def indices(micro_batches: tuple[MicroBatch, ...]) -> tuple[tuple[int, ...], ...]:
            mine: list[list[int]] = [[] for _ in range(self.limits.num_ranks)]
            for index, micro_batch in enumerate(micro_batches):
                for rank in micro_batch.ranks:
                    mine[rank].append(index)
            return tuple(map(tuple, mine))

        forward = indices(self.micro_batches)
        return {"F": forward, "B": indices(self.backward) if self.backward else forward}

    def check(self) -> StepPlan:
        """Return the plan if it keeps every law; raise `PlanError` with the first broken one otherwise."""
        from ..laws import check

        check(self)
        return self

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal on two ranks exactly when the plans are."""
        grouped = (*self.micro_batches, *self.backward)
        rows = [s for m in grouped for s in m.slices]
        arrays = {
            "slices": np.array(rows, dtype=np.int64).reshape(-1, 3),
            "counts": np.array([len(m.slices) for m in grouped], dtype=np.int64),
            "ranks": np.array([r for m in grouped for r in m.ranks], dtype=np.int64),
            "degrees": np.array([len(m.ranks) for m in grouped], dtype=np.int64),
            "pads": np.array([m.pad_to for m in grouped], dtype=np.int64),
            "sequences": np.array(self.sequences, dtype=np.int64).reshape(-1, 3),
            "replayed": np.array([len(self.backward), *self.replayed], dtype=np.int64),
        }
        order = [[(op.kind, op.micro_batch) for op in stage] for stage in self.order]
        shared = [(i, m[_PLAIN:]) for i, m in enumerate(grouped) if len(m.ranks) > 1]
        digest = hashlib.blake2b(repr((order, self.recompute, self.offload, shared)).encode(), digest_size=16)
        for name, array in arrays.items():
            digest.update(f"{name}:{array.shape};".encode())
            digest.update(array.tobytes())
        return digest.digest()

    def to_json(self) -> dict[str, Any]:
        """The documented form of a step in ``plan.json``: enough to check the plan without our code."""
        from ..plan_json import step_json

        return step_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], limits: Limits | None = None) -> StepPlan:
        """Read back what `to_json` wrote, under the given limits or its own; `check` it before use.

        Raises:
            PlanError: ``data`` is no such step, or not the one that was written.
        """
        from ..plan_json import read_step

        return read_step(data, limits)


_PLAIN = MicroBatch._fields.index("cp_comm")
"""Fields before this one say all of a micro-batch on one rank."""


def sequences(lengths: Any, tenants: Any = None) -> tuple[Sequence, ...]:
    """Sequences of a global batch from their lengths [tokens]."""
    values = [int(n) for n in lengths]
    if tenants is None:
        return tuple(Sequence(i, n) for i, n in enumerate(values))
    return tuple(Sequence(i, n, int(t)) for i, (n, t) in enumerate(zip(values, tenants, strict=True)))
