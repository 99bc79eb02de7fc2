"""Packages of kernels that only CUDA has, as if they were installed: flash-attn and Transformer Engine.

Each function takes what the real one of that version takes (`signatures`), refuses what its kernel refuses, and
computes by a reference: flash-attn by torch's flash kernels (`kernels`), Transformer Engine by the stand-in of the
trainers' tests, to which its fused Adam is added.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .ledger import inside_a_kernel, refuse
from .signatures import signature
from .storages import on_device

VERSIONS = {"flash_attn": "2.8.3.post2", "transformer_engine": "2.9.0"}
"""What is installed where nobody says otherwise: the newest, and the one that Megatron-Core 0.16.1 asks for."""
calls: Counter[str] = Counter()
"""Calls by function, as `signatures` names it."""


def as_of(package: str, name: str, run: Callable[..., Any], method: bool = False) -> Callable[..., Any]:
    """`run`, called by the names that the package's function has; what that version does not know is refused."""
    known = signature(package, name)

    @wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        own, args = (args[:1], args[1:]) if method else ((), args)
        try:
            bound = known.bind(*args, **kwargs)
        except TypeError as error:
            raise refuse(f"{package} {name}: {error}") from error
        calls[name] += 1
        return run(*own, **bound.arguments)

    return checked


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Any, return_softmax: bool,
) -> tuple[Any, ...]:  # fmt: skip
    if dropout_p or softcap or alibi_slopes is not None or return_softmax:
        raise refuse("flash_attn: what the stand-in does not compute")
    window = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    out, lse, state, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale, **window
    )
    return out, lse, None, state


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Any, deterministic: bool, rng_state: Any = None,
) -> Tensor:  # fmt: skip
    if softmax_lse.dtype != torch.float32 or not softmax_lse.is_contiguous():
        raise refuse("flash_attn: the logsumexp of a backward")
    window = {"window_size_left": window_size_left, "window_size_right": window_size_right}
    grads = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], 0.0, causal, softmax_lse,
        softmax_lse, scale=softmax_scale, **window,
    )  # fmt: skip
    for target, grad, like in zip((dq, dk, dv), grads, (q, k, v), strict=True):
        if target.shape != like.shape or target.dtype != q.dtype or target.stride(-1) != 1:
            raise refuse("flash_attn: a gradient to write to")
        target.copy_(grad)
    return softmax_lse


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        *borders, scale, causal, left, right = rest
        window = {"window_size_left": left, "window_size_right": right}
        ctx.options, ctx.rest = {"scale": scale, **window}, (*borders, 0.0, causal)
        out, lse, state, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *borders, 0.0, causal, False, **ctx.options
        )
        ctx.save_for_backward(q, k, v, out, lse, state)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, state = ctx.saved_tensors
        grads = torch.ops.aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, lse, *ctx.rest, state, state, **ctx.options
        )
        return (*grads, *[None] * 8)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    for borders, longest, rows in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
        with inside_a_kernel():
            lengths = borders.cpu().diff().tolist()
        if not isinstance(longest, int) or max(lengths) > longest or sum(lengths) != len(rows):
            raise refuse(f"flash_attn: {lengths} of {len(rows)} rows, the longest {longest}")
    if dropout_p:
        if not 0 < dropout_p < 1:
            raise refuse(f"flash_attn: dropout {dropout_p}")
        q = torch.nn.functional.dropout(q, 0.0)  # drawn by nobody: what counts is that it is asked for
    borders = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _Varlen.apply(q, k, v, *borders, softmax_scale, causal, *window_size)


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled decay, its step in the groups, its moments in float32."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        adam_w_mode: bool = True, bias_correction: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode, self.bias_correction = adam_w_mode, bias_correction

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        assert self.adam_w_mode
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                if p.dtype not in (torch.float16, torch.bfloat16, torch.float32):
                    raise refuse("FusedAdam only support fp16 and bf16.")
                if not (on_device(p) and on_device(p.grad)):
                    raise refuse("fused Adam of a parameter on the host")
                self._update(p, p.grad.float(), group)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2), step = self.state[p], group["betas"], group["step"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, dtype=torch.float32) for _ in range(2))
        state["exp_avg"].lerp_(grad, 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        whole = [1 - b**step if self.bias_correction else 1.0 for b in (b1, b2)]
        update = state["exp_avg"] / whole[0] / ((state["exp_avg_sq"] / whole[1]).sqrt() + group["eps"])
        p.sub_(group["lr"] * (update + group["weight_decay"] * p.float()))


def applied(op: Callable[..., Any], noop_flag: Tensor, tensor_lists: list[list[Tensor]], *args: Any) -> Any:
    """`multi_tensor_applier`."""
    tensors = [x for several in tensor_lists for x in several]
    if not all(map(on_device, (noop_flag, *tensors))) or noop_flag.dtype != torch.int32:
        raise refuse(f"{op.__name__} of tensors on the host")
    calls[op.__name__] += 1
    return op(noop_flag, tensor_lists, *args)


def multi_tensor_l2norm(_: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    norms = torch.stack([x.float().norm() for x in tensor_lists[0]])
    return norms.norm().view(1), None


def multi_tensor_scale(_: Tensor, tensor_lists: list[list[Tensor]], scale: Any) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def general_gemm(A: Tensor, B: Tensor, workspace: Any = None, out_dtype: Any = None, layout: str = "TN",
                 bias: Any = None, **_: Any) -> tuple[Tensor, ...]:  # fmt: skip
    """Columns first, as cuBLAS: TN is B A^T, NN is B A, NT is B^T A."""
    if not (on_device(A) and on_device(B)) or out_dtype == torch.float64:
        raise refuse("general_gemm: dtype or device")
    a, b = A.to(out_dtype), B.to(out_dtype)
    out = {"TN": lambda: b @ a.T, "NN": lambda: b @ a, "NT": lambda: b.T @ a}[layout]()
    return (out if bias is None else out + bias, None, None, None)


def _transformer_engine(version: str) -> dict[str, dict[str, Any]]:
    path = Path(__file__).parents[1] / "integrations/megatron/te_standin.py"
    spec = importlib.util.spec_from_file_location("te_standin", path)
    standin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(standin)
    package, attention = f"transformer_engine {version}", standin.DotProductAttention
    kinds = {"linear.py": standin.Linear, "layernorm_linear.py": standin.LayerNormLinear}
    for file, kind in {**kinds, "attention.py": attention}.items():
        for name in ("__init__", "forward"):
            run = as_of(package, f"{file}:{kind.__name__}.{name}", getattr(kind, name), method=True)
            setattr(kind, name, run)
    forward = attention.forward

    def on_gpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not all(map(on_device, args[:3])):
            raise refuse("DotProductAttention only supports CUDA tensors.")
        with inside_a_kernel():
            return forward(self, *args, **kwargs)

    attention.forward = on_gpu
    FusedAdam.__init__ = as_of(package, "fused_adam.py:FusedAdam.__init__", FusedAdam.__init__, True)
    modules = dict(standin._MODULES)
    modules[""] = {"__version__": version}
    modules["pytorch.optimizers"] = {
        "FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD, "multi_tensor_applier": applied,
        "multi_tensor_l2norm": multi_tensor_l2norm, "multi_tensor_scale": multi_tensor_scale,
    }  # fmt: skip
    gemm = as_of(package, "gemm.py:general_gemm", general_gemm)
    modules |= {"pytorch.cpp_extensions": {"general_gemm": gemm}, "pytorch.module": {}}
    modules["pytorch.module.base"] = {"TransformerEngineBaseModule": standin.Linear}
    router = "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"
    modules["pytorch.router"] = dict.fromkeys(router, standin.Missing)
    modules["pytorch.module.base"] |= {"get_workspace": lambda: None} if version < "2.11" else {}
    return modules


def _flash_attn(version: str) -> dict[str, dict[str, Any]]:
    package = f"flash_attn {version}"
    runs = {"flash_attn_varlen_func": _varlen}
    if version >= "2.7":
        runs |= {"_flash_attn_forward": _flash_forward, "_flash_attn_backward": _flash_backward}
    functions = {name: as_of(package, f"flash_attn_interface.py:{name}", run) for name, run in runs.items()}
    return {"": {"__version__": version, **functions}, "flash_attn_interface": functions}


class _Distributions(importlib.metadata.DistributionFinder):
    """Says which versions are installed."""

    def __init__(self, versions: dict[str, str]) -> None:
        self._versions = versions

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Any:
        return [_Distribution(name, self._versions[name]) for name in self._versions if name == context.name]


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def install(**versions: str) -> None:
    """Let these versions be installed; before a host is imported."""
    makers = {"flash_attn": _flash_attn, "transformer_engine": _transformer_engine}
    for package, version in versions.items():
        for name, contents in makers[package](version).items():
            full = ".".join(filter(None, (package, name)))
            module = types.ModuleType(full)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
            vars(module).update(contents)
            sys.modules[full] = module
            parent, _, last = full.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)
    sys.meta_path.append(_Distributions(versions))
