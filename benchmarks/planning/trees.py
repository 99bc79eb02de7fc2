"""What trees of shared prefixes gain where others have published what theirs do: predicted, next to theirs.

    python benchmarks/planning/trees.py [--quick] [--json] [--out FILE]

An update of Qwen3-4B on 4 H200s, all layers recomputed, packs of 32,768 tokens: counted FLOPs, launches, gradient sum
included. "rows" computes each prompt for each of its answers; "limit" is the work of the distinct tokens alone, spread
evenly. Generation and old log-probabilities are in none of our seconds, and in a step of theirs.

Published are the figures; of verl (PR 4368) the model, 4 H800s, 4 answers and the context, of prime-rl (PR 2405) the 20
leaves. All else is assumed: 8 groups a device, answers even from half to three halves of their mean, verl's of 2,048
tokens at both contexts, and for the others prompts so long that the limit allows for their figure. So the speedup says
how near to the limit a plan comes, and theirs what they reached in settings of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from evenload.benchmarks.chains import SEED, chain_of, plugins
from evenload.benchmarks.frame import Row, columns, main, options
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import judge
from evenload.training.forecast.trees import planned_trees

RANKS, GROUPS, CAP = 4, 8, 32_768
QWEN3_4B = {
    "num_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_query_groups": 8,
    "ffn_hidden_size": 9728,
    "vocab_size": 151_936,
    "tied_embeddings": True,
}


class Setting(NamedTuple):
    """A published figure, and what it was measured on as far as that is known."""

    name: str
    prompt: int
    answers: int
    mean: int
    """Tokens of an answer."""
    theirs: str


SETTINGS = (
    Setting("verl PrefixGrouper, 4K", 2048, 4, 2048, "1.26x (step 1.14x)"),
    Setting("verl PrefixGrouper, 8K", 6144, 4, 2048, "1.70x (step 1.27x)"),
    Setting("Unsloth", 1536, 8, 512, "2.55x"),
    Setting("prime-rl, 20 leaves", 4096, 20, 960, "3.75x"),
    Setting("Tree Training", 8192, 16, 704, "6.2x"),
)


def qwen_chain() -> PlanChain:
    return chain_of(
        {
            "model": QWEN3_4B,
            "parallel": {"dp": RANKS},
            "cluster": "h200",
            "train": {"recompute": True, "dtype": "bf16"},
            "plugins": plugins(CAP, "packing"),
        }
    )


def row_of(setting: Setting, chain: PlanChain, groups: int) -> Row:
    answers = np.random.default_rng(SEED).integers(
        setting.mean // 2, setting.mean * 3 // 2, (groups * RANKS, setting.answers), endpoint=True
    )
    batch = as_lengths(setting.prompt + answers.ravel())
    prompts = np.full(len(batch), setting.prompt)
    trees = planned_trees(chain, batch, np.repeat(np.arange(len(answers)), setting.answers), prompts)
    assert trees.step_s is not None, trees.why_not
    rows_s = judge(chain.plan(batch), chain.context).step_s
    gains = {"speedup": rows_s / trees.step_s, "limit": rows_s / trees.limit_s}
    return {**setting._asdict(), **trees._asdict(), "rows_s": rows_s, **gains}


def benchmark(asked: Any) -> Row:
    chain = qwen_chain()
    return {"predicted": True, "rows": [row_of(one, chain, 2 if asked.quick else GROUPS) for one in SETTINGS]}


def table(result: Row) -> Any:
    cells = {
        "": "{name}",
        "prompt + answers": "{prompt:,} + {answers} x {mean:,}",
        "rows' tokens": "{rows_tokens:,}",
        "distinct": "{distinct_tokens:,}",
        "rows": "{rows_s:seconds}",
        "trees": "{step_s:seconds}",
        "speedup": "{speedup:.2f}x",
        "theirs": "{theirs}",
        "limit": "{limit:.2f}x",
    }
    return columns(
        "Trees of shared prefixes (predicted)", result["rows"], cells, "theirs: as published, their settings"
    )


if __name__ == "__main__":
    main(options(__doc__, quick=False), benchmark, table)
