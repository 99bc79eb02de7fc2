"""Writes ratios of a bench into docs/benchmarks/figures.json, from which the README's figures come.

    evenload bench recipes/slices.yaml --against whole,in_order --json | python benchmarks/figures.py slices \
        --page cpu_2026-11-20.md --command "evenload bench recipes/slices.yaml --against whole,in_order"

One entry for each baseline, "slices/whole" and so on: the ratio of tokens per second over all steps, the page of
docs/benchmarks that has machine and versions, and the command. A test holds the README to the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "docs" / "benchmarks" / "figures.json"


def entries(name: str, result: dict[str, Any], page: str, command: str) -> dict[str, dict[str, str]]:
    """The figures of a ``bench --json``."""
    about = {"page": page, "command": command}
    ratios = {baseline: ratio["of_totals"] for baseline, ratio in result["ratio"].items()}
    return {f"{name}/{baseline}": {"value": f"{ratio:.2f}x", **about} for baseline, ratio in ratios.items()}


def written(figures: dict[str, dict[str, str]]) -> str:
    """The text of figures.json, a line for each figure."""
    lines = [f" {json.dumps(name)}: {json.dumps(figure)}" for name, figure in figures.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--page", required=True)
    parser.add_argument("--command", required=True)
    arguments = parser.parse_args()
    figures = json.loads(FIGURES.read_text())
    figures |= entries(arguments.name, json.load(sys.stdin), arguments.page, arguments.command)
    FIGURES.write_text(written(figures))


if __name__ == "__main__":
    main()
