"""Mesh: how many ranks, and which, share each sequence (ByteScale HDP, FlexSP, Zeppelin)."""

if __name__ != "evenload.plugins.mesh":
    raise ImportError(
        f"{__name__}: import this package as evenload.plugins.mesh; a second copy would mean a second registry"
    )

from ...core.plan.branches import SHARED
from ...core.registry import Plugin, register
from . import baselines, config, plan, settings

register(
    Plugin(
        name="mesh",
        summary="every sequence on as many ranks as it deserves, by predicted time",
        papers=("ByteScale, arXiv 2502.21231", "FlexSP, arXiv 2412.01523", "Zeppelin, arXiv 2509.21841"),
        stage=30,
        config=config.MeshConfig,
        places=True,
        plan=plan.plan,
        does="shares",
        baselines=baselines.BASELINES,
        keeps=baselines.KEEPS,
        branches=settings.branches,
        breaks=settings.breaks,
        simpler="cp_1",
        shown_by=(SHARED,),
        shares=True,
        needs_host={"enabled": (False,)},
        needs_order=("enabled",),
    )
)
