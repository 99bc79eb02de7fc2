"""Data: which samples, in what proportion, with what weight, by what training shows (DataFlex)."""

from ...core import verbs
from ...core.registry import DataPlugin, Shown, register
from ...core.run_hooks import RUN_HOOKS, RunHook
from . import ado, config, mixes, mixture, neighbours, selects, weights

register(
    DataPlugin(
        name="data",
        summary="shares of domains that follow their losses; selections and weights of samples",
        papers=(
            "DataFlex, arXiv 2603.26164",
            "ODM, arXiv 2312.02406",
            "DoReMi, arXiv 2305.10429",
            "ADO, arXiv 2410.11820",
        ),
        stage=5,
        config=config.DataConfig,
        shown=Shown("policies"),
        clashes=("lora",),
        policies={
            "mix": {**mixes.MIXES, "ado": ado.ADO},
            "select": {**selects.BY_SCORE, **neighbours.BY_EMBEDDING},
            "weight": weights.WEIGHTS,
        },
        chooses=config.chosen_of,
        first_shares=mixture.first_shares,
    )
)
verbs.register(verbs.Verb("score", "evenload.plugins.data.verb:score", order=90))
RUN_HOOKS.register(
    RunHook("data", "evenload.plugins.data.hooks:hooks", refuses="evenload.plugins.data.files:refuse_policies")
)
