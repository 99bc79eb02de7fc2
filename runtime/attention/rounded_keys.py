"""Keys and values as integers of 8 or 4 bits, by token and head.

    s = (max x - min x) / (2^bits - 1),  q = round((x - min x) / s),  |x - (s q + min x)| <= s / 2

Each key is rounded once, when it is written, and whoever attends reads it so: what is drawn does not depend on when. It
is what another model would draw, though. After TurboMind (arXiv 2508.15601), section on attention of mixed precision.

Shape legend: T = tokens, G = key/value heads, D = head dimension, X = bytes of a head: D, or D / 2.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KeyBits = Literal["int8", "int4"]
_LEVELS = {"int8": 255, "int4": 15}


def rounded_keys(x_TGD: Tensor, bits: KeyBits) -> tuple[Tensor, Tensor]:
    """Integers [T, G, X], of 4 bits the first half of a head in the lower ones; steps and least values [T, G, 2]."""
    x_TGD = x_TGD.to(torch.promote_types(x_TGD.dtype, torch.float32))
    least_TG1, most_TG1 = x_TGD.aminmax(dim=-1, keepdim=True)
    step_TG1 = (most_TG1 - least_TG1) / _LEVELS[bits]
    q_TGX = ((x_TGD - least_TG1) / step_TG1.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.uint8)
    if bits == "int4":
        low, high = q_TGX.chunk(2, -1)
        q_TGX = low | high << 4
    return q_TGX, torch.cat([step_TG1, least_TG1], -1)


def restored_keys(q_TGX: Tensor, ranges_TG2: Tensor, bits: KeyBits, dtype: torch.dtype) -> Tensor:
    """What integers stand for [T, G, D]; of any further dimensions."""
    q_TGD = torch.cat([q_TGX & 15, q_TGX >> 4], -1) if bits == "int4" else q_TGX
    return torch.addcmul(ranges_TG2[..., 1:], q_TGD.to(ranges_TG2.dtype), ranges_TG2[..., :1]).to(dtype)
