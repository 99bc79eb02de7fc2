"""Packing: which slices of which sequences form each micro-batch of each rank (SlimPack, Hydraulis)."""

if __name__ != "evenload.plugins.packing":
    raise ImportError(
        f"{__name__}: import this package as evenload.plugins.packing; a second copy would mean a second registry"
    )

from ...core.plan.branches import REARRANGED
from ...core.registry import Plugin, Sizes, register
from . import baselines, config, delay, plan, settings

register(
    Plugin(
        name="packing",
        summary="slices and whole sequences into micro-batches of equal cost under a token cap",
        papers=("SlimPack, arXiv 2509.26246", "Hydraulis, arXiv 2412.07894"),
        stage=20,
        config=config.PackingConfig,
        places=True,
        keeps_groups=True,
        plan=plan.plan,
        tries=lambda layout: {"enabled": (True,)},
        does="packs, slices",
        does_to_whole="packs of whole samples",
        baselines=baselines.BASELINES,
        # What `in_order` packs more evenly is tried in small batches alone.
        costly={"karmarkar_karp": Sizes(shown=1 << 22, tried=1 << 17), "dp_balanced": Sizes(1 << 40, 1 << 14)},
        keeps=baselines.KEEPS,
        row_baselines=baselines.ROW_BASELINES,
        branches=settings.branches,
        breaks=settings.breaks,
        # One core of a 2.5 GHz Xeon: 17 ms for 512 sequences on 64 ranks, 1.4 s for 65,536 on 1,024, 5 s for a million
        # on 16,384, of which one part is planned.
        work_s=lambda sequences, ranks, stages: 2e-5 * min(1 << 16, sequences) + 2e-6 * sequences + 1e-4 * ranks,
        quick=("chunks",),
        simpler="chunks",
        shown_by=(REARRANGED,),
        needs_host={"slices": ("auto", "off"), "max_delay_steps": (0,), "activation_gib": (None,)},
        needs_order=("slices", "activation_gib"),
        # A forward that is run again counts twice in metrics that are taken inside it.
        needs_replays={"asymmetric": False, "activation_gib": None},
        hold_back=delay.hold_back,
    )
)
