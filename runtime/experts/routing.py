"""Losses of a router that do not depend on how tokens are grouped: over slices, packs, micro-batches and ranks.

    z-loss (Zoph et al., arXiv 2202.08906, section 3.1), of a layer, over the N tokens of the global batch

        L = c / N  sum over tokens t of (log sum over experts e of exp x_te)^2

    sequence loss (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20), of a layer, over the S sequences of the batch

        L = c / S  sum over sequences of  sum over experts e of f_e P_e
        f_e = E / (K n) |{t : e is among the K largest of s_t}|     P_e = 1/n sum over t of s_te / (sum over i of s_ti)

    x logits [tokens, E], s scores (softmax or sigmoid of x), n tokens of a sequence, E experts, K of them for a token

Both are handed back times the number of target tokens of the batch, or times what the weights of these add up to, by
which a trainer divides the summed gradient.
Neither is added to the loss: a tensor on the way of the loss is given their gradients in the backward. A sequence's f
is complete when its first backward runs, since all its tokens have had a forward by then, and the loss is linear in s:
so each slice forms the gradient of its own s in its backward. Padding and dummies count in neither.

Shape legend: T = slots of a pack, E = experts, K = experts of a token, L = tokens of a sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...core.aliases import Floats
from ...core.errors import EvenloadError
from ...core.plan.step_plan import Lengths
from ..attention.labels import Labels, loss_divisor
from ..attention.pack import PADDING, Pack, slots_before
from ..world.plane import FIRST_TAG
from .weights import REPORTED_SEQUENCE, REPORTED_Z, LoopWeights, of_slots

COUNTS_TAG = FIRST_TAG + 7
"""Of the messages in which ranks that share a micro-batch tell how often each expert was chosen."""


UNKNOWN = -1
"""In place of the experts of a token that has had no forward here."""

Routes = dict[tuple[int, int], Tensor]
"""By layer and sequence: the experts of each token, int16 [L, K]."""


WHOLE = slice(None)
"""All slots of a pack."""


class Routed(NamedTuple):
    """What a router did with a pack."""

    pack: Pack
    layer: int
    choices_TK: Tensor
    """The K experts with the largest scores (without any bias), of all slots of the pack."""
    num_experts: int
    share: slice = WHOLE
    """The slots that this rank's router sees; those of other tensor-parallel ranks have the others."""

    def counts(self) -> Tensor:
        """How often each expert is among the choices of the pack's tokens [E]."""
        choices = torch.where(is_token(self.pack)[:, None], self.choices_TK, self.num_experts).flatten()
        return _how_often(choices, self.num_experts + 1)[:-1]


class StepRouting:
    """The routing of one step on one rank: what all layers and passes of it have in common.

    ``record``: keep the experts to which tokens go, so that another model can send its tokens there, too.
    ``labels``: which tokens are targets; routers see all tokens, and their losses are means over these all the same.
    ``weights``: those of a loop that somebody else wrote. None: both losses are means times the number of targets.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        labels: Labels | None = None,
        record: bool = False,
        weights: LoopWeights | None = None,
    ) -> None:
        self._lengths, self._weights = lengths, weights
        self.routes: Routes | None = {} if record else None
        divisor = loss_divisor(lengths, labels)
        self.per_token = divisor / max(1, int(lengths.sum()))
        self.per_sequence = divisor / max(1, len(lengths))
        """What a sum over tokens, or over sequences, is multiplied by to be a mean times the divisor of the loss."""
        self._choices: Routes = {}
        self._known: dict[tuple[int, int], npt.NDArray[np.bool_]] = {}
        """By layer and sequence: which of its tokens have had a forward here [L], on the host."""
        self._counts: dict[tuple[int, int], Tensor] = {}
        """By layer and sequence: complete counts of sequences that ranks share [E]."""

    def z_loss(
        self,
        carrier: Tensor,
        logits_TE: Tensor,
        pack: Pack,
        coefficient: float,
        *,
        share: slice = WHOLE,
        layer: int = 0,
    ) -> Tensor:
        """``carrier``, whose backward also gives ``logits_TE`` the gradient of the z-loss of the pack's tokens; of
        those in ``share``, for which the logits are. ``layer``: for a loop's report."""
        squares_T, weights = logits_TE.logsumexp(dim=-1).square(), self._weights
        if weights is None:
            loss: Tensor = (squares_T * is_token(pack)[share]).sum() * (coefficient * self.per_token)
        else:
            loss = (squares_T * of_slots(weights.token_S, pack, squares_T)[share]).sum() * coefficient
            if torch.is_grad_enabled():
                reported_T = of_slots(weights.reported_token_S, pack, squares_T)[share]
                weights.report(REPORTED_Z, layer, (squares_T.detach() * reported_T).sum())
        attached: Tensor = _Attached.apply(carrier, loss)  # type: ignore[no-untyped-call]
        return attached

    def batch_loss(self, carrier: Tensor, scores_TE: Tensor, routed: Routed, coefficient: float) -> Tensor:
        """``carrier``, whose backward also gives ``scores_TE`` the gradient of the micro-batch's balance loss, which
        weighs as much as its tokens do, as in Megatron-Core (Fedus et al., arXiv 2101.03961, section 2.2)."""
        tokens = is_token(routed.pack)[routed.share]
        counts_E, means_E = routed.counts(), (scores_TE * tokens[:, None]).sum(dim=0)
        topk, number = routed.choices_TK.shape[1], max(1, sum(s.length for s in routed.pack.slices))
        loss = (counts_E * means_E).sum() * (coefficient * routed.num_experts / (topk * number))
        attached: Tensor = _Attached.apply(carrier, loss)  # type: ignore[no-untyped-call]
        return attached

    def record(self, pack: Pack, layer: int, chosen_TK: Tensor) -> None:
        """Note to which experts the tokens of a pack go, if that is wanted."""
        if self.routes is not None:
            self._write(self.routes, pack, layer, chosen_TK)

    def sequence_loss(self, carrier: Tensor, scores_TE: Tensor, routed: Routed, coefficient: float) -> Tensor:
        """``carrier``, whose backward also gives ``scores_TE`` (each row sums to one) its part of the sequence loss."""
        self._record(routed)
        attached: Tensor = _Balanced.apply(carrier, scores_TE, self, routed, coefficient)  # type: ignore[no-untyped-call]
        return attached

    def gradient(self, routed: Routed, coefficient: float) -> Tensor:
        """Gradient of the sequence loss by the scores of a pack's slots in its share [T, E]; float64."""
        weights = None if self._weights is None else self._weights.sequence_S
        return self._by_counts(routed, coefficient, weights)

    def report(self, routed: Routed, scores_TE: Tensor) -> None:
        """Tell the loop the sequence loss of the slots in a pack's share, in whose backward this is."""
        if self._weights is not None:
            counts_TE = self._by_counts(routed, 1.0, self._weights.reported_sequence_S)
            self._weights.report(REPORTED_SEQUENCE, routed.layer, (scores_TE.detach() * counts_TE).sum())

    def _by_counts(self, routed: Routed, coefficient: float, weights_S: Floats | None) -> Tensor:
        """By what the scores of a pack's slots in its share are multiplied in the sequence loss [T, E]."""
        pack, num_experts, topk = routed.pack, routed.num_experts, routed.choices_TK.shape[1]
        gradient_TE = torch.zeros(pack.num_padded_tokens, num_experts, dtype=torch.float64, device=pack.tokens_T.device)
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            length = int(self._lengths[piece.sequence])
            weight = self.per_sequence if weights_S is None else float(weights_S[piece.sequence])
            factor = coefficient * weight * num_experts / (topk * length * length)
            counts_E = self._complete_counts(routed, piece.sequence)
            gradient_TE[first : first + piece.length] = counts_E.double() * factor
        return gradient_TE[routed.share]

    def _record(self, routed: Routed) -> None:
        """Note the choices of the pack's tokens, a second time where a pass runs again; ranks that share it exchange
        their counts."""
        self._write(self._choices, routed.pack, routed.layer, routed.choices_TK)
        for piece in routed.pack.slices:
            key = routed.layer, piece.sequence
            self._known.setdefault(key, np.zeros(self._lengths[piece.sequence], dtype=np.bool_))
            self._known[key][piece.start : piece.stop] = True
        if routed.pack.shared is not None:
            self._exchange(routed)

    def _write(self, routes: Routes, pack: Pack, layer: int, choices_TK: Tensor) -> None:
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            key = layer, piece.sequence
            if key not in routes:
                shape = int(self._lengths[piece.sequence]), choices_TK.shape[1]
                routes[key] = choices_TK.new_full(shape, UNKNOWN, dtype=torch.int16)
            routes[key][piece.start : piece.stop] = choices_TK[first : first + piece.length].to(torch.int16)
        if pack.branching:
            for piece, slots in slots_before(pack.slices, pack.segments):
                routes[layer, piece.sequence][: piece.start] = choices_TK[slots].to(torch.int16)

    def _exchange(self, routed: Routed) -> None:
        """Add up the counts of all ranks that share the micro-batch; those that are complete are kept."""
        shared, topk = routed.pack.shared, routed.choices_TK.shape[1]
        assert shared is not None
        sequences = sorted({s.sequence for s in shared.micro_batch.slices})
        own_SE = torch.stack([self._own_counts(routed, sequence) for sequence in sequences])
        peers = [rank for rank in shared.micro_batch.ranks if rank != shared.plane.rank]
        receives = [(rank, torch.empty_like(own_SE)) for rank in peers]
        theirs = shared.plane.post([(rank, own_SE) for rank in peers], receives, COUNTS_TAG).wait()
        total_SE = own_SE + sum(theirs.values())
        for sequence, counts_E, total in zip(sequences, total_SE, total_SE.sum(dim=1).tolist(), strict=True):
            if total == topk * int(self._lengths[sequence]):
                self._counts[routed.layer, sequence] = counts_E

    def _own_counts(self, routed: Routed, sequence: int) -> Tensor:
        """How often this rank has seen each expert chosen by a token of a sequence [E]."""
        choices = self._choices.get((routed.layer, sequence))
        if choices is None:
            return torch.zeros(routed.num_experts, dtype=torch.int64, device=routed.choices_TK.device)
        return _how_often(choices.flatten().long() - UNKNOWN, routed.num_experts + 1)[1:]

    def _complete_counts(self, routed: Routed, sequence: int) -> Tensor:
        counts_E = self._counts.get((routed.layer, sequence))
        if counts_E is None:
            counts_E = self._own_counts(routed, sequence)
            known = int(self._known[routed.layer, sequence].sum())
            if known < self._lengths[sequence]:
                raise EvenloadError(
                    "a backward begins before all tokens of its sequence have had a forward",
                    f"sequence {sequence}, layer {routed.layer}: {known} of {self._lengths[sequence]} tokens had one",
                    "this is a fault of evenload's schedule; please report it with the plan (evenload plan --out)",
                )
        return counts_E


def _how_often(numbers: Tensor, count: int) -> Tensor:
    """How often each of the first numbers is there, int64 [count]; `torch.bincount` would wait for the device."""
    return torch.zeros(count, dtype=torch.int64, device=numbers.device).scatter_add_(
        0, numbers.long(), torch.ones_like(numbers, dtype=torch.int64)
    )


def is_token(pack: Pack) -> Tensor:
    """bool [T]: false on padding and in a dummy."""
    return pack.sequence_ids_T != PADDING


class _Attached(torch.autograd.Function):
    """A tensor as it is; its backward starts that of a loss, too."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.like


class _Balanced(torch.autograd.Function):
    """A tensor as it is; its backward gives the scores the gradient of the sequence loss, which is known only then."""

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, scores_TE: Tensor, step: StepRouting, routed: Routed, coefficient: float
    ) -> Tensor:
        ctx.of_call = step, routed, coefficient
        ctx.save_for_backward(scores_TE)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (scores_TE,) = ctx.saved_tensors
        step, routed, coefficient = ctx.of_call
        step.report(routed, scores_TE)
        return gradient, step.gradient(routed, coefficient).to(scores_TE.dtype), None, None, None
