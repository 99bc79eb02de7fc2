"""Data: which samples, in what proportion, with what weight, by what training shows (DataFlex)."""

if __name__ != "evenload.plugins.data":
    raise ImportError(
        f"{__name__}: import this package as evenload.plugins.data; a second copy would mean a second registry"
    )

from ...core.registry import DataPlugin, Shown, register
from . import ado, config, mixes, neighbours, selects, weights

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
    )
)
