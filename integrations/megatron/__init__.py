"""evenload in Megatron-Core. Nothing is imported from it, or patched, until one of these names is used."""

if __name__ != "evenload.integrations.megatron":
    raise ImportError(
        f"{__name__}: import this package as evenload.integrations.megatron; a second copy would mean a second registry"
    )

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...core.recipe.recipe import Recipe
    from ...runtime.world.world import World
    from .base.plane import open_plane
    from .batch import Batch, PlannedBatches, forward_step, run_batch, token_loss
    from .host import MegatronHost
    from .model.attention import PackedCoreAttention, PlannedSeqParams, packed_layer_spec, seq_params
    from .model.rope import TokenRope, use_token_positions
    from .plain import PlainModel, grad_rel_err, reference
    from .reduction import Reduction

_HOMES = {
    "batch": ("Batch", "PlannedBatches", "forward_step", "run_batch", "token_loss"),
    "host": ("MegatronHost",),
    "model.attention": ("PackedCoreAttention", "PlannedSeqParams", "packed_layer_spec", "seq_params"),
    "model.rope": ("TokenRope", "use_token_positions"),
    "plain": ("PlainModel", "grad_rel_err", "reference"),
    "base.plane": ("open_plane",),
    "reduction": ("Reduction",),
}

__all__ = [  # noqa: RUF022
    "open_host",
    "Batch",
    "MegatronHost",
    "PackedCoreAttention",
    "PlainModel",
    "PlannedBatches",
    "PlannedSeqParams",
    "Reduction",
    "TokenRope",
    "forward_step",
    "grad_rel_err",
    "open_plane",
    "packed_layer_spec",
    "reference",
    "run_batch",
    "seq_params",
    "token_loss",
    "use_token_positions",
]


def open_host(recipe: "Recipe", world: "World") -> "MegatronHost":
    """A `MegatronHost` for this process. Raises EvenloadError for a missing or unsupported Megatron-Core or recipe."""
    from .base.setup import check_host, check_recipe

    check_recipe(recipe)
    check_host()
    from .host import MegatronHost, MegatronWeights
    from .tenants import MegatronTenants

    return MegatronHost(recipe, world, MegatronTenants if recipe.adapts else MegatronWeights)


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
