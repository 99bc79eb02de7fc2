"""Experts divided over groups of neighbouring ranks by DeepSpeed's AutoEP, under the names that Transformers has.

The model is built whole on every rank, as the seed gives it; then AutoEP puts a layer of its own in the place of each
block with experts and keeps this rank's part of them, ``[E / ep, ...]`` of ``[E, ...]``, E experts of a layer. Tokens
travel to their experts and back in every pass, so that the ranks of a group run all passes together.

    Transformers                          AutoEP
    mlp.experts.gate_up_proj [E, 2F, H]   mlp.experts.w1 and .w3 [E / ep, F, H]
    mlp.experts.down_proj    [E, H, F]    mlp.experts.w2 [E / ep, H, F]
    mlp.gate.weight          [E, H]       mlp.router.gate.weight

Gradients of experts are summed over the ranks that hold the same ones; tokens of the others in the group have reached
them already. What is compared, saved by name or counted in a norm is whole: by the number that an expert has in the
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups
from torch import Tensor
from transformers.utils import output_capturing
from wrapt import FunctionWrapper

from ....core.errors import EvenloadError
from ....core.recipe.recipe import Recipe
from ....runtime.attributes import with_attributes
from ...host.versions import describe_version

try:
    from deepspeed.module_inject.auto_ep_comm import COMM_BACKEND
    from deepspeed.module_inject.auto_ep_config import PRESET_MODELS
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
except ImportError:  # older versions: no model has such a layer, or it exchanges tokens in another way
    COMM_BACKEND, PRESET_MODELS, AutoEPMoELayer = "", {}, type("AutoEPMoELayer", (torch.nn.Module,), {})

_ALIGNED = 8
"""Values of bfloat16 in 16 bytes."""
__all__ = ["COMM_BACKEND", "AutoEPMoELayer"]


def preset_of(model_type: str) -> str | None:
    """AutoEP's preset for a kind of Hugging Face model; None where it has none."""
    return next((name for name, preset in PRESET_MODELS.items() if model_type in preset.hf_model_types), None)


def has_whole_rows(recipe: Recipe) -> bool:
    """Whether rows of experts' matrices are whole 16 bytes in bfloat16, as torch's grouped product wants them."""
    return not any(size % _ALIGNED for size in (recipe.model.hidden_size, recipe.model.expert_ffn_size))


def section(recipe: Recipe, model: Any) -> dict[str, Any]:
    """What a ds_config says of AutoEP for a recipe; nothing without ``parallel.ep``. Raises EvenloadError: AutoEP has
    no preset for the model."""
    if recipe.parallel.ep == 1:
        return {}
    if not PRESET_MODELS:
        raise EvenloadError(
            "this version of DeepSpeed has no AutoEP whose exchange of tokens evenload knows",
            f"parallel.ep {recipe.parallel.ep}, {describe_version('deepspeed')}",
            "pip install 'deepspeed>=0.19.7', or set parallel.ep=1: every rank then has all experts",
        )
    kind = model.config.model_type
    preset = preset_of(kind)
    if preset is None:
        known = sorted({name for one in PRESET_MODELS.values() for name in one.hf_model_types})
        raise EvenloadError(
            f"DeepSpeed's AutoEP cannot divide the experts of the model '{kind}'",
            f"parallel.ep {recipe.parallel.ep}; it knows {', '.join(known)}",
            "set parallel.ep=1: every rank then has all experts",
        )
    # The grouped product is CUDA's, in bfloat16.
    grouped = recipe.train.dtype == "bf16" and torch.cuda.is_available() and has_whole_rows(recipe)
    return {
        "expert_parallel": {
            "enabled": True,
            "autoep_size": recipe.parallel.ep,
            "preset_model": preset,
            "use_grouped_mm": grouped,
            "load_balance_coeff": None,
        }
    }


def parameter_groups(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """The groups of an optimizer: matrices are decayed, vectors are not; divided experts apart, as DeepSpeed's ZeRO
    wants them marked. Frozen parameters are in none."""
    by_kind: dict[tuple[str | None, bool], dict[str, Any]] = {}
    for parameter in (p for p in parameters if p.requires_grad):
        name = parameter.group_name if is_moe_param(parameter) else None  # type: ignore[attr-defined]
        decays = len(getattr(parameter, "ds_shape", parameter.shape)) >= _MATRIX
        of_experts = {} if name is None else {"moe": True, "name": name}
        fresh = {"params": [], "weight_decay": weight_decay if decays else 0.0, **of_experts}
        by_kind.setdefault((name, not decays), fresh)["params"].append(parameter)
    return [by_kind[key] for key in sorted(by_kind, key=lambda key: (key[0] or "", key[1]))]


_OF_EXPERTS = {"w1": "gate_up_proj", "w2": "down_proj", "w3": "gate_up_proj"}
_MATRIX = 2
_EPSILON = 1e-6
"""Added to a norm by which gradients are divided, as torch does."""


def expert_ranks(module: torch.nn.Module) -> int:
    """Over how many ranks AutoEP divides the experts of a model; 1 where it does not."""
    return next((layer.ep_size for layer in module.modules() if isinstance(layer, AutoEPMoELayer)), 1)


class DividedExperts:
    """The layers of AutoEP in an engine's model."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        named = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, AutoEPMoELayer))
        self._layers = dict(named)
        self._device = device
        self.group: Any = next(iter(self._layers.values())).ep_group
        """Of the ranks that share this rank's tokens."""

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of all parameters of this rank, by AutoEP's names, as those of the whole model by Transformers', on
        the CPU. Collective."""
        result: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            prefix, rest = self._split(name)
            if rest == "experts.w1":
                gate, up = self._gather(tensor), self._gather(tensors[f"{prefix}.experts.w3"])
                result[self.name_in_model(name)] = torch.cat([gate, up], dim=1)
            elif rest == "experts.w2":
                result[self.name_in_model(name)] = self._gather(tensor)
            elif rest != "experts.w3":
                result[self.name_in_model(name)] = tensor
        return result

    def name_in_model(self, name: str) -> str:
        """Transformers' name for the parameter in which AutoEP's is."""
        prefix, rest = self._split(name)
        if not rest:
            return name
        last = _OF_EXPERTS.get(rest.removeprefix("experts."))
        return f"{prefix}.experts.{last}" if last else f"{prefix}.{self._renamed(prefix, rest)}"

    def square_of(self, gradients: Mapping[str, Tensor | None]) -> float:
        """The sum of all squares of gradients of this rank's parameters, each expert of the model once. Collective."""
        squares = {True: 0.0, False: 0.0}
        for name, gradient in gradients.items():
            if gradient is not None:
                squares[self._split(name)[1].startswith("experts.")] += float(gradient.detach().double().norm()) ** 2
        of_experts = torch.tensor(squares[True], dtype=torch.float64, device=self._device)
        dist.all_reduce(of_experts, group=self.group)
        return squares[False] + float(of_experts)

    def clip(self, parameters: Mapping[str, torch.nn.Parameter], most: float) -> None:
        """Clip the gradients of this rank's parameters by the norm of the whole model's. Collective.

        DeepSpeed's own for float32 under ZeRO 0 takes the mean of the ranks' norms, each over the rank's own experts.
        """
        norm = math.sqrt(self.square_of({name: p.grad for name, p in parameters.items()}))
        if norm + _EPSILON > most:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(most / (norm + _EPSILON))

    def close(self) -> None:
        """Forget the groups of ranks: DeepSpeed would lay out the next engine of this process by the largest of all."""
        for known in (groups._get_expert_parallel_group_dict(), groups._get_expert_data_parallel_group_dict()):
            known.clear()

    def _split(self, name: str) -> tuple[str, str]:
        """The layer of AutoEP that a parameter is in, and its name there; both empty outside of one."""
        return next(((p, name[len(p) + 1 :]) for p in self._layers if name.startswith(f"{p}.")), ("", ""))

    def _renamed(self, prefix: str, rest: str) -> str:
        preset = PRESET_MODELS[self._layers[prefix].model_family]
        first, _, last = rest.partition(".")
        names = {
            "router": preset.router_pattern,
            "shared_experts": preset.shared_experts_pattern,
            "shared_experts_gate": preset.shared_experts_gate_pattern,
        }
        return f"{names.get(first, first)}.{last.removeprefix('gate.') if first == 'router' else last}"

    def _gather(self, part: Tensor) -> Tensor:
        """All experts, gathered from what each rank has of its own: [E / ep, ...] to [E, ...]."""
        own = part.to(self._device).contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts).cpu()


@contextmanager
def registry_by_name() -> Iterator[None]:
    """Transformers' registry of what its classes record takes models, since 5.23; AutoEP looks classes up by their
    names, which it takes inside."""
    registry = output_capturing._CanRecordRegistry
    get, put = FunctionWrapper(registry.get, get_by_name), FunctionWrapper(registry.__setitem__, set_by_name)
    with with_attributes(registry, get=get, __setitem__=put):
        yield


def get_by_name(wrapped: Any, registry: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`dict.get` for the name of a class, else what Transformers does."""
    return dict.get(registry, *args) if isinstance(args[0], str) else wrapped(*args, **kwargs)


def set_by_name(wrapped: Any, registry: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`dict.__setitem__` for the name of a class, else what Transformers does."""
    if isinstance(args[0], str):
        dict.__setitem__(registry, *args)
    else:
        wrapped(*args, **kwargs)
