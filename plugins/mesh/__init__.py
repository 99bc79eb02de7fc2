"""Mesh: how many ranks, and which, share each sequence (ByteScale HDP, FlexSP, Zeppelin)."""

from ...core.plan.branches import SHARED
from ...core.registry import Baseline, Baselines, Estimates, Needs, Shown, Sizes, StepPlugin, register
from . import baselines, bounds, config, dynamic_cp, plan, settings

register(
    StepPlugin(
        name="mesh",
        summary="every sequence on as many ranks as it deserves, by predicted time",
        papers=("ByteScale, arXiv 2502.21231", "FlexSP, arXiv 2412.01523", "Zeppelin, arXiv 2509.21841"),
        stage=30,
        config=config.MeshConfig,
        decides=frozenset({"places", "shares"}),
        plan=plan.plan,
        tries=lambda layout: {"enabled": (False, True) if layout.dp > 1 else (False,)},
        shown=Shown("shares", by=(SHARED,)),
        baselines=Baselines(
            {
                **baselines.BASELINES,
                "dynamic_cp": Baseline(dynamic_cp.dynamic_cp, sizes=Sizes(shown=1 << 20, tried=1 << 14)),
            },
            simpler="cp_1",
            quick=("memory_degree", "cp_1"),
            breaks=settings.breaks,
        ),
        needs=Needs(host={"enabled": (False,)}, order=("enabled",), branches=settings.branches),
        # One core of a 2.5 GHz Xeon: 0.07 s for 512 sequences on 64 ranks, 0.2 s on 16 of four stages, 0.9 s for 8,192
        # on 1,024, 20 s for a million on 16,384, of which one part is planned.
        estimates=Estimates(
            floor_s=bounds.lower_bound_s,
            work_s=lambda sequences, ranks, stages: (
                (1 + stages) / 2 * (1e-3 * min(50, sequences) + 1e-4 * min(1 << 16, sequences) + 1e-5 * sequences)
                + 1e-4 * ranks
            ),
        ),
    )
)
