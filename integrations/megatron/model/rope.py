"""Rotary embeddings by the position of each token.

Megatron's RoPE for packed input restarts at every border of ``cu_seqlens``, or, where ``max_seqlen`` happens to equal
the number of tokens, runs on across all borders without a word. Here each slot of a pack brings its own position, so a
slice that starts in the middle of its sequence, a part of a sequence on another rank, and any mixture of them in one
pack need nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....runtime.attention.pack import Pack
from .attention import PlannedSeqParams


class TokenRope(nn.Module):
    """Stands in for ``GPTModel.rotary_pos_emb`` and asks it for every angle, scaling rules included.

    A micro-batch without a plan goes through to the wrapped module unchanged.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def get_rotary_seq_len(
        self, context: Any, block: Any, x: Tensor, config: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> Any:
        """What `forward` is to be asked for: the micro-batch's own parameters in place of a length, for GPTModel hands
        the answer straight to it."""
        if isinstance(packed_seq_params, PlannedSeqParams):
            return packed_seq_params
        base: Any = self.base
        return base.get_rotary_seq_len(context, block, x, config, packed_seq_params, **kwargs)

    def forward(self, wanted: Any, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Angles [T, 1, 1, D] of the slots of a pack; of yarn also its factor."""
        pack = wanted.pack if isinstance(wanted, PlannedSeqParams) else None
        if pack is None:
            return self.base(wanted, offset=offset, packed_seq=packed_seq, cp_group=cp_group)
        table = self.base(_table_length(pack), packed_seq=True)
        if isinstance(table, tuple):  # yarn's, with its factor
            return _of_slots(table[0], pack), table[1]
        return _of_slots(table, pack)

    def get_cached_cos_sin(self, wanted: Any, offset: int = 0, packed_seq: bool = False, **dtype: Any) -> Any:
        """Cosines and sines [T, 1, 1, D] each of the slots of a pack, which Megatron's fused kernels for latent
        attention ask yarn for."""
        pack, base = wanted.pack if isinstance(wanted, PlannedSeqParams) else None, self.base
        ask: Any = base.get_cached_cos_sin
        if pack is None:
            return ask(wanted, offset, packed_seq=packed_seq, **dtype)
        return tuple(_of_slots(table, pack) for table in ask(_table_length(pack), packed_seq=True, **dtype))


def _table_length(pack: Pack) -> int:
    """The base caches a table per length; powers of two keep the number of tables small."""
    longest = max((s.stop for s in pack.slices), default=1)
    return 1 << (longest - 1).bit_length()


def _of_slots(table: Tensor, pack: Pack) -> Tensor:
    return torch.index_select(table, 0, pack.positions_T.to(table.device))


def use_token_positions(model: nn.Module) -> nn.Module:
    """Give a GPTModel that was built with rotary embeddings those by token position; returns the model."""
    gpt: Any = model
    if not isinstance(gpt.rotary_pos_emb, TokenRope):
        gpt.rotary_pos_emb = TokenRope(gpt.rotary_pos_emb)
    return model
