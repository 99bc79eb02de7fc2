"""Packing: which slices of which sequences form each micro-batch of each rank (SlimPack, Hydraulis)."""

from ...core.plan.branches import REARRANGED
from ...core.registry import Baselines, Estimates, Needs, Shown, StepPlugin, register
from . import baselines, config, delay, plan, settings

register(
    StepPlugin(
        name="packing",
        summary="slices and whole sequences into micro-batches of equal cost under a token cap",
        papers=("SlimPack, arXiv 2509.26246", "Hydraulis, arXiv 2412.07894"),
        stage=20,
        config=config.PackingConfig,
        decides=frozenset({"places", "groups"}),
        plan=plan.plan,
        tries=lambda layout: {"enabled": (True,)},
        shown=Shown("packs, slices", to_whole="packs of whole samples", by=(REARRANGED,)),
        baselines=Baselines(baselines.BASELINES, simpler="chunks", quick=("chunks",), breaks=settings.breaks),
        # One core of a 2.5 GHz Xeon: 17 ms for 512 sequences on 64 ranks, 1.4 s for 65,536 on 1,024, 5 s for a million
        # on 16,384, of which one part is planned.
        estimates=Estimates(
            work_s=lambda sequences, ranks, stages: 2e-5 * min(1 << 16, sequences) + 2e-6 * sequences + 1e-4 * ranks
        ),
        needs=Needs(
            host={"slices": ("auto", "off"), "max_delay_steps": (0,), "activation_gib": (None,)},
            order=("slices", "activation_gib"),
            # A forward that is run again counts twice in metrics that are taken inside it.
            replays={"asymmetric": False, "activation_gib": None},
            branches=settings.branches,
        ),
        hold_back=delay.hold_back,
    )
)
