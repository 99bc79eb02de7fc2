"""evenload on DeepSpeed: a host for planned steps, and the ``evenload`` section of a script's own ds_config.

Importing this package imports neither torch nor deepspeed; the names below do when they are first used.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if __name__ != "evenload.integrations.deepspeed":
    raise ImportError(
        f"{__name__}: import this package as evenload.integrations.deepspeed; "
        "a second copy would mean a second registry"
    )

from ...core.errors import EvenloadError

if TYPE_CHECKING:
    from ...core.recipe.recipe import Recipe
    from ...runtime.world.world import World
    from ..host.host import Host
    from .plain import PlainModel, reference

_NEEDED = ("torch", "deepspeed", "transformers")

__all__ = ["PlainModel", "open_host", "reference"]


def open_host(recipe: Recipe, world: World) -> Host:
    """A `Host` that runs plans of `recipe` on DeepSpeed. Collective.

    Raises:
        EvenloadError: DeepSpeed or Transformers is missing, or the recipe asks for what they cannot honour.
    """
    _require_packages()
    from .engine.host import DataParallelWeights, DeepSpeedHost
    from .pipeline.host import PipelineHost, PipelineWeights
    from .tenants import DataParallelTenants, PipelineTenants

    if recipe.parallel.pp > 1:
        return PipelineHost(recipe, world, PipelineTenants if recipe.adapts else PipelineWeights)
    return DeepSpeedHost(recipe, world, DataParallelTenants if recipe.adapts else DataParallelWeights)


def __getattr__(name: str) -> Any:
    if name in ("PlainModel", "reference"):
        _require_packages()
        from . import plain

        return getattr(plain, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _require_packages() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise EvenloadError(
            "trainer deepspeed needs packages that are not installed",
            ", ".join(missing),
            f"pip install {' '.join(missing)}, or use trainer: megatron",
        )
