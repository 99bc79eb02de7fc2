"""SlimPack (arXiv 2509.26246): slices in equal micro-batches, up to 2.8x its baselines at a context of 256K.

    python benchmarks/published/slimpack.py [--wikipedia FILE] [--quick] [--json] [--out FILE]

Llama 7B, 128 ranks, 512 sequences a step, context 256K (the paper: 7B to 150B, 128 to 256 GPUs, batches of 512 to
2,048, 64K to 256K, CommonCrawl, GitHub, Wikipedia; machines and layouts are not known to us, H100 is a guess).

    theirs    Megatron-LM: packs filled in the order of the batch up to the context window, one a micro-batch, on the
              fastest of the layouts that hold a window (guessed: TP 8, PP 1 to 4, CP 1 to 8, with and without
              recomputation)
    PP4       the same on TP8 PP4 whatever is faster: how much of a gain a baseline's layout makes
    simple    the fastest of four ways to pack whole sequences, in micro-batches of 16K or 64K, on the same layouts
    ours      evenload on the same layouts, with slices or without. Long sequences stay on one lane of parallel.cp
              ranks; SlimPack joins ranks for the very longest, which comes with the mesh plugin
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evenload.benchmarks.chains import K
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

WINDOW = 256 * K
LAYOUTS = tuple(
    Degrees(8, pp, cp, recompute)
    for pp, cp in ((1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2))
    for recompute in (False, True)
)
PIPELINES = (Degrees(8, 4, 1), Degrees(8, 4, 1, True))
PAPER = "up to 2.8x"


def case(corpus: str, quick: bool, wikipedia: Path | None, launch: float = 1.0) -> Case:
    label, batches = batches_of(corpus, 128 if quick else 512, 1 if quick else 2, WINDOW, wikipedia)
    layouts = LAYOUTS[4:8] if quick else LAYOUTS

    def small(d: Degrees) -> list[int]:
        return [16 * K // d.cp] if quick else [16 * K // d.cp, 64 * K // d.cp]

    return Case(
        name=f"7B 256K, {label}" + (f", launch x{launch:g}" if launch != 1 else ""),
        paper=PAPER,
        machines=Machines("llama-7b", 128, "h100", launch),
        lengths=label,
        batches=batches,
        theirs=tuple(setups(["in_order"], layouts, lambda d: [WINDOW // d.cp])),
        definition="theirs: packs in order up to the window, fastest layout that fits",
        simple=tuple(setups(SIMPLE, layouts, small)),
        ours=tuple(evenload(layouts, lambda d: [*small(d), WINDOW // d.cp])),
        more={} if quick else {"PP4": tuple(setups(["in_order"], PIPELINES, lambda d: [WINDOW // d.cp]))},
    )


def cases(quick: bool, wikipedia: Path | None) -> Iterator[Case]:
    for corpus in ("wikipedia-like", "commoncrawl-like", "github-like")[: 1 if quick else None]:
        yield case(corpus, quick, wikipedia)
    if not quick:
        yield case("commoncrawl-like", quick, wikipedia, launch=4.0)


if __name__ == "__main__":
    asked = arguments(__doc__)
    finish(claim("SlimPack: Llama 7B on 128 H100", cases(asked.quick, asked.wikipedia)), asked)
