"""TIE (arXiv 2604.00499): requests in the order of E + beta CVaR of their output tokens; 0.67 s a token against 3.17.

    python benchmarks/published/tie.py [--quick] [--json] [--out FILE]

An 8B model (32 layers, 8 groups of 128, bf16) on one card; a decode step reads 16 GB of weights and 131,072 bytes a key
at the card's bandwidth and takes 20 us a sample, a token of a prompt 2 FLOPs a weight at 40 % of the peak. 256 samples
at once, keys in what 80 GB leave. LMSYS-like: prompts of 70 tokens; outputs log-t with 3.5 degrees of freedom, median
150 log-normal over prompts (0.65), scale 0.45 log-normal (0.4), at most 2,048: the longest tenth has the published 36 %
of tokens. Predictions of mu and sigma are off so that R2 is the published 0.82 and 0.76.

    fcfs     first come, first served
    point    least predicted median first, aged
    E        least predicted mean first, aged: TIE without its tail
    TIE      least E + beta CVaR_0.9 first, aged
    oracle   least true length first, aged

online    100 requests/s for a minute: seconds from arrival to end over output tokens, mean of requests; and these
          seconds themselves, mean of requests
offline   5,000 requests at once: seconds until 3,000 have ended

Guessed, as the paper's set-up could not be read whole: the card (both an A100 and an H100 are shown), slots, medians,
how long requests come, and how many wait offline. Its learning-to-rank baseline is not modelled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from evenload.benchmarks.frame import columns
from evenload.benchmarks.published.common import arguments, finish
from evenload.core.aliases import Floats
from evenload.plugins.rollout import (
    Expected,
    InOrder,
    LengthDistributions,
    Rollout,
    RolloutCosts,
    RolloutRequest,
    TieQueue,
    expected,
)

SLOTS, LIMIT, PROMPT = 256, 2048, 70
WEIGHT_BYTES, KEY_BYTES, MEMORY = 16e9, 131072, 80e9
PAPER = {
    "online": {"fcfs": 3.17, "point": 1.95, "ranking": 1.55, "TIE": 0.67},
    "offline": {"ranking": 139.5, "TIE": 98.1},
}


class Card(NamedTuple):
    name: str
    bytes_per_s: float
    flops: float

    @property
    def costs(self) -> RolloutCosts:
        prompt_s = WEIGHT_BYTES / (0.4 * self.flops)
        return RolloutCosts(WEIGHT_BYTES / self.bytes_per_s, 2e-5, KEY_BYTES / self.bytes_per_s, prompt_s)


CARDS = (Card("A100", 2.0e12, 3.12e14), Card("H100", 3.35e12, 9.89e14))


class Drawn(NamedTuple):
    lengths: Any
    predicted: LengthDistributions


def drawn(count: int, seed: int) -> Drawn:
    """Outputs of ``count`` requests, and what a predictor says of them."""
    random = np.random.default_rng(seed)
    mu, log_sigma = np.log(150) + 0.65 * random.normal(size=count), np.log(0.45) + 0.4 * random.normal(size=count)
    lengths = np.exp(mu + np.exp(log_sigma) * random.standard_t(3.5, size=count))
    seen_mu = _predicted(mu, np.log(150), 0.82, random)
    seen_sigma = np.exp(_predicted(log_sigma, np.log(0.45), 0.76, random))
    tokens = np.clip(lengths, 1, LIMIT).astype(np.int64)
    return Drawn(tokens, LengthDistributions(seen_mu, seen_sigma, LIMIT))


def _predicted(values: Floats, centre: float, r2: float, random: np.random.Generator) -> Floats:
    """Values whose squared error is 1 - r2 of the variance, shrunk as a regression shrinks them."""
    noise = np.sqrt(r2 * (1 - r2)) * values.std() * random.normal(size=len(values))
    return np.asarray(centre + r2 * (values - centre) + noise)


def queues(of: Drawn) -> dict[str, Any]:
    said = expected(of.predicted, np.arange(len(of.lengths)))
    none = np.zeros(len(of.lengths))
    true = of.lengths.astype(np.float64)
    return {
        "fcfs": InOrder(),
        "point": TieQueue(Expected(np.exp(of.predicted.mu), none, none), SLOTS),
        "E": TieQueue(said._replace(tail=none), SLOTS),
        "TIE": TieQueue(said, SLOTS),
        "oracle": TieQueue(Expected(true, none, none), SLOTS),
    }


def ends(card: Card, of: Drawn, arrivals_s: Floats) -> dict[str, Floats]:
    """When each request ended, by every order."""
    count = len(of.lengths)
    cap = int((0.9 * MEMORY - WEIGHT_BYTES) / KEY_BYTES)
    request = RolloutRequest(np.arange(count), np.full(count, PROMPT), 1, LIMIT, SLOTS, cap)
    rollout = Rollout(request, of.lengths, card.costs, np.full(count, 2 * PROMPT))
    return {name: rollout.serve(queue, arrivals_s).end_s for name, queue in queues(of).items()}


def online(card: Card, rate: float, seconds: int, seeds: int) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    whole: dict[str, list[float]] = {}
    tails = []
    for seed in range(seeds):
        of = drawn(int(rate * seconds), seed)
        arrivals_s = np.cumsum(np.random.default_rng(100 + seed).exponential(1 / rate, len(of.lengths)))
        for name, end_s in ends(card, of, arrivals_s).items():
            values.setdefault(name, []).append(float(np.mean((end_s - arrivals_s) / of.lengths)))
            whole.setdefault(name, []).append(float(np.mean(end_s - arrivals_s)))
        tails.append(np.sort(of.lengths)[-len(of.lengths) // 10 :].sum() / of.lengths.sum())
    row = _row(f"online, {card.name}, {rate:g} requests/s", values, PAPER["online"])
    waited = {name: float(np.mean(of)) for name, of in whole.items()}
    return {**row, "waited_s": waited, "share_of_longest_tenth": float(np.mean(tails))}


def offline(card: Card, pool: int, wanted: int, seeds: int) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for seed in range(seeds):
        for name, end_s in ends(card, drawn(pool, seed), np.zeros(pool)).items():
            values.setdefault(name, []).append(float(np.sort(end_s)[wanted - 1]))
    return _row(f"offline, {card.name}, {wanted} of {pool}", values, PAPER["offline"])


def _row(name: str, values: dict[str, list[float]], paper: dict[str, float]) -> dict[str, Any]:
    seconds = {order: float(np.mean(of)) for order, of in values.items()}
    return {
        "setting": name,
        "paper": paper,
        "seconds": seconds,
        "gain": {order: seconds["fcfs"] / of for order, of in seconds.items()},
        "tie_over_mean": seconds["TIE"] / seconds["E"],
    }


def table(result: dict[str, Any]) -> Any:
    def later(row: dict[str, Any]) -> str:
        return f"{row['waited_s']['TIE'] / row['waited_s']['E']:.3f}" if "waited_s" in row else ""

    cells = {
        "setting": "{setting}",
        "paper": lambda row: ", ".join(f"{name} {value:g}" for name, value in row["paper"].items()),
        **{name: f"{{seconds[{name}]:.3g}} ({{gain[{name}]:.2f}}x)" for name in result["rows"][0]["seconds"]},
        "TIE over E": "{tie_over_mean:.3f}",
        "the same, seconds to the end": later,
    }
    about = "online: seconds a token, mean of requests; offline: seconds until enough have ended; over fcfs"
    return columns(f"{result['title']} (predicted)", result["rows"], cells, about)


def benchmark(quick: bool) -> dict[str, Any]:
    seeds, rates = (1, (100.0,)) if quick else (3, (25.0, 50.0, 100.0))
    rows = []
    for card in CARDS[:1] if quick else CARDS:
        rows += [online(card, rate, 10 if quick else 60, seeds) for rate in rates]
        rows.append(offline(card, 1000 if quick else 5000, 600 if quick else 3000, seeds))
    return {"title": "TIE: an 8B model on one card", "rows": rows}


if __name__ == "__main__":
    asked = arguments(__doc__)
    finish(benchmark(asked.quick), asked, table)
