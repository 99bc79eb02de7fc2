"""Count headers, marks, loads and copies (`runtime.experts`) at the experts of an engine's model.

AutoEP's own exchange of counts tells a rank what comes to it, and nothing of what the others send each other: counts
and headers of a group are gathered before it, in a message of 5 + 2 E numbers a layer. Where every rank has all
experts, Transformers' blocks give them the choices, which are counted.

Where the plan's planner of layers gives ranks copies of experts, the layer sees slots for one pass: a rank's own
experts, then its copies (`runtime.experts.balance`). Its dispatch, its exchange of counts, its products and its sums
are AutoEP's own. Router, parameters, counts of loads and checkpoints know experts alone. All is bound to the layer's
instance and can be undone.

An expert's weights are slices of w1, w2 and w3 [E / ep, ...], so that gradients that come home are added to the whole
parameters before ZeRO sees them. ZeRO 3 has the parameters whole only while the layer's experts run, forward and
backward: there copies leave when experts begin, else as soon as the router has chosen, along with the tokens.

Shape legend: T = slots of a row, E = experts, K = experts of a token, N = rows of this rank's slots, with AutoEP's
padding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....core.errors import EvenloadError
from ....core.plan.step_plan import StepPlan
from ....core.recipe.recipe import Recipe
from ....core.registry import LayerPlugin, layer_planner
from ....runtime.attention.pack import Pack
from ....runtime.attributes import with_attributes
from ....runtime.experts.balance import Shares
from ....runtime.experts.copies import Fetch
from ....runtime.experts.gate import ExpertGate
from ....runtime.experts.owners import HomeOwner
from ....runtime.experts.routing import Routed
from ....runtime.stage.offload import layers_of
from ...host.step import Mark, no_mark
from ...huggingface.routes import blocks, num_experts_of
from .experts import COMM_BACKEND, AutoEPMoELayer


class GatedExperts:
    """The gate of all layers of a model that have experts.

    Args:
        group: the ranks that divide them; None: this rank has all.
    """

    def __init__(self, model: nn.Module, group: Any = None) -> None:
        ranks = (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))
        self.gate = ExpertGate(ranks, ranks.index(dist.get_rank()))
        self.pack: Pack | None = None
        """Whose forward runs. None in backwards: what they run again has been recorded."""
        self._group, self._num_experts = group, num_experts_of(model)
        self._undo = ExitStack()
        decoder_layers = layers_of(model)
        for number, block in blocks(model):
            self._undo.callback(self.gate.mark_around(block, number))
            self._bind(number, block, decoder_layers[number])

    def begin(self, plan: StepPlan, mark: Mark = no_mark) -> None:
        """Before the first pass of a step that runs this plan."""
        self.gate.begin(plan.digest, mark, plan.experts, layer_planner(plan.experts.planner))

    def unbind(self) -> None:
        """Leave the model as it was."""
        self._undo.close()

    def _bind(self, number: int, block: Any, decoder_layer: Any) -> None:
        """Look at the choices of a block between its router and its experts."""

        def handed(_: Any, inputs: tuple[Tensor, ...]) -> None:
            if len(inputs) > 1:  # the experts of Llama 4 get tokens alone
                self._record(number, inputs[1])

        def shares_of(chosen_TK: Tensor) -> Shares | None:
            return self._shares(number, chosen_TK)

        def recomputed() -> bool:
            return self.pack is None or getattr(decoder_layer, "gradient_checkpointing", False)

        if isinstance(block, AutoEPMoELayer):
            self._undo.callback(SlottedLayer(block, shares_of, recomputed).bind())
        else:
            self._undo.callback(block.experts.register_forward_pre_hook(handed).remove)

    def _shares(self, number: int, chosen_TK: Tensor) -> Shares | None:
        """Whose experts run where in the pass; the ranks of the group tell each other their counts."""
        if self.pack is None and not torch.is_grad_enabled():
            return None  # a forward of no plan: somebody evaluates
        record = self.pack is not None and torch.is_grad_enabled()
        sent_E = torch.bincount(chosen_TK.flatten(), minlength=self._num_experts)
        counted_E = torch.zeros_like(sent_E) if self.pack is None else self._counted(self.pack, number, chosen_TK)
        counts = self.gate.with_header(number, sent_E, counted_E)
        rows = [torch.empty_like(counts) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, counts, group=self._group)
        self.gate.take(number, torch.stack(rows), record=record)
        shares = self.gate.shares(number, record=record)
        self.gate.check()
        return shares

    def _record(self, number: int, chosen_TK: Tensor) -> None:
        if self.pack is not None and torch.is_grad_enabled():
            self.gate.record(number, self._counted(self.pack, number, chosen_TK)[None])

    def _counted(self, pack: Pack, number: int, chosen_TK: Tensor) -> Tensor:
        return Routed(pack, number, chosen_TK, self._num_experts).counts()


def gated_experts(module: Any, recipe: Recipe) -> GatedExperts | None:
    """The layers of a live model whose experts are divided, behind a gate; None where none are. Raises EvenloadError:
    they exchange tokens by other means than those that copies are made for."""
    layers = [layer for layer in module.modules() if isinstance(layer, AutoEPMoELayer) and layer.ep_size > 1]
    copying = [plugin.name for plugin in recipe.enabled_of(LayerPlugin)]
    odd = next((layer.comm_backend for layer in layers if layer.comm_backend != COMM_BACKEND), "")
    if odd and copying:
        raise EvenloadError(
            f"plugins.{copying[0]} runs on AutoEP's own exchange of tokens",
            f"ds_config: expert_parallel.comm_backend {odd}",
            f"set comm_backend to {COMM_BACKEND}, or disable the plugin",
        )
    return GatedExperts(module, layers[0].ep_group) if layers else None


class SlottedLayer:
    """One layer, in one pass after the other.

    Args:
        shares_of: is called after the router, with the choices of this rank's tokens [T, K], for the quotas of the
            pass; None where every expert stays at home.
        recomputed: whether the activations of the pass that runs are let go and computed again. Its copies then go and
            come again with them, whatever the policy keeps.
    """

    def __init__(
        self, layer: Any, shares_of: Callable[[Tensor], Shares | None], recomputed: Callable[[], bool]
    ) -> None:
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
        """The layer's forward, after which it knows experts again, also where a recomputation ends it early."""
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
        """The forward of AutoEP's experts, then of this rank's copies; rows after them are padding."""
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
