"""The sizes of a transformer that decide what it costs, and what it must compute, whatever runs it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..aliases import Ints


class ExpertShape(NamedTuple):
    """Sizes of the experts of a transformer."""

    num_experts: int
    """Of a layer that has any."""
    topk: int
    """Experts of a token in each of these layers."""
    ffn_hidden_size: int
    """Of one expert."""
    shared_ffn_hidden_size: int
    """Of the shared expert, which every token takes; 0: none."""
    layers: tuple[int, ...]
    """Numbers of the layers that have experts, from 0."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def routed_per_token(self) -> int:
        """Experts that a token meets in all layers."""
        return self.topk * self.num_layers


class Shape(NamedTuple):
    """Sizes of a decoder-only transformer."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    query_size: int
    """Values of Q per token and layer, all heads."""
    kv_size: int
    """Values of K per token and layer, all key-value heads; V has as many."""
    vocab_size: int
    gated: bool
    experts: ExpertShape | None = None
    tied: bool = False
    """The output layer has the weights of the embedding."""
    heads: int = 1
    """Query heads."""

    def mlp_weights(self, ffn_hidden_size: int) -> int:
        """Weights of a feed-forward block, or of one expert, of that hidden size."""
        return (3 if self.gated else 2) * self.hidden_size * ffn_hidden_size

    @property
    def moe_layers(self) -> int:
        """How many layers have experts."""
        return self.experts.num_layers if self.experts else 0

    @property
    def head_size(self) -> int:
        """Values of a query of one head."""
        return self.query_size // self.heads

    @property
    def routed_per_token(self) -> int:
        """Experts that a token meets in all layers; 0 in a dense model."""
        return self.experts.routed_per_token if self.experts else 0

    @property
    def weights_on_all(self) -> int:
        """Weights that tensor parallelism does not divide: of norms (with their biases) and of routers."""
        norms = (2 * self.num_layers + 1) * self.hidden_size * (1 if self.gated else 2)
        routers = self.moe_layers * self.experts.num_experts if self.experts else 0
        return norms + self.hidden_size * routers

    @property
    def expert_weights(self) -> int:
        """Weights of all experts of all layers, shared ones left out: those that expert parallelism divides."""
        return self._weights_of_experts(self.experts.num_experts) if self.experts else 0

    @property
    def routed_weights(self) -> int:
        """Weights of the experts that a token is routed to, in all layers."""
        return self._weights_of_experts(self.experts.topk) if self.experts else 0

    def _weights_of_experts(self, count: int) -> int:
        assert self.experts
        return self.experts.num_layers * count * self.mlp_weights(self.experts.ffn_hidden_size)

    def linear_values(self, tp: int = 1) -> float:
        """Values per token and mean layer that go into the products with weights and come out of them.

        Products are those of QKV, output, MLP and shared experts, not those of routed experts. Of ``tp``
        tensor-parallel ranks each has a part, but for what enters and leaves a block.
        """
        moe, shared = self.moe_layers / self.num_layers, self.experts.shared_ffn_hidden_size if self.experts else 0
        units = (1 - moe) * self.ffn_hidden_size + moe * shared
        ends = 2 + 2 * (1 - moe) + 2 * moe * (shared > 0)
        parts = 2 * self.query_size + 2 * self.kv_size + (2 + self.gated) * units
        return ends * self.hidden_size + parts / tp

    @property
    def values_at_experts(self) -> int:
        """Values per token that the experts to which it is routed keep for their backward, in all layers.

        Input, what comes of the first product (and its gate), activation, with a gate two more, and what goes into the
        second product, weighed by the router.
        """
        if not self.experts:
            return 0
        return self.routed_per_token * (self.hidden_size + (6 if self.gated else 3) * self.experts.ffn_hidden_size)

    @property
    def dense_weights(self) -> int:
        """Weights that multiply every token, without its experts: layers, routers, shared experts and the output layer,
        not the embedding."""
        dense = self.num_layers * self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        dense += (self.num_layers - self.moe_layers) * self.mlp_weights(self.ffn_hidden_size)
        if self.experts:
            beside = self.mlp_weights(self.experts.shared_ffn_hidden_size) + self.hidden_size * self.experts.num_experts
            dense += self.moe_layers * beside
        return dense + self.hidden_size * self.vocab_size

    @property
    def weights(self) -> int:
        """Weights that a token multiplies, those of its experts among them."""
        return self.dense_weights + self.routed_weights

    @property
    def parameters(self) -> int:
        """All weights, the embedding and all experts among them (norms and biases left out: below 0.1 %)."""
        embedding = 0 if self.tied else self.hidden_size * self.vocab_size
        return self.dense_weights + self.expert_weights + embedding


def step_flops(shape: Shape, lengths: Ints) -> float:
    """FLOPs of forward and backward over whole sequences of ``lengths`` [S]: the numerator of MFU.

        forward   2 W n + 4 L Q n^2 / 2          backward   twice the forward

    of a sequence of n tokens, W weights that a token multiplies (those of the experts to which it is routed among them,
    the embedding not), L layers, Q values of the queries of a layer. A pair of a query and a key counts where the mask
    lets them meet: half of what Chowdhery et al. (arXiv 2204.02311, appendix B) count for attention. What runs twice
    (recomputation, replays), padding and dummies count nothing, and frozen weights count as if they were trained.
    """
    n = np.asarray(lengths, dtype=np.float64)
    forward = 2.0 * shape.weights * n.sum() + 2.0 * shape.num_layers * shape.query_size * np.square(n).sum()
    return 3.0 * float(forward)
