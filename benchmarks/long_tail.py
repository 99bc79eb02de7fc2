"""Samples of given lengths for measured runs: random words, one byte a token, as JSONL.

    python benchmarks/long_tail.py --lengths wikipedia.txt --out long_tail.jsonl [--count 2000] [--longest 32768]

The first ``count`` lengths of the file that are between 2 and ``longest``, in its order. Then, for example,

    evenload bench recipes/mesh.yaml data.source=long_tail.jsonl train.global_batch_size=64 train.steps=6 \\
        --against cp_all,cp_1,in_order
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from evenload.data.lengths import read_lengths


def text_of(length: int, random: np.random.Generator) -> str:
    """``length`` bytes of lower-case words."""
    letters = random.integers(ord("a"), ord("z") + 1, length).astype(np.uint8)
    letters[random.random(length) < 0.17] = ord(" ")
    return letters.tobytes().decode()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lengths", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--count", type=int, default=2000)
    options.add_argument("--longest", type=int, default=32768)
    asked = options.parse_args()
    lengths = read_lengths(asked.lengths)
    kept = lengths[(lengths >= 2) & (lengths <= asked.longest)][: asked.count]
    random = np.random.default_rng(0)
    with asked.out.open("w") as file:
        for length in kept.tolist():
            file.write(json.dumps({"text": text_of(length, random)}) + "\n")
    print(f"{len(kept)} samples, {int(kept.sum()):,} tokens, the longest {int(kept.max()):,}")


if __name__ == "__main__":
    main()
