"""Lora: many tenants on one frozen base, each trained exactly as if alone (LobRA)."""

if __name__ != "evenload.plugins.lora":
    raise ImportError(
        f"{__name__}: import this package as evenload.plugins.lora; a second copy would mean a second registry"
    )

from ...core.plan.branches import OF_TENANTS
from ...core.registry import Shown, SlicePlugin, register
from . import config, plan

register(
    SlicePlugin(
        name="lora",
        summary="adapters of many tenants over one frozen base, in shared micro-batches",
        papers=("LobRA, arXiv 2509.01193",),
        stage=50,
        config=config.LoraConfig,
        plan=plan.plan,
        shown=Shown("tenants", by=(OF_TENANTS,)),
        adapts=True,
        clashes=("moe",),
    )
)
