"""The router of plain training: stock layers with experts, and the textbook's routing and losses of a whole sequence.

Megatron's router takes softmax and sigmoid in float32 even in a float64 model, a pack for one sequence, and adds its
losses behind autograd's back. Here they stand as in the papers that `runtime.experts.routing` names, of which nothing
is used: one sequence, its logits in the model's precision, losses as numbers that are added to that of the tokens.

Shape legend: L = tokens of the sequence, E = experts, K = experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import EvenloadError
from ...core.plan.step_plan import Lengths
from ...core.recipe.recipe import Recipe
from ...core.recipe.sections import Experts
from ...runtime.experts.routing import Routes
from .model.experts import routers


def refuse_grouped(recipe: Recipe) -> None:
    """Raise EvenloadError for losses and drops of micro-batches of several samples, which plain training lacks."""
    moe, samples = recipe.model.moe, recipe.train.micro_batch_size
    if moe is not None and samples > 1 and (moe.batch_aux_loss or moe.capacity_factor):
        raise EvenloadError(
            "plain training runs one sample after the other, and this model's routing depends on the micro-batch",
            f"train.micro_batch_size {samples}",
            "verify with train.micro_batch_size=1, or without model.moe.batch_aux_loss and capacity_factor",
        )


class TextbookRouters:
    """The routing of all layers of a stock model with experts; nothing in a dense one."""

    def __init__(self, model: Any, moe: Experts | None) -> None:
        self._layers = [_TextbookRouter(router, moe) for router in routers(model)] if moe else []
        self.routes: Routes = {}
        """To what experts the tokens of the next batches go, whatever the scores say; empty: by the scores."""

    def begin(self, lengths: Lengths, num_targets: float | None = None) -> None:
        """A global batch of sequences of these lengths; None: every token but a first one is a target."""
        num_targets = int(sum(n - 1 for n in lengths.tolist())) if num_targets is None else num_targets
        for layer in self._layers:
            layer.num_tokens, layer.num_sequences = int(lengths.sum()), len(lengths)
            layer.num_targets = num_targets
            layer.loads_E.zero_()
            layer.differ.zero_()

    def losses(self) -> Any:
        """What the sequence that has just run adds to the sum of its token losses."""
        losses = [layer.loss for layer in self._layers]
        for layer in self._layers:
            layer.loss = 0.0
        return sum(losses)

    def run(self, sequence: int) -> None:
        """The sequence that runs next."""
        for layer in self._layers:
            layer.replayed_LK = self.routes.get((layer.number, sequence))

    @property
    def routes_differ(self) -> int:
        """Routes of the batch that were replayed, and that the scores here would not have taken, of all ranks."""
        return int(sum(layer.differ for layer in self._layers))

    def finish(self, workers: dist.ProcessGroup) -> None:
        """Add up the loads of the ranks that have divided the batch. Collective."""
        for layer in self._layers:
            dist.all_reduce(layer.loads_E, group=workers)
            dist.all_reduce(layer.differ, group=workers)

    def move_biases(self) -> None:
        """As an update does, by the loads of the batch that has run."""
        for layer in self._layers:
            layer.move_bias()

    @property
    def biases(self) -> Mapping[int, Tensor]:
        """By layer, from 0, on the CPU; empty without."""
        return {layer.number: layer.bias_E.cpu().clone() for layer in self._layers if layer.bias_rate}

    def differences(self, biases: Mapping[int, Tensor]) -> list[str]:
        """The layers, in words, in which these biases are off by more than rounding in float32."""
        layers = [layer for layer in self._layers if layer.bias_rate]
        rows = [(layer, float((layer.bias_E.cpu() - biases[layer.number]).abs().max())) for layer in layers]
        return [f"bias of experts in layer {one.number}: {off:.2e}" for one, off in rows if off > one.bias_rate / 8]

    def load(self, biases: Mapping[int, Tensor]) -> None:
        for layer in self._layers:
            if layer.number in biases:
                layer.bias_E.copy_(biases[layer.number])


class _TextbookRouter:
    """Takes the place of a stock router's `routing`."""

    def __init__(self, router: Any, moe: Experts) -> None:
        self._moe, self.number = moe, router.layer_number - 1
        self.bias_rate = moe.bias_rate
        self.bias_E = torch.zeros(moe.num_experts, dtype=torch.float32, device=router.weight.device)
        self.loads_E = torch.zeros(moe.num_experts, dtype=torch.float64, device=router.weight.device)
        self.differ = torch.zeros((), dtype=torch.int64, device=router.weight.device)
        self.replayed_LK: Tensor | None = None
        self.num_tokens = self.num_sequences = 0
        self.num_targets: float = 0
        self.loss: Any = 0.0
        router.routing = self.routing

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and choices [L, E] of one sequence."""
        moe, x_LE = self._moe, logits.flatten(0, -2)
        exp_LE = (x_LE - x_LE.max(dim=1, keepdim=True).values).exp()
        s_LE = exp_LE / exp_LE.sum(dim=1, keepdim=True) if moe.score == "softmax" else 1 / (1 + (-x_LE).exp())
        chosen_LE = _largest(s_LE.detach() + (self.bias_E if self.bias_rate else 0.0), moe.topk)
        if self.replayed_LK is not None:
            replayed_LE = torch.zeros_like(chosen_LE).scatter(1, self.replayed_LK.to(x_LE.device).long(), True)
            self.differ += (replayed_LE != chosen_LE).any(dim=1).sum()
            chosen_LE = replayed_LE
        weights_LE = s_LE * chosen_LE
        if moe.score == "softmax" or moe.topk > 1:
            weights_LE = weights_LE / weights_LE.sum(dim=1, keepdim=True)
        self.loads_E += chosen_LE.sum(dim=0)
        # Without biases the largest scores are the choices, and a replayed choice is the largest score, too.
        self._add_losses(x_LE, s_LE, _largest(s_LE.detach(), moe.topk) if self.bias_rate else chosen_LE)
        if moe.capacity_factor:
            kept_LE = _within_capacity(weights_LE.detach(), moe)
            weights_LE, chosen_LE = weights_LE * kept_LE, chosen_LE & kept_LE
        return weights_LE, chosen_LE

    def _add_losses(self, x_LE: Tensor, s_LE: Tensor, largest_LE: Tensor) -> None:
        moe, (length, num_experts) = self._moe, s_LE.shape
        if moe.z_loss:
            z_loss = x_LE.exp().sum(dim=1).log().square().sum() / self.num_tokens
            self.loss = self.loss + moe.z_loss * z_loss * self.num_targets
        if moe.sequence_aux_loss or moe.batch_aux_loss:
            f_E = num_experts / (moe.topk * length) * largest_LE.sum(dim=0).double()
            p_E = (s_LE / s_LE.sum(dim=1, keepdim=True)).mean(dim=0)
            balance = (f_E * p_E).sum()
            of_sequences = moe.sequence_aux_loss * self.num_targets / self.num_sequences
            # Megatron weighs a micro-batch by its tokens, and divides by the targets of the batch.
            self.loss = self.loss + (of_sequences + moe.batch_aux_loss * length) * balance

    def move_bias(self) -> None:
        """b_e <- b_e + rate sign(mean load - load of e)."""
        mean = self.loads_E.mean()
        for expert, load in enumerate(self.loads_E.tolist()):
            self.bias_E[expert] += self.bias_rate * ((load < mean) * 1.0 - (load > mean) * 1.0)


def _largest(scores_LE: Tensor, number: int) -> Tensor:
    """bool [L, E]: whether a score is among the largest of its row."""
    places_LE = scores_LE.argsort(dim=1, descending=True).argsort(dim=1)
    return places_LE < number


def _within_capacity(weights_LE: Tensor, moe: Experts) -> Tensor:
    """bool [L, E]: of each expert the tokens with the largest weights, as many as its capacity."""
    capacity = -int(-len(weights_LE) * moe.topk / moe.num_experts * moe.capacity_factor // 1)
    return _largest(weights_LE.T, capacity).T
