"""Hydraulis (arXiv 2412.07894): two-stage assignment and unlike strategies, 1.32x to 2.66x over existing systems.

    python benchmarks/published/hydraulis.py [--quick] [--json] [--out FILE]

LLaMA on 16 to 64 A100, contexts of 16K and 32K, batches counted in tokens (its scripts: 100K for GitHub and 13B, 200K
for CommonCrawl and 32B). The table of its speed-ups was not at hand: every row stands beside the abstract's range.

    theirs    Megatron-LM, one layout for all: packs filled in the order of the batch up to the context window; the
              fastest of TP 2 to 8, PP 1 to 4 that fits. Which systems and layouts gave the range is not known to us
    padded    four samples a micro-batch, padded to the longest of them, on the same layouts
    simple    the fastest of four ways to pack whole sequences, in micro-batches of any size, on the same layouts
    ours      evenload on the same layouts, with slices or without. Unlike strategies side by side (TP 16 for the
              longest, TP 2 for the rest) are not in it
"""

from __future__ import annotations

from collections.abc import Iterator

from evenload.benchmarks.chains import K
from evenload.benchmarks.published.common import (
    SIMPLE,
    Batch,
    Case,
    Degrees,
    Machines,
    Way,
    arguments,
    batches_of,
    claim,
    evenload,
    finish,
    setups,
)

LAYOUTS = tuple(Degrees(tp, pp, 1, recompute) for tp in (2, 4, 8) for pp in (1, 2, 4) for recompute in (False, True))
PAPER = "1.32x to 2.66x"
SETTINGS = (
    ("llama-7b", 16, "commoncrawl-like", 16 * K, 100_000),
    ("llama-13b", 32, "github-like", 16 * K, 100_000),
    ("llama-13b", 32, "github-like", 32 * K, 100_000),
    ("llama-32b", 64, "commoncrawl-like", 32 * K, 200_000),
)


def of_tokens(corpus: str, tokens: int, count: int, longest: int) -> tuple[str, tuple[Batch, ...]]:
    """What stood in, and batches of about so many tokens: as many sequences as hold them in the mean."""
    _, (sample,) = batches_of(corpus, 4096, 1, longest)
    mean = int(sample.sum()) / len(sample)
    return batches_of(corpus, max(32, round(tokens / mean)), count, longest)


def case(model: str, world: int, corpus: str, context: int, tokens: int, quick: bool) -> Case:
    label, batches = of_tokens(corpus, tokens, 1 if quick else 4, context)
    layouts = [d for d in LAYOUTS if d.tp * d.pp <= world][4 if quick else 0 : 8 if quick else None]

    def small(d: Degrees) -> list[int]:
        return [context] if quick else [context // 4, context // 2, context]

    def four(d: Degrees) -> Way:
        return Way("padded", d, context, micro_batch_size=4)

    return Case(
        name=f"{model} {context // K}K, {world} ranks, {tokens // 1000}K tokens",
        paper=PAPER,
        machines=Machines(model, world, "a100"),
        lengths=label,
        batches=batches,
        theirs=tuple(setups(["in_order"], layouts, lambda d: [context])),
        definition="theirs: packs in order up to the window, fastest layout that fits",
        simple=tuple(setups(SIMPLE, layouts, small)),
        ours=tuple(evenload(layouts, small)),
        more={"padded": tuple(four(d) for d in layouts)},
    )


def cases(quick: bool) -> Iterator[Case]:
    for setting in SETTINGS[: 1 if quick else None]:
        yield case(*setting, quick)


if __name__ == "__main__":
    asked = arguments(__doc__)
    finish(claim("Hydraulis: LLaMA on A100-80G", cases(asked.quick)), asked)
