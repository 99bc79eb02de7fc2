"""Megatron-LM's functional tests as recipes: their flags, the fewest ranks for them, and what becomes of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Flags = dict[str, Any]

OF_GPT = ("gpt", "moe", "mixtral", "nemotron")
"""Folders of recipes that build a GPTModel."""


@dataclass(frozen=True)
class FunctionalTest:
    """A functional test of Megatron-LM."""

    kind: str
    name: str
    flags: Flags
    variables: dict[str, str]
    mode: str


@dataclass(frozen=True)
class Verdict:
    """What happens to a recipe, and the words that go with it."""

    recipe: str
    kind: str
    verdict: str
    why: str = ""
    detail: str = ""


def recipes(checkout: Path) -> list[FunctionalTest]:
    """Those of a checkout that have a micro-batch size."""
    folder = checkout / "tests" / "functional_tests" / "test_cases"
    read = []
    for path in sorted(folder.glob("*/*/model_config.yaml")):
        content = yaml.safe_load(path.read_text())
        flags = content.get("MODEL_ARGS") or {}
        if "--micro-batch-size" in flags:
            variables = {name: str(value) for name, value in (content.get("ENV_VARS") or {}).items()}
            mode = content.get("MODE") or "pretraining"
            read.append(FunctionalTest(path.parts[-3], path.parts[-2], flags, variables, mode))
    return read


def words(flags: Flags) -> list[str]:
    """The command line that upstream's test runner makes of the flags, without its shell."""
    line: list[str] = []
    for name, value in flags.items():
        if value is False or value is None:
            continue
        text = "" if value is True or value == "true" else str(value).replace("\\", "").strip('"')
        text = text.replace("${REPEAT}", "1")
        if text.startswith("[") and not text.startswith("[["):
            text = text[1:-1].replace(",", " ")
        line += [name, *([text] if text.startswith(("(", "[")) else text.split())]
    return line


def world_size(flags: Flags) -> int:
    """The fewest ranks, 8 at least, on which the layout of the flags fits."""
    stages = size_in(flags, "pipeline-model-parallel-size")
    tp = size_in(flags, "tensor-model-parallel-size")
    one = tp * stages * size_in(flags, "context-parallel-size")
    experts = size_in(flags, "expert-model-parallel-size") * size_in(flags, "expert-tensor-parallel-size", tp) * stages
    ranks = one
    while ranks < 8 or ranks % experts:
        ranks += one
    return ranks


def size_in(flags: Flags, name: str, default: int = 1) -> int:
    """The number after a flag."""
    word = str(flags.get(f"--{name}", default)).split()[0]
    return int(word) if word.isdigit() else default
