"""What the ranks of an expert-parallel group tell each other in every layer before a token moves.

A rank that runs another pass, or another plan, than its peers would exchange tokens with them that do not belong
together, or wait for ever. Counts of tokens are gathered in each layer anyway; a header of five numbers rides on them:
two of the plan's digest, the number of the pass among those of the step that exchange, the layer, and a checksum of all
quotas of the step so far. Ranks whose headers differ are named, before a token moves; on a device the headers come to
the host along with the sizes of the exchange, for which the dispatcher waits anyway. While experts exchange, the rank's
mark says in which layer, so that a rank that hangs or dies there is named together with it. Where one rank has all
experts nothing is told: its tokens are counted, no more.

Shape legend: R = ranks of a group, E = experts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...core.aliases import Ints, Ranks
from ...core.errors import RankError
from ...core.experts.quotas import LayerPlanner, at_home
from ...core.plan.expert_policy import EXPERTS_AT_HOME, ExpertPolicy
from ..attention.copy_rows import ToHost, copy_rows
from ..measure.busy import cpu_clock
from .balance import CopyReport, ExpertBalance, Shares

COUNT_HEADER = 5
"""Numbers that stand before the counts."""


class Load(NamedTuple):
    """What the ranks of a group sent to the experts of a layer in one pass, padding and dummies left out."""

    number: int
    """Of the pass, among those of the step that exchange tokens."""
    layer: int
    """Of the whole model, from 0."""
    counts: tuple[int, ...]
    """Tokens of this rank for each expert."""
    imbalance: float
    """Tokens for the busiest rank of the group over those for its mean rank, every expert at its home."""
    imbalance_after: float
    """The same as the ranks computed them, by the layer's quotas."""
    copies: int = 0
    """Of experts, on all ranks of the group together."""
    copied_bytes: int = 0
    """Weights of experts that this rank took in."""
    exposed_s: float = 0.0
    """Seconds for which this rank waited for these weights."""
    failed: str = ""
    """Why the layer's planner gave no quotas, so that its experts stayed at home; empty where it did."""


class ExpertGate:
    """The headers and marks of one rank, and the loads of its step.

    Args:
        ranks: the world ranks of its group, in the group's order.
        place: this rank's among them.
        sharded: between passes each rank has a piece of every expert, and fetches its own ones, too.
        parts: in how many parts the ranks divide the experts; neighbouring ranks may share a part. 0: one each.
    """

    def __init__(self, ranks: Ranks, place: int, *, sharded: bool = False, parts: int = 0) -> None:
        self._ranks = ranks
        self._place = place
        self._parts = parts or len(ranks)
        self._recorded: list[_Recorded] = []
        self._taken: tuple[_Recorded, bool] | None = None
        """Of the pass that `check` has not seen, and whether the pass counts."""
        self._clock = cpu_clock()
        self._moments: list[float] = []
        """When layers with experts began and ended."""
        self._balance = ExpertBalance(place, sharded)
        self._number, self._where = -1, "a pass"
        self._digest = b"\0" * 16
        self._mark: Callable[[str], None] = lambda _: None
        self.once_ranks = 0
        """Neighbouring ranks to which, as a node, a token goes once; 0: it goes once to each of its experts."""

    def begin(self, digest: bytes, mark: Callable[[str], None], policy: ExpertPolicy, planner: LayerPlanner) -> None:
        """Before the first pass of a step that runs the plan of this digest (16 bytes) and policy; ``planner``: the
        planner of layers that the policy names."""
        self._digest, self._mark = digest, mark
        self._number, self._recorded = -1, []
        self._taken = None
        self._balance.begin(policy, planner)
        self.once_ranks = policy.node_ranks if policy.once_topk else 0
        self._moments = [self._clock()]

    def begin_unplanned(self) -> None:
        """Before a forward of no plan, where one rank has all experts: nothing is kept of forwards before it."""
        self.begin(b"", lambda _: None, EXPERTS_AT_HOME, at_home)

    def enter(self, where: str) -> None:
        """Before each pass that exchanges tokens; ``where`` is what the watchdog says of it."""
        self._number, self._where = self._number + 1, where

    def at_layer(self, layer: int) -> None:
        """Before the experts of a layer, forward or backward."""
        self._moments.append(self._clock())
        self._mark(f"{self._where}, experts of layer {layer}")

    def behind_layer(self) -> None:
        """After the experts of a layer, forward or backward."""
        self._moments.append(self._clock())
        self._mark(self._where)

    def mark_around(self, experts: nn.Module, layer: int) -> Callable[[], None]:
        """Let the mark say while the experts of a layer run, forward and backward, until the function that is returned
        is called. ``experts``: takes hidden states first, and gives new ones, alone or first."""

        def begin(_: Any, __: Any) -> None:
            self.at_layer(layer)

        def end(_: Any, inputs: tuple[Tensor, ...], outputs: Tensor | tuple[Tensor, ...]) -> None:
            self.behind_layer()
            output = outputs if isinstance(outputs, Tensor) else outputs[0]
            if output.requires_grad and inputs[0].requires_grad:
                output.register_hook(lambda _: self.at_layer(layer))  # type: ignore[no-untyped-call]
                inputs[0].register_hook(lambda _: self.behind_layer())  # type: ignore[no-untyped-call]

        hooks = experts.register_forward_pre_hook(begin), experts.register_forward_hook(end)

        def undo() -> None:
            for hook in hooks:
                hook.remove()

        return undo

    def with_header(self, layer: int, sent_E: Tensor, counted_E: Tensor) -> Tensor:
        """This rank's header before its counts of a layer, int64 [5 + 2 E].

        ``sent_E``: tokens for each expert; ``counted_E``: those among them that are no padding and no dummies.
        """
        digest = struct.unpack("<qq", self._digest.ljust(16, b"\0")[:16])
        header = np.array([*digest, self._number, layer, self._balance.checksum], dtype=np.int64)
        there = copy_rows({"header": header}, sent_E.device)["header"]
        return torch.cat([there.to(sent_E.dtype), sent_E, counted_E])

    def take(self, layer: int, rows: Tensor, *, record: bool) -> Tensor:
        """What all ranks of the group send [R, E], from what `with_header` gives on each [R, 5 + 2 E]; to be `check`ed
        before a token moves.

        ``record``: whether the pass counts: of passes that run a second time one does.
        """
        counted = COUNT_HEADER + (rows.shape[1] - COUNT_HEADER) // 2
        self._taken = _Recorded(self._number, layer, ToHost(rows), counted), record
        return rows[:, COUNT_HEADER:counted]

    def check(self) -> Tensor | None:
        """What was taken, on the host; None where it has been checked. Raises RankError where a rank runs another plan,
        pass or layer than this one."""
        if self._taken is None:
            return None
        (taken, record), self._taken = self._taken, None
        rows = taken.rows.read()
        headers = [tuple(row) for row in rows[:, :COUNT_HEADER].tolist()]
        if len(set(headers)) > 1:
            words = [f"rank {rank} {_in_words(header)}" for rank, header in zip(self._ranks, headers, strict=True)]
            raise RankError(
                "ranks that share experts run different passes",
                f"{'; '.join(words[:8])}; this rank: {self._where}",
                "give every rank the same recipe and data, and run its passes in the order of the plan",
            )
        if record:
            self._recorded.append(taken)
        return rows[:, COUNT_HEADER : taken.counted]

    def shares(self, layer: int, *, record: bool) -> Shares | None:
        """Which rank computes which of the tokens that were taken; None where each goes to its expert's home and finds
        it there, which is still to be checked. ``record`` as in `take`."""
        if self._balance.at_home:
            return None
        sent_RE = self.check()
        assert sent_RE is not None, "counts are taken before they are shared"
        shares = self._balance.shares(layer, sent_RE.numpy())
        if record:
            report = None if shares is None else shares.report
            self._recorded[-1] = self._recorded[-1]._replace(report=report, failed=self._balance.failed)
        return shares

    def record(self, layer: int, counted_RE: Tensor) -> None:
        """Note what the ranks have for the experts of a layer in this pass, padding and dummies left out."""
        self._recorded.append(_Recorded(self._number, layer, ToHost(counted_RE)))

    @property
    def stretches_s(self) -> tuple[float, ...]:
        """Seconds of compute on the CPU between all beginnings and ends of layers with experts, of the step so far."""
        moments = [*self._moments, self._clock()]
        return tuple(end - start for start, end in pairwise(moments))

    @property
    def loads(self) -> list[Load]:
        """Loads of the step's passes so far that were recorded."""
        return [self._load(one, one.rows.read()[:, one.counted :].numpy()) for one in self._recorded]

    def _load(self, recorded: _Recorded, counted_RE: Ints) -> Load:
        loads_R = counted_RE.sum(axis=0).reshape(self._parts, -1).sum(axis=1)
        mean = float(loads_R.mean())
        imbalance = float(loads_R.max()) / mean if mean else 1.0
        counts = tuple(counted_RE[self._place].tolist())
        after = CopyReport(imbalance) if recorded.report is None else recorded.report
        return Load(recorded.number, recorded.layer, counts, imbalance, **asdict(after), failed=recorded.failed)


class _Recorded(NamedTuple):
    number: int
    layer: int
    rows: ToHost
    """Of each rank."""
    counted: int = 0
    """Where in a row the tokens begin that are no padding and no dummies."""
    report: CopyReport | None = None
    failed: str = ""


def _in_words(header: tuple[int, ...]) -> str:
    digest = struct.pack("<qq", *header[:2]).hex()[:12]
    return f"runs pass {header[2]} of plan {digest}, layer {header[3]}, quotas so far {header[4]:08x}"
