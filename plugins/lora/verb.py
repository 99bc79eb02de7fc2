"""`evenload lora`: how the tenants stand, from what the job that trains them has written. No job is asked."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ...commands.verbs.shared import AsJson
from ...core.errors import EvenloadError, shorten
from .state import status


def lora(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="plugins.lora.out of a job, or plugins.lora.tenants.")],
    as_json: AsJson = False,
) -> None:
    """How the tenants of a job stand: state, steps, loss, lowest loss of evaluations, tokens, time left."""
    from ...commands.tables.show import emit
    from .tables import table

    emit(standing(folder), as_json, table)


def standing(folder: Path) -> dict[str, Any]:
    """All tenants and sweeps of ``plugins.lora.out``, or of the folder that ``plugins.lora.tenants`` names.

    Raises EvenloadError for a folder without any, and for files that are damaged.
    """
    from .sweeps.ranking import rankings

    for out in status.out_of(folder):
        if paths := sorted(out.glob(f"*/{status.NAME}")):
            rows = [asdict(status.read_status(path)) for path in paths]
            sweeps = rankings(sorted(path for path in out.iterdir() if path.is_dir()))
            return {"folder": str(out), "tenants": rows, "sweeps": sweeps}
    detail = f"no */{status.NAME} in it" if folder.is_dir() else "no such folder"
    do = "give plugins.lora.out or plugins.lora.tenants of a job that has begun"
    raise EvenloadError(f"no tenant has a status in {shorten(str(folder))}", detail, do)
