"""Upstream's own Megatron-LM recipes: which of them evenload's guards accept, and why they refuse the others.

    python benchmarks/hosts/survey.py CHECKOUT [--only NAME] [--json] [--out FILE]

CHECKOUT is a folder of Megatron-LM. Its recipes are the functional tests that train or load a model by flags
(tests/functional_tests/test_cases/*/*/model_config.yaml with --micro-batch-size). The flags go through the checkout's
own argument parser, and what comes out, the configs of model and data parallelism, to the guards that evenload asks
before the first step of a run (`integrations.megatron.unmodified.refusals.supported`): nothing here decides for them.
No weights are made, and no GPU is needed: Transformer Engine, Triton and CUDA are only named.

    cut        accepted; samples may be cut, and the plan may have an order of its own
    whole      accepted; whole samples in Megatron's own schedule, and what keeps them there
    together   accepted; a loss of the routers depends on the micro-batch, so that micro-batches stay as they are, and
               plugins.moe or plugins.pipeline plan over them
    idle       the same, where neither of them can do anything: the loop runs as it is and says so
    refused    with the guard's message
    alone      inference: no training call, so that nothing is planned and nothing changes
    no parse   upstream's own parser refuses the flags on this machine
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenload.commands.tables.show import emit, grid, stdout_aside
from functional_tests import Flags, FunctionalTest, Verdict, recipes, size_in
from guards import Guards

VERDICTS = ("cut", "whole", "together", "idle", "refused", "alone", "no parse")
HARD = {
    "TP > 1": lambda flags: size_in(flags, "tensor-model-parallel-size") > 1,
    "PP > 2": lambda flags: size_in(flags, "pipeline-model-parallel-size") > 2,
    "CP > 1": lambda flags: size_in(flags, "context-parallel-size") > 1,
    "virtual stages, layouts": lambda flags: any(
        name.startswith(("--num-layers-per-virtual", "--num-virtual", "--pipeline-model-parallel-layout"))
        for name in flags
    ),
    "experts": lambda flags: "--num-experts" in flags,
    "latent attention": lambda flags: "--multi-latent-attention" in flags,
    "multi-token prediction": lambda flags: "--mtp-num-layers" in flags,
    "CUDA graphs": lambda flags: any("cuda-graph" in name for name in flags),
    "FSDP": lambda flags: any("fsdp" in name for name in flags),
}
"""What a count of flags alone took for a refusal when evenload had 41 recipes after two further flags, and none as
they are. It counts inference and models that are no GPT as trained ones."""


def by_flags(read: Iterable[FunctionalTest]) -> dict[str, int]:
    """Recipes with each of `HARD`, and with none of them."""
    counts = Counter(name for recipe in read for name, has in HARD.items() if has(recipe.flags))
    return {**{name: counts[name] for name in HARD}, "none of them": sum(_plain(recipe.flags) for recipe in read)}


def table(result: dict[str, Any]) -> Any:
    """The result for a person: counts by kind and verdict, and every reason."""
    rows = [Verdict(**row) for row in result["rows"]]
    verdicts = VERDICTS
    kinds = sorted({row.kind for row in rows})
    counts = Counter((row.kind, row.verdict) for row in rows)
    body: list[list[Any]] = [
        [kind, *(counts[kind, verdict] for verdict in verdicts), sum(row.kind == kind for row in rows)]
        for kind in kinds
    ]
    body.append(["all", *(sum(row.verdict == verdict for row in rows) for verdict in verdicts), len(rows)])
    reasons = Counter((row.verdict, row.why) for row in rows if row.why)
    lines = [f"{count:4d}  {verdict}: {why}" for (verdict, why), count in reasons.most_common()]
    flags = ", ".join(f"{name} {count}" for name, count in result["by_flags"].items())
    below = "\n".join([*lines, "", f"Flags alone, as counted before evenload took them: {flags}"])
    return grid(f"Recipes of {result['checkout']}", ("recipes of", *verdicts, "all"), body, below)


def _plain(flags: Flags) -> bool:
    return not any(has(flags) for has in HARD.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("--only", default="", help="recipes whose name contains this")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    checkout = asked.checkout.resolve()
    read = [recipe for recipe in recipes(checkout) if asked.only in recipe.name]
    with stdout_aside(), tempfile.TemporaryDirectory(prefix="survey-") as folder:
        guards = Guards(checkout, Path(folder))
        rows = [asdict(guards.verdict(recipe)) for recipe in read]
    result = {"checkout": checkout.name, "rows": rows, "by_flags": by_flags(read)}
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, asked.json, table)


if __name__ == "__main__":
    main()
