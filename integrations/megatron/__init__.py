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
    from .batch import Batch, PlannedBatches, forward_step, run_batch, token_loss
    from .host import MegatronHost
    from .model.attention import PackedCoreAttention, PlannedSeqParams, packed_layer_spec, seq_params
    from .model.rope import TokenRope, use_token_positions
    from .plain import PlainModel, grad_rel_err, reference
    from .plane import open_plane
    from .reduction import Reduction

_HOMES = {
    "Batch": "batch",
    "MegatronHost": "host",
    "PackedCoreAttention": "model.attention",
    "PlannedBatches": "batch",
    "PlannedSeqParams": "model.attention",
    "Reduction": "reduction",
    "TokenRope": "model.rope",
    "forward_step": "batch",
    "PlainModel": "plain",
    "grad_rel_err": "plain",
    "open_plane": "plane",
    "packed_layer_spec": "model.attention",
    "reference": "plain",
    "run_batch": "batch",
    "seq_params": "model.attention",
    "token_loss": "batch",
    "use_token_positions": "model.rope",
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
    from .setup import check_host, check_recipe

    check_recipe(recipe)
    check_host()
    from .host import MegatronHost

    return MegatronHost(recipe, world)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
