"""A sample of a script's own batch, once more alone in a row, next to what the script's own step made of it.

The model runs the sample by itself, from position 0. Its output layer gets the hidden states of the script's step too,
so what the script's loss asked of each token is compared with what cross-entropy of the next token would ask of the
very same state: whatever the script's code looks like, its gradient there says which target it trained, and by how
much it counts. What came to the embeddings is compared with the script's own gradients brought back through the sample
alone.

Shape legend: L = tokens of the sample, H = width of the hidden state.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from ...integrations.transformers.conditions import as_if_without_dropout, embedded
from ...integrations.transformers.proof import differences
from .borders import SampleSpan
from .watched import Seen, causal_model_of, paused

OFFSETS = {1: "the next token", 0: "the token itself", 2: "the token after the next"}
"""What a token's state may be trained to predict, by how far it lies ahead."""


class Compared(NamedTuple):
    """A sample in the script's step against the same sample alone; all on the host."""

    hidden_L: Tensor
    """How far hidden states are apart, relative."""
    embedded_L: Tensor
    """How far the gradients at the embeddings are."""
    trained_L: Tensor
    """Whether the script's loss asks anything of a token's state."""
    targets_L: dict[int, Tensor]
    """By `OFFSETS`: how far what is asked is from any multiple of what that target would ask."""
    counts_L: Tensor
    """By what the token's loss is multiplied, if its target is the next token."""
    losses_L: Tensor
    """Cross-entropy of the next token in the script's step; 0 at the last token."""
    alone_L: Tensor
    """The same, alone."""


def compared(one: Seen, span: SampleSpan, positions_L: Tensor | None = None) -> Compared:
    """Run a sample of a call alone; ``positions_L``: at these instead of from 0."""
    row, start, stop = span
    assert one.hidden_BTH is not None
    assert one.slopes_BTH is not None
    tokens_1L, own_1LH = (
        one.arguments["input_ids"][row : row + 1, start:stop],
        one.hidden_BTH[row : row + 1, start:stop],
    )
    leaf_1LH, slopes_LH, alone = own_1LH.detach().requires_grad_(), one.slopes_BTH[row, start:stop], []

    def beside(_: Any, __: Any, output: Any) -> Any:
        alone.append(output[0])
        both = torch.cat([leaf_1LH, output[0].detach()])
        if isinstance(output, tuple):
            return (both, *output[1:])
        output.last_hidden_state = both
        return output

    causal, where = causal_model_of(one.decoder), {} if positions_L is None else {"position_ids": positions_L[None]}
    device, dtype, enabled = one.autocast
    with ExitStack() as stack:
        stack.enter_context(paused())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        stack.enter_context(as_if_without_dropout(causal, tokens_1L.device))
        leaves = stack.enter_context(embedded(causal))
        stack.callback(one.decoder.register_forward_hook(beside).remove)
        logits_2LV = causal(input_ids=tokens_1L, use_cache=False, **where).logits
    logits_2LV = logits_2LV.to(torch.promote_types(logits_2LV.dtype, torch.float32))
    losses_L, alone_L = (pad(_losses(logits_LV.detach(), tokens_1L[0], 1), (0, 1)) for logits_LV in logits_2LV)
    asked = {offset: _asked(logits_2LV[0], tokens_1L[0], offset, leaf_1LH) for offset in OFFSETS}
    counts_L, off = _counts(slopes_LH, asked[1]), {offset: _off(slopes_LH, own) for offset, own in asked.items()}
    wanted = torch.autograd.grad(alone[0], leaves, slopes_LH[None].to(alone[0].dtype))
    embedded_L = torch.zeros(stop - start)
    if one.embedded_BTH is not None and bool(slopes_LH.any()):
        embedded_L = differences(one.embedded_BTH[row, start:stop], wanted[0][0])
    return Compared(
        differences(own_1LH[0], alone[0][0].detach()).cpu(),
        embedded_L.cpu(),
        slopes_LH.abs().amax(1).cpu() > 0,
        {offset: value.cpu() for offset, value in off.items()},
        counts_L.cpu(),
        losses_L.cpu().double(),
        alone_L.cpu().double(),
    )


def _losses(logits_LV: Tensor, tokens_L: Tensor, offset: int) -> Tensor:
    last = len(tokens_L) - offset
    return cross_entropy(logits_LV[: max(0, last)], tokens_L[offset:], reduction="none")


def _asked(logits_LV: Tensor, tokens_L: Tensor, offset: int, leaf_1LH: Tensor) -> Tensor:
    """What cross-entropy of the token so far ahead asks of each state [L, H]."""
    loss = _losses(logits_LV, tokens_L, offset).sum() + 0 * logits_LV.sum()
    return torch.autograd.grad(loss, leaf_1LH, retain_graph=True)[0][0].double()


def _counts(slopes_LH: Tensor, asked_LH: Tensor) -> Tensor:
    squares_L = asked_LH.pow(2).sum(1)
    return torch.where(squares_L > 0, (slopes_LH.double() * asked_LH).sum(1) / squares_L.clamp(min=1e-300), 0.0)


def _off(slopes_LH: Tensor, asked_LH: Tensor) -> Tensor:
    """How far slopes are from positive multiples of these."""
    counts_L = _counts(slopes_LH, asked_LH).clamp(min=0.0)
    return differences(counts_L[:, None] * asked_LH, slopes_LH.double())
