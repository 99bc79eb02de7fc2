"""Plain training of a host's weights, for the proof that a plan changed nothing.

Nothing of the planned path is used: Megatron-Core's *stock* local layers and rotary embeddings, a model with all layers
on each rank, whole sequences one after the other in their own [1, L] batch, no pack, no plan, no DDP. Tensor
parallelism is kept as the host has it (a gradient shard is then compared with the same shard, and Megatron's
cross-entropy, float32 inside even in a float64 run, rounds alike on both sides: parity to 1e-15 is left visible).

Two liberties, neither of which the planned path shares. Sequences are dealt to all ranks of equal tensor-parallel
index and their float64 gradient sums are added up at the end. Beyond `STOCK_ATTENTION` tokens the stock core attention,
which keeps [heads, L, L] scores, is replaced by torch's scaled_dot_product_attention on the same whole sequence.
The reference of a bf16 run is computed in float32 from the bf16 weights: what bf16 would give without its rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.machine.layout import Layout
from ...core.plan.step_plan import Lengths, as_lengths
from ...core.recipe.recipe import Recipe
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import TokensOf
from ...runtime.world.agreement import everyone
from ..host.host import Host
from ..reference.exactness import largest_error
from .model.experts import layers_with_experts
from .model.gpt import build_model, transformer_config
from .model.weights import global_parameters
from .plain_experts import TextbookRouters, refuse_grouped
from .pretrained.pieces import Piece, pieces_of

STOCK_ATTENTION = 2048
"""Longest sequence [tokens] that goes through Megatron's own DotProductAttention."""


class PlainModel:
    """The stock model of a recipe, whole on each rank but for tensor parallelism. Making one is collective.

    Args:
        recipe: of the host, vocabulary size filled in.
        host: whose weights it starts from; it must live as long as the plain model.
        dtype: of weights and passes; None takes the recipe's, and float32 for a recipe in bf16.
    """

    def __init__(self, recipe: Recipe, host: Host, dtype: str | None = None) -> None:
        dtype = dtype or ("fp32" if recipe.train.dtype == "bf16" else recipe.train.dtype)
        recipe = recipe.changed({"train.recompute": False, "train.dtype": dtype})
        refuse_grouped(recipe)
        self._recipe = recipe
        self._alone, self._workers = _own_groups(host.layout)
        tp, cp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
        alone = dict.fromkeys(("pp", "ep", "expt_dp", "tp_cp", "tp_dp_cp"), self._alone)
        groups = ProcessGroupCollection(tp=tp, expt_tp=tp, tp_ep=tp, cp=cp, embd=None, pos_embd=None, **alone)
        whole = {"attention_softmax_in_fp32": False, "sequence_parallel": False}
        config = transformer_config(recipe, Layout(tp=host.layout.tp), **whole)
        model = build_model(recipe, config, first=True, last=True, packed=False, pg_collection=groups)
        self._model = model.to(host.device)
        self._config = config
        self._device = host.device
        for layer in self._model.decoder.layers:
            attention = layer.self_attention
            attention.core_attention = _ByLength(attention.core_attention, config)
        for layer in layers_with_experts(self._model):
            layer.mlp.training = False  # Megatron's layer, alone of its parts, trains on divided tokens only
        self.routers = TextbookRouters(self._model, recipe.model.moe)
        self._parameters = dict(global_parameters(self._model))
        for name in host.trained.frozen:
            self._parameters[name].requires_grad_(False)
        self.load(host.weights())
        self.routers.load(host.expert_biases())

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights, by global name; shards are those of this tensor-parallel rank."""
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])

    @torch.no_grad()
    def merge(self, weights: Mapping[str, Tensor], products: Mapping[str, Tensor]) -> None:
        """Take these weights, and add to linear layers, by their Hugging Face names, these whole matrices; `gradients`
        are those of such layers, too."""
        self.load(weights)
        for name, parameter, piece in self._pieces():
            if (product := products.get(piece.name.removesuffix(".weight"))) is not None:
                rows = piece.within(parameter)
                rows += piece.of_whole(product.to(rows)).view_as(rows)
                self._parameters[name].requires_grad_(True)

    def of_linears(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of linear layers, whole, by their Hugging Face names. Collective."""
        whole = {}
        for name, parameter, piece in self._pieces():
            if name in gradients and parameter.dim() == 2:
                gradient = gradients[name].new_zeros(piece.shape)
                rows = piece.of_whole(gradient)
                own = gradients[name].view(piece.groups, -1, parameter.shape[1])
                rows += own[:, piece.first : piece.first + len(rows) // piece.groups].reshape(rows.shape)
                if parameter.tensor_model_parallel:
                    dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
                whole[piece.name.removesuffix(".weight")] = gradient
        return whole

    def _pieces(self) -> Iterator[tuple[str, Any, Piece]]:
        rank = parallel_state.get_tensor_model_parallel_rank()
        for name, parameter in self._parameters.items():
            for piece in pieces_of(name, parameter, self._recipe, rank):
                yield name, parameter, piece

    def gradients(
        self, tokens_of: TokensOf, lengths: Lengths, labels: Labels | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of the whole model by global parameter name, float64 on the CPU. Collective.

        The loss is the sum of the losses of all target tokens / their number, as `StepResult.loss`, or by the weights
        of the labels, which are added up here once more, or over a divisor that is given. Tensor-parallel shards are
        those of this rank, so every gradient that `MegatronHost.gradients` returns here has its counterpart.
        """
        batch = list(enumerate(lengths.tolist()))
        weights = labels and labels.weights
        counts = weights.sums if weights else labels.targets if labels else None
        set_divisor = weights.set_divisor() if weights else None
        self.routers.begin(lengths, set_divisor or (None if counts is None else float(counts.sum())))
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        sums = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in trained.items()}
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        place, size = self.turn
        for number, length in batch[place::size]:
            tokens_L = torch.from_numpy(tokens_of(number)[:length]).to(self._device)
            self.routers.run(number)
            labels_L = tokens_L
            if labels is not None:
                labels_L = torch.from_numpy(labels.of(number)[:length]).to(self._device)
            weights_L = (labels_L >= 0).double()
            if weights:
                weights_L *= torch.tensor(weights.of(number)[:length]).to(self._device)
            loss_sum = self._whole_sequence(tokens_L, labels_L, weights_L)
            totals += torch.stack([loss_sum, weights_L[1:].sum()])
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    sums[name] += parameter.grad
                    parameter.grad = None
        dist.all_reduce(totals, group=self._workers)
        loss_sum, divisor = totals[0], totals[1] if set_divisor is None else set_divisor
        self.routers.finish(self._workers)
        for name, total in sums.items():
            dist.all_reduce(total, group=self._workers)
            if "q_layernorm" in name or "k_layernorm" in name:
                # Each tensor-parallel rank has its own heads' part, which Megatron sums when it finalizes.
                dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
            if ".local_experts." in name:
                # Cut experts see each token once from every tensor-parallel rank, all of which have it.
                total /= self._config.expert_tensor_parallel_size
            total /= divisor
        return float(loss_sum / divisor), {name: total.cpu() for name, total in sums.items()}

    @property
    def turn(self) -> tuple[int, int]:
        """This rank's place among those that take sequences in turn, and their number."""
        return dist.get_rank(self._workers), dist.get_world_size(self._workers)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits after every token of a sequence [L, V]. Collective over tensor-parallel ranks."""
        self.routers.begin(as_lengths([len(tokens)]))
        logits_1LV = self._forward(torch.tensor(tokens, device=self._device), runtime_gather_output=True)
        self.routers.losses()  # which nobody wants
        return logits_1LV[0]

    def _forward(self, tokens_L: Tensor, **how: Any) -> Tensor:
        length = len(tokens_L)
        mask_LL = None
        if length <= STOCK_ATTENTION:
            mask_LL = torch.ones(length, length, dtype=torch.bool, device=tokens_L.device).triu(1)[None, None]
        positions = torch.arange(length, device=tokens_L.device)[None]
        output: Tensor = self._model(tokens_L[None], positions, mask_LL, **how)
        return output

    def _whole_sequence(self, tokens_L: Tensor, labels_L: Tensor, weights_L: Tensor) -> Tensor:
        """Sum of the losses of one sequence, each times its weight, after its backward; of a negative label, and of the
        first one, there is none."""
        losses_1L = self._forward(tokens_L, labels=labels_L.clamp(min=0).roll(-1)[None])
        target_L = labels_L[1:] >= 0
        loss = (losses_1L[0, :-1][target_L].double() * weights_L[1:][target_L]).sum()
        (loss + self.routers.losses()).backward()
        return loss.detach()

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Norm of the whole model's gradient, what tensor-parallel ranks hold alike counted once. Collective."""
        squares = torch.zeros(2, dtype=torch.float64)
        for name, gradient in gradients.items():
            cut = bool(getattr(self._parameters[name], "tensor_model_parallel", False))
            squares[int(cut)] += gradient.double().square().sum().cpu()
        shards = squares[1:].to(self._device)
        dist.all_reduce(shards, group=parallel_state.get_tensor_model_parallel_group())
        return float((squares[0] + shards.cpu()[0]).sqrt())

    def parts(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What a parameter's gradient is compared by: query, key and value of a fused projection apart, for their
        gradients differ by orders of magnitude, and an error in one would drown in the norm of all three."""
        if ".linear_qkv." not in name:
            yield name, tensor
            return
        config, groups = self._config, self._config.num_query_groups // self._config.tensor_model_parallel_size
        heads = config.num_attention_heads // config.num_query_groups
        rows = tensor.reshape(groups, heads + 2, config.kv_channels, *tensor.shape[1:])
        yield f"{name} (query)", rows[:, :heads]
        yield f"{name} (key)", rows[:, heads]
        yield f"{name} (value)", rows[:, heads + 1]

    def route_as(self, other: PlainModel) -> None:
        """Take the biases of experts that another model has, and the routes that it replays."""
        self.routers.load(other.routers.biases)
        self.routers.routes = other.routers.routes

    def replay_routes(self, host: Host) -> None:
        """Send tokens to the experts to which the host's last step sent them. Collective."""
        self.routers.routes = host.routes_of_all()

    @property
    def routes_differ(self) -> int:
        """Routes of the last batch that were replayed, and that this model would not have taken."""
        return self.routers.routes_differ

    def update_routing(self, host: Host) -> list[str]:
        """Move the biases of experts by the batch that has run; in words, where the host's are others after its update.
        Collective."""
        self.routers.move_biases()
        return self.routers.differences(host.expert_biases())

    def close(self) -> None:
        """Give back its process groups. Collective."""
        dist.destroy_process_group(self._workers)
        dist.destroy_process_group(self._alone)


def reference(
    recipe: Recipe, host: Host, tokens_of: TokensOf, lengths: Lengths, labels: Labels | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one batch from the host's weights; see `PlainModel.gradients`. Collective."""
    plain = PlainModel(recipe, host)
    try:
        return plain.gradients(tokens_of, lengths, labels)
    finally:
        plain.close()


def grad_rel_err(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """max over parameters of ||g - ref|| / ||ref||, for the parameters that this rank holds; see `exactness`."""
    return largest_error(gradients, expected).error


def _own_groups(layout: Layout) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A group of this rank alone, and one of all ranks of its tensor-parallel index. Made by all ranks in one order."""
    own = parallel_state.get_tensor_model_parallel_rank()
    rows = everyone(own)
    alone = [dist.new_group([rank]) for rank in range(len(rows))]
    workers = [dist.new_group([rank for rank, tp in enumerate(rows) if tp == index]) for index in range(layout.tp)]
    return alone[dist.get_rank()], workers[own]


class _ByLength(MegatronModule):  # type: ignore[misc]
    """Stock core attention for short sequences, torch's for long ones."""

    def __init__(self, stock: Callable[..., Tensor], config: Any) -> None:
        super().__init__(config=config)
        self.stock = stock

    def forward(self, q_LBHD: Tensor, k_LBGD: Tensor, v_LBGD: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        if mask is not None:
            return self.stock(q_LBHD, k_LBGD, v_LBGD, mask, **kwargs)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_LBHD, k_LBGD, v_LBGD))
        out_BHLD = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out_BHLD.permute(2, 0, 1, 3).flatten(2)
