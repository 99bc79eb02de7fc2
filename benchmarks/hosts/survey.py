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

import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import main, options
from evenload.commands.tables.show import grid, stdout_aside
from functional_tests import Verdict, recipes
from guards import Guards

VERDICTS = ("cut", "whole", "together", "idle", "refused", "alone", "no parse")
"""What a count of flags alone took for a refusal when evenload had 41 recipes after two further flags, and none as
they are. It counts inference and models that are no GPT as trained ones."""


def table(result: dict[str, Any]) -> Any:
    """The result for a person: counts by kind and verdict, and every reason."""
    rows = [Verdict(**row) for row in result["rows"]]
    counts = Counter((row.kind, row.verdict) for row in rows)
    kinds = sorted({row.kind for row in rows})
    body: list[list[Any]] = [
        [kind, *(counts[kind, verdict] for verdict in VERDICTS), sum(row.kind == kind for row in rows)]
        for kind in kinds
    ]
    body.append(["all", *(sum(row.verdict == verdict for row in rows) for verdict in VERDICTS), len(rows)])
    reasons = Counter((row.verdict, row.why) for row in rows if row.why)
    lines = [f"{count:4d}  {verdict}: {why}" for (verdict, why), count in reasons.most_common()]
    return grid(f"Recipes of {result['checkout']}", ("recipes of", *VERDICTS, "all"), body, "\n".join(lines))


def benchmark(asked: Any) -> dict[str, Any]:
    checkout = asked.checkout.resolve()
    with stdout_aside(), tempfile.TemporaryDirectory(prefix="survey-") as folder:
        guards = Guards(checkout, Path(folder))
        rows = [asdict(guards.verdict(recipe)) for recipe in recipes(checkout) if asked.only in recipe.name]
    return {"checkout": checkout.name, "rows": rows}


if __name__ == "__main__":
    own = options(__doc__, only="")
    own.add_argument("checkout", type=Path, metavar="CHECKOUT")
    main(own, benchmark, table)
