"""Megatron-LM's own unit tests, with evenload's plugins on against its CPU bridge alone.

    python benchmarks/hosts/unit_tests.py CHECKOUT [--files FILE,...] [--ranks 1] [--limit 600] [--json] [--out FILE]

CHECKOUT is a folder of Megatron-LM. Each file runs twice by ``evenload run``, with a recipe that enables nothing and
with packing and pipeline, under the same stand-ins for CUDA (tests/hosts/startup/megatron_lm.py). Many tests want a
GPU, Transformer Engine or more ranks and fail both times: what counts is the list of tests whose outcomes differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import ROOT, columns, main, options
from evenload.commands.tables.show import stdout_aside

sys.path.append(str(ROOT / "tests" / "hosts"))
import launching

FILES = [
    *("pipeline_parallel/test_schedules.py", "transformer/test_transformer_block.py", "transformer/test_attention.py"),
    *("transformer/test_mlp.py", "models/test_gpt_model.py"),
]
RECIPES = {
    "bridge": "trainer: megatron\n",
    "plugins": "trainer: megatron\nplugins:\n  packing: {enabled: true}\n  pipeline: {enabled: true}\n",
}
PLUGIN = '''
"""What upstream's tests ask a machine at their start: an asset of the network, Transformer Engine's version."""

import os

import megatron.core.utils as utils
import torch
from packaging.version import Version

utils._te_version = utils.get_te_version() or Version("0.0")
torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
import tests.test_utils.python_scripts.download_unit_tests_dataset as assets


def not_here(**_):
    raise ImportError("no network")


assets.download_and_extract_asset = not_here
'''

Outcomes = dict[str, str]


def outcomes(report: Path) -> Outcomes:
    """How each test of a report ended: passed, failed, error or skipped."""
    if not report.exists():
        return {}
    ended = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        ended[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
    return ended


def differing(bridge: Outcomes, plugins: Outcomes) -> list[str]:
    """``test: passed, failure`` for each test that did not end the same way twice."""
    names = sorted(bridge.keys() | plugins.keys())
    ends = [(name, bridge.get(name, "missing"), plugins.get(name, "missing")) for name in names]
    return [f"{name}: {one}, {other}" for name, one, other in ends if one != other]


def run(checkout: Path, file: str, recipe: str, folder: Path, ranks: int, limit_s: float) -> Outcomes:
    """The outcomes on rank 0 of a file of tests under a recipe."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "asked_of_machine.py").write_text(PLUGIN)
    script = folder / "run_tests.py"
    script.write_text("import pytest, sys\nsys.exit(pytest.main(sys.argv[1:]))\n")
    variables = launching.megatron_environment(folder, checkout / "pretrain_gpt.py")
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(folder)])
    variables["LOCAL_RANK"] = "0"
    words = [
        *["-q", "-p", "no:cacheprovider", "-p", "asked_of_machine", "--tb=line", "-o", "addopts=", "--rootdir"],
        checkout,
    ]
    words += [f"--junitxml={folder}/report.xml", checkout / "tests" / "unit_tests" / file]
    launching.launch(
        script, words, folder, folder / "recipe.yaml", "forks", ranks=ranks, variables=variables, limit_s=limit_s
    )
    return outcomes(folder / "report.xml")


def rows(asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for every file."""
    checkout = asked.checkout.resolve()
    results = []
    for file in asked.files:
        ran = {
            name: run(checkout, file, recipe, folder / name / Path(file).stem, asked.ranks, asked.limit)
            for name, recipe in RECIPES.items()
        }
        counts = {name: Counter(ends.values()) for name, ends in ran.items()}
        results.append({"file": file, **counts, "differ": differing(*ran.values())})
        print(f"{file}: {counts}", file=sys.stderr)
    return results


def table(result: dict[str, Any]) -> Any:
    """The result for a person."""

    def ended(name: str) -> Any:
        kinds = ("passed", "failure", "error", "skipped")
        return lambda row: ", ".join(f"{row[name].get(kind, 0)} {kind}" for kind in kinds)

    cells = {"file": "{file}", **{name: ended(name) for name in RECIPES}, "differ": lambda row: len(row["differ"])}
    below = "\n".join(line for row in result["rows"] for line in row["differ"])
    return columns("Megatron-LM's unit tests", result["rows"], cells, below)


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    with stdout_aside(), tempfile.TemporaryDirectory(prefix="unit-tests-") as folder:
        return {"rows": rows(asked, asked.keep or Path(folder))}


if __name__ == "__main__":
    own = options(__doc__, files=FILES, ranks=1, limit=600.0, keep=Path)
    own.add_argument("checkout", type=Path, metavar="CHECKOUT")
    main(own, benchmark, table)
