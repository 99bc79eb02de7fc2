"""The sizes of a transformer that decide what it costs."""

from __future__ import annotations

from typing import NamedTuple


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

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of one layer."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        return attention + (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size

    def linear_values(self, tp: int = 1) -> float:
        """Values per token and layer that go into the products with weights (QKV, output, MLP) and come out of them.

        Of ``tp`` tensor-parallel ranks each has a part, but for what enters and leaves a block.
        """
        parts = 2 * self.query_size + 2 * self.kv_size + (2 + self.gated) * self.ffn_hidden_size
        return 4 * self.hidden_size + parts / tp

    @property
    def weights(self) -> int:
        """Weights that every token multiplies: all layers and the output layer, not the embedding."""
        return self.num_layers * self.layer_weights + self.hidden_size * self.vocab_size

    @property
    def parameters(self) -> int:
        """All weights, the embedding among them (norms and biases left out: below 0.1 %)."""
        return self.weights + self.hidden_size * self.vocab_size
