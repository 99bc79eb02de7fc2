"""Adapters that texts are generated with: the folder that a tenant's name means, and how they join a host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ...core.errors import EvenloadError, refuse_first, shorten
from ...core.input import reading
from ...core.recipe.recipe import Recipe
from ...core.recipe.tenant import TenantTrain
from ...integrations.host.host import Host
from ...integrations.huggingface.folders.adapter_config import ADAPTER_CONFIG
from ...integrations.huggingface.folders.adapters import ADAPTER_MODEL, read_adapter
from ...runtime.adapters.places import AdapterState
from .arrivals.preflight import out_of
from .records.output import LAST


def adapters_of(recipe: Recipe, names: Collection[str]) -> list[Path]:
    """The folder of each tenant's adapter: NAME below ``plugins.lora.out`` (``NAME/best``), or the last one in it.

    Raises EvenloadError for a recipe without tenants, and a name that has no adapter.
    """
    do = "set plugins.lora.enabled=true, or name no tenant"
    refuse_first((not recipe.adapts, "the recipe has no tenants", ", ".join(names), do))
    return [_folder(out_of(recipe), name) for name in names]


def _folder(out: Path, name: str) -> Path:
    parts = Path(name).parts
    refuse_first(
        (
            Path(name).is_absolute() or ".." in parts,
            "a tenant's name leads out of plugins.lora.out",
            shorten(name),
            "give the name of a folder below it",
        )
    )
    for folder in (out / name, out / name / LAST):
        if reading.is_file(folder / ADAPTER_MODEL):
            return folder
    detail = f"no {ADAPTER_MODEL} in {shorten(str(out / name))} or its {LAST}"
    raise EvenloadError(f"there is no adapter of tenant {shorten(name)}", detail, "name a tenant that has trained")


def files_of(folders: Iterable[Path]) -> list[Path]:
    """The files that make adapters what they are: tensors, and the config that scales them."""
    names = ADAPTER_CONFIG, ADAPTER_MODEL
    return [folder / name for folder in folders for name in names if reading.is_file(folder / name)]


def join(host: Host, folders: Sequence[Path]) -> None:
    """Let adapters join a host by their places. Collective. Raises EvenloadError for one that is of another base."""
    for number, folder in enumerate(folders):
        adapter, weights = read_adapter(folder)
        host.adapters.join(number, adapter, TenantTrain(), AdapterState(weights, {}, {}, 0))
