"""Lengths for published set-ups whose data are not public: stand-ins that meet the published fractions.

A stand-in is a quantile function, linear in log(length) between the anchors listed here: (share of sequences below,
tokens). Between two anchors the mean is (b - a) / ln(b / a), so shares of tokens can be computed exactly. Draws are a
function of name, number and seed alone.

    wikipedia-like     quantiles of the first 200,000 lengths of galvatron/datasets/wikipedia.txt (branch flexsp of
                       PKU-DAIR/Hetu-Galvatron @ b4666892); ``--wikipedia FILE`` takes the file itself
    github-like        ByteScale (arXiv 2502.21231, section 3.1): 16.2 % of tokens in sequences over 128K, 9.8 % in
                       those over 256K; the body is an assumption
    commoncrawl-like   an assumption: FlexSP (arXiv 2412.01523) says only that it is heavier than Wikipedia, of which
                       96 % is under 8K
    arxiv-like         an assumption: papers of some thousand to some ten thousand tokens, 18K on average
    byted-like         ByteScale, ibid.: 80 % of samples up to 4K; 1 % from 128K on, with 44.3 % of the tokens; 0.05 %
                       from 2M on, with 12.1 %; 37 % of tokens over 256K
    sft-like           ChunkFlow (arXiv 2503.02356): below 1K about 90 %, 1-4K 8 %, 4-32K 2 %, over 32K below 0.1 %
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from evenload.benchmarks.chains import SEED, K
from evenload.data.lengths import read_lengths

Lengths = npt.NDArray[np.int64]
Anchors = tuple[tuple[float, float], ...]

BORDER = 16
"""Borders of LobRA's buckets are multiples of so many tokens."""


STAND_INS: dict[str, Anchors] = {
    "wikipedia-like": (
        *((0.0, 16), (0.01, 39), (0.1, 87), (0.25, 145), (0.5, 345), (0.75, 860), (0.82, 1216), (0.9, 2098)),
        *((0.94, 3237), (0.97, 5334), (0.985, 8540), (0.995, 15622), (0.999, 37189), (0.9998, 76391)),
        *((0.99995, 121543), (1.0, 269428)),
    ),
    "github-like": (
        *((0.0, 64), (0.5, 1229), (0.9, 9000), (0.984, 36 * K), (0.9971, 128 * K), (0.99893, 256 * K)),
        (1.0, 720 * K),
    ),
    "commoncrawl-like": ((0.0, 64), (0.5, 1024), (0.9, 5400), (0.99, 24800), (0.999, 93800), (1.0, 384 * K)),
    "arxiv-like": ((0.0, 512), (0.1, 5000), (0.5, 13000), (0.9, 32000), (0.99, 80000), (1.0, 256 * K)),
    "byted-like": (
        *((0.0, 256), (0.8, 4 * K), (0.95, 22 * K), (0.99, 128 * K), (0.99365, 256 * K), (0.999376, 512 * K)),
        *((0.9995, 2048 * K), (1.0, 2304 * K)),
    ),
    "sft-like": ((0.0, 32), (0.9, K), (0.98, 4 * K), (0.9991, 32 * K), (1.0, 256 * K)),
}


def drawn(name: str, count: int, seed: int = SEED) -> Lengths:
    """``count`` lengths of a stand-in."""
    shares, tokens = zip(*STAND_INS[name], strict=True)
    uniform = np.random.default_rng(seed).random(count)
    return np.maximum(2, np.exp(np.interp(uniform, shares, np.log(tokens)))).astype(np.int64)


def tokens_above(name: str, threshold: float) -> float:
    """Share of the tokens that are in sequences longer than ``threshold``, exactly."""

    def tokens(low: float, high: float, share: float) -> float:
        return share * (high - low) / math.log(high / low) if high > low else 0.0

    total = above = 0.0
    for (low_share, low), (high_share, high) in pairwise(STAND_INS[name]):
        share = high_share - low_share
        total += tokens(low, high, share)
        cut = min(max(threshold, low), high)
        above += tokens(cut, high, share * math.log(high / cut) / math.log(high / low))
    return above / total


def corpus(name: str, count: int, longest: int, wikipedia: Path | None = None) -> tuple[str, Lengths]:
    """What stood in, and ``count`` lengths up to ``longest`` tokens; longer ones are left out, as papers do.

    Raises EvenloadError if the file cannot be read.
    """
    if name == "wikipedia-like" and wikipedia is not None:
        lengths = read_lengths(wikipedia)
        kept = lengths[lengths <= longest]
        return "Wikipedia (real)", np.tile(kept, -(-count // len(kept)))[:count]
    lengths = drawn(name, 2 * count)
    return name, lengths[lengths <= longest][:count]


def into_buckets(lengths: Lengths, count: int) -> Lengths:
    """The lengths padded to the borders of so many buckets that pad least, multiples of 16 (LobRA, section 4.1)."""
    aligned = -(-lengths // BORDER) * BORDER
    borders, counts = np.unique(aligned, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.tril(borders[:, None] * (below[1:, None] - below[None, :-1]).astype(np.float64))
    tokens[np.triu_indices(len(borders), 1)] = np.inf
    # Of all up to each border in one bucket, in two, and so on, and where the last of these begins.
    least, begins = tokens[:, 0], [np.zeros(len(borders), dtype=np.int64)]
    for _ in range(min(count, len(borders)) - 1):
        tried = np.concatenate([[0.0], least[:-1]]) + tokens
        begins.append(tried.argmin(axis=1))
        least = tried.min(axis=1)
    last, chosen = len(borders) - 1, list[int]()
    while last >= 0:
        chosen.append(int(borders[last]))
        last = int(begins.pop()[last]) - 1
    return np.asarray(np.array(chosen[::-1])[np.searchsorted(chosen[::-1], aligned)], dtype=np.int64)
