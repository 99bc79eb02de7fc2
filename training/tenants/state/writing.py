"""Small files of a job of tenants, in folders that others may write into, too."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all; a link or a pipe in its place is replaced. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(".aside")
    aside.unlink(missing_ok=True)
    with open(aside, "x") as file:
        file.write(text)
    os.replace(aside, path)
