"""A layer of DeepSpeed's AutoEP under quotas: slots instead of experts behind its router, copies behind own experts.

Where the plan's planner of layers gives ranks copies of experts, the layer sees slots for one pass: a rank's own
experts, then its copies (`runtime.experts.balance`). Its dispatch, its exchange of counts, its products and its sums
are AutoEP's own. Router, parameters, counts of loads and checkpoints know experts alone. All is bound to the layer's
instance and can be undone.

An expert's weights are slices of w1, w2 and w3 [E / ep, ...], so that gradients that come home are added to the whole
parameters before ZeRO sees them. ZeRO 3 has the parameters whole only while the layer's experts run, forward and
backward: there copies leave when experts begin, else as soon as the router has chosen, beside the tokens.

Shape legend: T = slots of a row, K = experts of a token, N = rows of this rank's slots, with AutoEP's padding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ....runtime.attributes import with_attributes
from ....runtime.experts.balance import Shares
from ....runtime.experts.copies import Fetch
from ....runtime.experts.owners import HomeOwner

SharesOf = Callable[[Tensor], Shares | None]
"""The choices of this rank's tokens [T, K] to the quotas of the pass; None where every expert stays at home."""


class SlottedLayer:
    """One layer, in one pass after the other.

    Args:
        shares_of: is asked behind the router.
        recomputed: whether the activations of the pass that runs are let go and computed again. Its copies then go and
            come again with them, whatever the policy keeps.
    """

    def __init__(self, layer: Any, shares_of: SharesOf, recomputed: Callable[[], bool]) -> None:
        self._layer, self._experts = layer, layer.experts
        self._shares_of, self._recomputed = shares_of, recomputed
        self._own_pass, self._own_products = layer._forward, layer.experts.forward
        self._own: int = layer.num_local_experts
        self._sharded = hasattr(layer.experts.w1, "ds_shape")
        """By ZeRO 3."""
        self._shares: Shares | None = None
        self._fetch: Fetch | None = None
        """Of the pass that is running; None without copies."""

    def bind(self) -> Callable[[], None]:
        """Let the layer ask for quotas from now on; the function that is returned undoes it."""
        undo = ExitStack()
        undo.callback(self._layer.router.register_forward_hook(self._routed).remove)
        undo.enter_context(with_attributes(self._layer, _forward=self._pass))
        undo.enter_context(with_attributes(self._experts, forward=self._products))
        return undo.close

    def _pass(self, hidden_states: Tensor) -> Any:
        """The layer's forward, behind which it knows experts again, also where a recomputation ends it early."""
        layer = self._layer
        known = {name: getattr(layer, name) for name in ("num_experts", "num_local_experts", "tokens_per_expert")}
        with with_attributes(layer, **known), with_attributes(self, _shares=None, _fetch=None):
            return self._own_pass(hidden_states)

    def _routed(self, _: Any, __: Any, routed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the router says of its tokens, with slots in the place of experts."""
        scores_TK, chosen_TK, counts_E = routed
        shares = self._shares_of(chosen_TK)
        if shares is None:
            return routed
        self._shares = shares
        if not self._sharded:
            self._fetch = self._start(shares)
        slots_TK, layer = shares.slots_of(chosen_TK), self._layer
        num_slots = shares.num_ranks * shares.slots
        layer.tokens_per_expert.add_(counts_E)
        layer.tokens_per_expert = layer.tokens_per_expert.new_zeros(num_slots)  # AutoEP counts slots into it
        layer.num_experts, layer.num_local_experts = num_slots, shares.slots
        return scores_TK, slots_TK, torch.bincount(slots_TK.flatten(), minlength=num_slots).to(counts_E.dtype)

    def _products(self, rows_NH: Tensor, counts: Tensor) -> Tensor:
        """The forward of AutoEP's experts, then of this rank's copies; rows behind them are padding."""
        if self._shares is None:
            own: Tensor = self._own_products(rows_NH, counts)
            return own
        fetch = self._fetch or self._start(self._shares)
        sizes = counts.tolist()
        rows_NH, _, copies = fetch.arrived(rows_NH, rows_NH.new_empty(0))
        stop = sum(sizes[: self._own])
        outputs = [self._own_products(rows_NH[:stop], counts[: self._own])]
        with fetch.saving():
            for slot, weights in enumerate(copies, self._own):
                start, stop = stop, stop + sizes[slot]
                outputs.append(self._copied(weights, rows_NH[start:stop], counts[slot : slot + 1]))
        outputs.append(torch.zeros_like(rows_NH[stop:]))
        return fetch.again_behind(torch.cat(outputs))

    def _copied(self, weights: list[Tensor], rows: Tensor, count: Tensor) -> Tensor:
        """The forward of AutoEP's experts on a copy of one, with the settings of this layer's."""
        w1, w2, w3 = (weight[None] for weight in weights)
        output: Tensor = type(self._experts).forward(
            SimpleNamespace(**vars(self._experts) | {"w1": w1, "w2": w2, "w3": w3}), rows, count
        )
        return output

    def _start(self, shares: Shares) -> Fetch:
        """Send the weights of copies, which travel while tokens do."""
        # In the order in which AutoEP's products use them: their gradients are complete in the reverse order with and
        # without copies, in which ZeRO reduces them, also among groups of which one has copies and one has none.
        by_name = {name: getattr(self._experts, name).unbind() for name in ("w1", "w3", "w2")}
        parameters = list(zip(by_name["w1"], by_name["w2"], by_name["w3"], strict=True))
        return shares.fetch(self._layer.ep_group, HomeOwner(parameters), keep=shares.keep or self._recomputed())
