"""The reference that `evenload verify` holds a DeepSpeed run against: plain training, written for the proof.

Same weights, whole sequences one after the other, Transformers' own attention and no mask, no packing, no engine, no
process group, float32. Nothing here knows of plans. Tokens go to the experts to which the run sent them, where it has
recorded that: a rounding error can turn a choice over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...core.plan.step_plan import Lengths
from ...core.recipe.recipe import Recipe
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import TokensOf
from ...runtime.world.agreement import rank_and_size
from ..host.host import Host
from ..huggingface.routes import Replayer
from ..reference.exactness import largest_error
from ..reference.textbook import norm_of
from .engine.model import build_model


class PlainModel:
    """Transformers' model of a recipe, whole on each rank. Making one is collective: it takes the host's weights.

    Args:
        recipe: of the host.
        dtype: of weights and passes, bf16 or fp64 (norms stay in float32 there); None takes float32.
    """

    def __init__(self, recipe: Recipe, host: Host, dtype: str | None = None) -> None:
        self._model = build_model(recipe, attn_implementation="sdpa", experts_implementation="eager")
        self._model.to({"bf16": torch.bfloat16, None: torch.float32, "fp64": torch.float64}[dtype])
        self._parameters = dict(self._model.named_parameters())
        for name in host.trained.frozen:
            self._parameters[name].requires_grad_(False)
        self._routers = Replayer(self._model)
        self.load(host.weights())

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, by parameter name."""
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])

    @torch.no_grad()
    def merge(self, weights: Mapping[str, Tensor], products: Mapping[str, Tensor]) -> None:
        """Take these weights, and add to linear layers, by name, these matrices; `gradients` are those of such layers,
        too."""
        self.load(weights)
        for name, product in products.items():
            parameter = self._parameters[f"{name}.weight"]
            parameter += product.to(parameter)
            parameter.requires_grad_(True)

    def of_linears(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of matrices, by the names of their layers."""
        return {name.removesuffix(".weight"): g for name, g in gradients.items() if g.dim() == 2}

    def gradients(
        self, tokens_of: TokensOf, lengths: Lengths, labels: Labels | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients, by parameter name, of the mean token loss of a global batch. Every rank computes all."""
        self._routers.differ = 0
        return plain_gradients(self._model, tokens_of, lengths, labels, self._routers)

    @property
    def turn(self) -> tuple[int, int]:
        """This rank's place among those that take sequences in turn, and their number."""
        return rank_and_size()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits after every token of a sequence [L, V]."""
        row_1L = torch.tensor([tokens], device=next(iter(self._parameters.values())).device)
        logits_LV: Tensor = self._model(input_ids=row_1L, use_cache=False).logits[0]
        return logits_LV

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Norm of the whole model's gradient."""
        return norm_of(gradients)

    def parts(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What a parameter's gradient is compared by: Transformers' projections are apart already."""
        yield name, tensor

    def route_as(self, other: PlainModel) -> None:
        """Replay the routes that another model replays."""
        self._routers.routes = other._routers.routes

    def replay_routes(self, host: Host) -> None:
        """Send tokens to the experts to which the host's last step sent them. Collective."""
        self._routers.routes = host.routes_of_all()

    @property
    def routes_differ(self) -> int:
        """Routes of the last batch that were replayed, and that this model would not have taken."""
        return self._routers.differ

    def update_routing(self, host: Host) -> list[str]:
        """Nothing differs: no router here has a state of its own."""
        return []

    def close(self) -> None:
        """Do nothing, as nothing is held outside."""


def reference(
    recipe: Recipe, host: Host, tokens_of: TokensOf, lengths: Lengths, labels: Labels | None = None
) -> tuple[float, Mapping[str, Tensor]]:
    """Loss and gradients, by parameter name, of the mean token loss of a global batch. Collective, because the weights
    are gathered from `host`; every rank then computes the whole batch."""
    return PlainModel(recipe, host).gradients(tokens_of, lengths, labels)


def plain_gradients(
    model: torch.nn.Module,
    tokens_of: TokensOf,
    lengths: Lengths,
    labels: Labels | None = None,
    routers: Replayer | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of any causal language model on whole samples, in the precision of its weights. ``labels``:
    -100 where a token carries no loss, as Hugging Face models take them; their weights are added up here once more,
    where no divisor is given. ``routers``: of the model, where they replay routes."""
    samples = [torch.as_tensor(tokens_of(i))[:n].long() for i, n in enumerate(lengths.tolist())]
    wanted = samples if labels is None else [torch.as_tensor(labels.of(i)[: len(s)]) for i, s in enumerate(samples)]
    weights = [(labels_L != -100).double() for labels_L in wanted]
    if labels is not None and labels.weights is not None:
        weights = [w * torch.tensor(labels.weights.of(i)[: len(w)]) for i, w in enumerate(weights)]
    divisor = labels.weights.set_divisor() if labels and labels.weights else None
    if divisor is None:
        divisor = sum(float(weights_L[1:].sum()) for weights_L in weights)
    model.zero_grad(set_to_none=True)
    total = 0.0
    for number, (sample, labels_L) in enumerate(zip(samples, wanted, strict=True)):
        if len(sample) < 2:
            continue
        if routers is not None:
            routers.sequence = number
        logits_TV = model(input_ids=sample[None, :-1], use_cache=False).logits[0]
        logits_TV = logits_TV.float() if logits_TV.dtype == torch.bfloat16 else logits_TV
        if labels is None or labels.weights is None:
            loss = cross_entropy(logits_TV, labels_L[1:], ignore_index=-100, reduction="sum")
        else:
            losses_T = cross_entropy(logits_TV, labels_L[1:], ignore_index=-100, reduction="none")
            loss = (losses_T.double() * weights[number][1:]).sum()
        loss = loss / divisor
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total, {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(gradients: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> float:
    """max over parameters of ||g - ref|| / ||ref||; infinite where a gradient is missing or not finite."""
    if gradients.keys() != references.keys():
        return float("inf")
    return largest_error(gradients, references).error
