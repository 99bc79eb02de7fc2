"""A stand-in for Transformer Engine 2.5: modules with the real ones' signatures, in plain torch and any dtype.

`install` puts it where Megatron-Core imports Transformer Engine from, and must run before that import. What Megatron
never calls in a training step is left out, so that a call of it fails. What the real kernels refuse is refused here.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from itertools import pairwise
from typing import Any

import torch
from torch import nn

calls: list[str] = []
"""The format of each call of attention."""


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
    ):
        super().__init__()
        assert not attention_dropout, "the stand-in draws nothing"
        assert cp_group is None
        self.widths = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.scale = self.widths[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = self.widths
        self.window_size, self.heads = window_size, num_attention_heads // tp_size
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.groups = (num_gqa_groups or num_attention_heads) // tp_size

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
    ):
        qkv_format, attn_mask_type = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        calls.append(qkv_format)
        assert attention_mask is None
        assert core_attention_bias is None
        assert "causal" in attn_mask_type
        q, k, v = query_layer, key_layer, value_layer
        assert q.shape[-2:] == (self.heads, self.widths[0]), (q.shape, self.heads, self.widths)
        assert k.shape[-2:] == (self.groups, self.widths[0])
        assert v.shape[-2:] == (self.groups, self.hidden_size_per_attention_head_v)
        if qkv_format == "sbhd":
            assert attn_mask_type == "causal"
            assert cu_seqlens_q is None
            outs = [self._attend(*(x[:, row] for x in (q, k, v))) for row in range(q.shape[1])]
            return torch.stack(outs, dim=1).flatten(2)
        assert qkv_format == "thd"
        assert all(x.dim() == 3 for x in (q, k, v)), "queries, keys and values are 3D where qkv_format is thd"
        assert attn_mask_type == "padding_causal", "thd wants a padding mask"
        assert cu_seqlens_q_padded is None
        assert cu_seqlens_kv_padded is None
        for borders, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_kv, max_seqlen_kv)):
            assert borders.dtype == torch.int32
            assert borders.device == q.device
            assert isinstance(longest, int)
            assert int(borders.diff().max()) <= longest
            assert [0, len(q)] == [int(borders[0]), int(borders[-1])]
        assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
        outs = [self._attend(*(x[a:b] for x in (q, k, v))) for a, b in pairwise(cu_seqlens_q.tolist())]
        return torch.cat(outs).flatten(1)

    def _attend(self, q, k, v):
        """One sample: [n, H, D]."""
        k, v = (x.repeat_interleave(self.heads // self.groups, dim=1) for x in (k, v))
        behind = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(q), device=q.device)
        unseen = behind < 0
        if self.window_size is not None and self.window_size[0] >= 0:
            unseen |= behind > self.window_size[0]
        scores = (torch.einsum("nhd,mhd->hnm", q, k) * self.scale).masked_fill(unseen, -torch.inf)
        return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)


def _norm(x, weight, bias, eps):
    if bias is None:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    return nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


class RMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        device=None,
    ):
        super().__init__()
        hidden_size = normalized_shape or hidden_size
        assert not zero_centered_gamma
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype)), None, eps
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return _norm(x, self.weight, self.bias, self.eps)


class LayerNorm(RMSNorm):
    def __init__(self, *shape, **rest):
        super().__init__(*shape, **rest)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = self.weight.sequence_parallel


class Linear(nn.Module):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device=None,
        ub_name=None,
        rng_tracker_name=None,
        symmetric_ar_type=None,
    ):
        super().__init__()
        assert not fuse_wgrad_accumulation
        out_features //= tp_size if parallel_mode == "column" else 1
        in_features //= tp_size if parallel_mode == "row" else 1
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else None
        self.parallel_mode, self.return_bias, self.use_bias = parallel_mode, return_bias, bias
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.in_features, self.out_features = in_features, out_features
        if get_rng_state_tracker is None:
            init_method(self.weight)
        else:
            with get_rng_state_tracker().fork(*([rng_tracker_name] if rng_tracker_name else [])):
                init_method(self.weight)
        if parallel_mode is not None:
            self.weight.tensor_model_parallel = True
            self.weight.partition_dim, self.weight.partition_stride = int(parallel_mode == "row"), 1
        if bias and parallel_mode == "row":
            self.bias.sequence_parallel = sequence_parallel

    def forward(self, inp, is_first_microbatch=None, fp8_output=False):
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode == "column":
            gather = mappings.gather_from_sequence_parallel_region
            inp = gather(inp) if self.sequence_parallel else mappings.copy_to_tensor_model_parallel_region(inp)
        out = inp @ self.weight.T
        if self.parallel_mode == "row":
            scatter = mappings.reduce_scatter_to_sequence_parallel_region
            out = scatter(out) if self.sequence_parallel else mappings.reduce_from_tensor_model_parallel_region(out)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        normalization="LayerNorm",
        return_layernorm_output=False,
        zero_centered_gamma=False,
        **rest,
    ):
        super().__init__(in_features, out_features, **rest)
        assert not return_layernorm_output
        assert not zero_centered_gamma
        self.eps, dtype = eps, self.weight.dtype
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=dtype))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=dtype))
        if normalization == "RMSNorm":
            self.layer_norm_bias = None
        for parameter in filter(lambda p: p is not None, (self.layer_norm_weight, self.layer_norm_bias)):
            parameter.sequence_parallel = rest["sequence_parallel"]

    def forward(self, inp, is_first_microbatch=None, fp8_output=False):
        return super().forward(_norm(inp, self.layer_norm_weight, self.layer_norm_bias, self.eps))


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    assert fused
    assert start_positions is None
    assert cp_size == 1
    calls.append(f"rope {tensor_format}")
    if tensor_format == "sbhd":
        angles = freqs[: len(t)]
    else:
        assert cu_seqlens.device == t.device
        assert cu_seqlens.dtype == torch.int32
        assert int(cu_seqlens.diff().max()) <= len(freqs)
        angles = torch.cat([freqs[:n] for n in cu_seqlens.diff().tolist()])[:, 0]
    rotated, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    if interleaved:
        half = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
    cos, sin = angles.cos().to(t.dtype), angles.sin().to(t.dtype)
    return torch.cat((rotated * cos + half * sin, rest), dim=-1)


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled():
        return False


class Missing:
    """What Megatron names and these tests do not use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the stand-in for Transformer Engine has no such thing")


_MODULES: dict[str, dict[str, Any]] = {
    "": {"__version__": "2.5.0"},
    "common": {},
    "common.recipe": {"DelayedScaling": Missing},
    "pytorch": {
        **{kind.__name__: kind for kind in (DotProductAttention, LayerNorm, LayerNormLinear, Linear, RMSNorm)},
        "GroupedLinear": Missing,
    },
    "pytorch.attention": {},
    "pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
    "pytorch.distributed": {
        "CudaRNGStatesTracker": Missing,
        "checkpoint": Missing,
        "activation_recompute_forward": Missing,
    },
    "pytorch.fp8": {"FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": Missing, "fp8_model_init": Missing},
    "pytorch.ops": {"Sequential": Missing, "FusibleOperation": Missing},
    "pytorch.tensor": {"QuantizedTensor": Missing},
}


def install() -> None:
    """Make ``import transformer_engine`` find this."""
    for name, contents in _MODULES.items():
        full = ".".join(filter(None, ("transformer_engine", name)))
        module = types.ModuleType(full)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
        vars(module).update(contents)
        sys.modules[full] = module
        parent, _, last = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
