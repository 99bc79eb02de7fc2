"""Ids of the Hugging Face Hub where a folder or a file is wanted: nothing is downloaded, and this says what does."""

from __future__ import annotations

import os
import re

_ID = re.compile(r"[\w.-]+/[\w.-]+")


def or_download(do: str, key: str, name: str | os.PathLike[str], kind: str = "") -> str:
    """What to do about a missing place, and where its name may be an id of the Hub what fetches it. ``kind``: of `hf
    download`, for other things than models."""
    text = os.fspath(name)
    owner, _, repository = text.partition("/")
    if not _ID.fullmatch(text) or os.path.exists(owner):
        return do
    option = f"--repo-type {kind} " if kind else ""
    return (
        f"{do}; evenload downloads nothing: of an id of the Hugging Face Hub run `hf download {text} {option}"
        f"--local-dir {repository}`, then set {key}={repository}"
    )
