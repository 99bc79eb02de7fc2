"""Pipeline: in which order chunks run at every stage, and what is recomputed there (InfiniPipe)."""

from ...core.plan.branches import RECOMPUTED, REORDERED
from ...core.registry import Baseline, Baselines, Estimates, Needs, Shown, StepPlugin, register
from . import baselines, config, plan, settings

register(
    StepPlugin(
        name="pipeline",
        summary="chunks of equal time, in which order each stage runs them and what it recomputes",
        papers=("InfiniPipe, arXiv 2509.21275", "Zero Bubble Pipeline Parallelism, arXiv 2401.10241"),
        stage=40,
        config=config.PipelineConfig,
        decides=frozenset({"places", "orders"}),
        plan=plan.plan,
        tries=lambda layout: {"enabled": (True,), "v_shape": (False, True)} if layout.pp > 1 else {"enabled": (False,)},
        shown=Shown("orders, PP > 1", by=(REORDERED, RECOMPUTED)),
        baselines=Baselines(
            {name: Baseline(rule) for name, rule in baselines.BASELINES.items()},
            simpler="fixed_chunks",
            breaks=settings.breaks,
        ),
        needs=Needs(branches=settings.branches),
        # One core of a 2.5 GHz Xeon: 0.25 s for 64 sequences on 8 stages, 0.4 s for 512 on 4.
        estimates=Estimates(
            work_s=lambda sequences, ranks, stages: (
                (stages > 1) * (4e-3 * min(50, sequences) + 1e-4 * sequences * stages)
            )
        ),
    )
)
