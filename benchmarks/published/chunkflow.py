"""ChunkFlow (ICML'25, arXiv 2503.02356): fine-tuning of Qwen2.5 on mostly short sequences, up to 4.53x Megatron-LM.

    python benchmarks/published/chunkflow.py [--quick] [--json] [--out FILE]

    theirs    Megatron-LM as the paper describes its baseline: one sequence a micro-batch, in the order of the batch, on
              a layout that holds the longest sequence. Guesses: TP4 PP4 (72B: TP8 PP4), DP 4, A100-80G, full
              recomputation at 256K, 256 sequences a step
    simple    the faster of two balanced ways to pack whole sequences, on that layout and on two stages, with or without
              recomputation
    chunks    the paper's own method as evenload's baseline runs it: long sequences in equal chunks, short ones best-fit
    ours      evenload on the same layouts, with slices or without

The gain is mostly that of filling micro-batches, so it depends on what a micro-batch of a few hundred tokens costs
beyond its tokens, and on how unevenly single sequences load data-parallel ranks: rows "launch x0", "launch x4" and
"DP 1" vary one guess each.
"""

from __future__ import annotations

from collections.abc import Iterator

from evenload.benchmarks.published.common import (
    SIMPLE,
    Case,
    Degrees,
    Machines,
    arguments,
    batches_of,
    claim,
    evenload,
    finish,
    setups,
)
from evenload.benchmarks.published.lengths import K

DP = 4
CHUNKS = (4 * K, 8 * K, 16 * K, 32 * K)
"""Tokens of a micro-batch that are tried, for the paper's chunks and for evenload alike."""

SETTINGS = (
    ("qwen2.5-7b", 256 * K, "4.53x", Degrees(4, 4, 1, True)),
    ("qwen2.5-14b", 256 * K, "3.76x", Degrees(4, 4, 1, True)),
    ("qwen2.5-32b", 256 * K, "3.21x", Degrees(4, 4, 1, True)),
    ("qwen2.5-72b", 256 * K, "1.67x", Degrees(8, 4, 1, True)),
    ("qwen2.5-7b", 32 * K, "2.38x", Degrees(4, 4, 1, False)),
)


def case(model: str, context: int, paper: str, theirs: Degrees, quick: bool, launch: float = 1.0, dp: int = DP) -> Case:
    label, batches = batches_of("sft-like", 64 if quick else 256, 1 if quick else 4, context)
    layouts = [Degrees(theirs.tp, theirs.pp, 1, recompute) for recompute in (False, True)]
    if not quick:
        layouts += [Degrees(theirs.tp, 2, 1, recompute) for recompute in (False, True)]
    caps = CHUNKS[1:2] if quick else CHUNKS
    return Case(
        name=f"{model} {context // K}K"
        + (f", launch x{launch:g}" if launch != 1 else "")
        + (f", DP {dp}" if dp != DP else ""),
        paper=paper,
        machines=Machines(model, dp * theirs.tp * theirs.pp, "a100", launch),
        lengths=label,
        batches=batches,
        theirs=tuple(setups(["stock"], [theirs], lambda d: [context])),
        definition=f"theirs: one sequence a micro-batch, {theirs} (guessed)",
        simple=tuple(setups(SIMPLE[:2], layouts, lambda d: [c for c in caps if c <= context])),
        ours=tuple(evenload(layouts, lambda d: [c for c in caps if c <= context])),
        more={"chunks": tuple(setups(["chunks"], layouts, lambda d: [c for c in caps if c <= context]))},
    )


def cases(quick: bool) -> Iterator[Case]:
    for setting in SETTINGS[: 1 if quick else None]:
        yield case(*setting, quick)
    if not quick:
        yield case(*SETTINGS[0], quick, launch=0.0)
        yield case(*SETTINGS[0], quick, launch=4.0)
        yield case(*SETTINGS[0], quick, dp=1)
        yield case(*SETTINGS[3], quick, dp=1)


if __name__ == "__main__":
    asked = arguments(__doc__)
    finish(claim("ChunkFlow: fine-tuning on A100-80G", cases(asked.quick)), asked)
