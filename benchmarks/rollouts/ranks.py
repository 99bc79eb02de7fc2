"""Rollouts on many ranks: groups in turn, samples spread, by TIE's distributions, dealt again; a bound. Predicted.

    python benchmarks/rollouts/ranks.py [--checkpoints FILE] [--quick] [--draws 4] [--json] [--out FILE]

    groups     all samples of a prompt on one rank, prompts in turn: what verl, TRL and DeepSpeed do
    spread     samples in turn, whatever their prompt
    tie        evenload's plan by distributions of earlier samples of the same prompts
    in step    the same, dealt again after every 1,024 steps of every rank
    moved      the same, dealt again after steps that take as long as 1,024 of a mean rank; moved keys at no price
    oftener    moved after as long as 512
    sent       moved, at 2.3 us a key that moves;  computed: at 35 us, the 14 GFLOP of a token at 400 TFLOP/s
    oracle     longest first by the lengths themselves, to the rank with the least tokens
    graded     by the lengths themselves: the longest samples together on a rank, the next ones on the next, all
               ranks equally long. Long samples share steps with few, short ones with many

A decode step takes 6 ms + 20 us a sample + 17 ns a key (7 billion weights on an H100, derived from bytes); the update
takes 6 FLOPs a weight and token at 400 TFLOP/s. Gains are of rollout and update together. The bound is that of
`evenload.plugins.rollout.plan`.

reasoning   answers of a 32B model to 30 AIME problems at 11 checkpoints (NovaSky-AI/SkyThought @ 6b8f472f, Apache-2.0):
            a CSV of checkpoint_step, prompt, characters; 3.6 characters a token. A prompt's samples are drawn from its
            last six checkpoints, 10 % up or down, and what is known are its first five
orders      largest tail first, least first, and which of them the plan takes, where ranks have more samples than slots;
            sharp: lengths that are within 5 % of what is known
log-t       a median of each prompt, log-normal with 0.8, samples log-t about it with 0.45; known: 5 earlier samples
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.benchmarks.frame import main, options, timed
from evenload.benchmarks.rollouts.moves import play_moved
from evenload.commands.tables.show import grid
from evenload.core.aliases import Ints
from evenload.core.balance.partition import longest_first
from evenload.plugins.rollout import (
    H100_7B,
    LengthDistributions,
    Rollout,
    RolloutPlan,
    RolloutRequest,
    SampledLengths,
    bound_of,
    expected,
    fit_lengths,
    plan_rollout,
    spread,
)
from evenload.plugins.rollout.student_t import exceeded_with

EVERY, KEY_S, COMPUTED_S = 1024, 57344 / 25e9, 14e9 / 4e14
UPDATE_S = 6 * 7e9 / 4e14
"""Of a token."""
CHARACTERS = 3.6


class Setting(NamedTuple):
    name: str
    prompts: int
    samples: int
    ranks: int
    slots: int
    limit: int
    prompt: int
    median: float
    """0: lengths of the checkpoints."""
    gains: str
    """Of groups, spread and dealt again in an earlier simulation with fewer assumptions."""


SETTINGS = (
    Setting("reasoning 256 x 16", 256, 16, 32, 128, 32768, 256, 0.0, "1.00, 1.18, 1.29"),
    Setting("reasoning 128 x 8", 128, 8, 16, 64, 32768, 256, 0.0, "1.00, 1.19, 1.26"),
    Setting("log-t 512 x 16", 512, 16, 32, 256, 32768, 512, 2500.0, "1.00, 1.26, 1.35"),
    Setting("log-t 512 x 16, 64 slots", 512, 16, 32, 64, 32768, 512, 2500.0, "1.00, 1.25, 1.52"),
    Setting("log-t 128 x 16", 128, 16, 8, 256, 8192, 512, 1200.0, "1.00, 1.05, 1.07"),
)


ORDERS = (
    SETTINGS[2]._replace(name="log-t, 64 slots", slots=64),
    SETTINGS[2]._replace(name="log-t, 32 slots", slots=32),
    SETTINGS[0]._replace(name="reasoning, 32 slots", slots=32),
    SETTINGS[1]._replace(name="reasoning 128 x 8, 16 slots", slots=16),
    SETTINGS[2]._replace(name="sharp, 64 slots", slots=64),
)


class Drawn(NamedTuple):
    lengths: Ints
    known: LengthDistributions


def drawn(setting: Setting, checkpoints: Path | None, seed: int) -> Drawn:
    """Lengths [S] of a rollout, and what earlier samples tell of its prompts."""
    random = np.random.default_rng(seed)
    shape = (setting.prompts, setting.samples)
    if not setting.median:
        assert checkpoints is not None
        table = _checkpoints(checkpoints)
        picked = table[random.integers(0, len(table), setting.prompts)]
        rows = [random.choice(row[5:], size=setting.samples) for row in picked]
        lengths = np.stack(rows) * np.exp(random.normal(size=shape) * 0.1)
        earlier, least = picked[:, :5], 64
    else:
        mu = np.log(setting.median) + 0.8 * random.normal(size=(setting.prompts, 1))
        lengths = np.exp(mu + 0.45 * random.standard_t(3.5, size=shape))
        earlier, least = np.exp(mu + 0.45 * random.standard_t(3.5, size=(setting.prompts, 5))), 16
    past = np.clip(earlier, 1, setting.limit).astype(np.int64)
    of = np.repeat(np.arange(setting.prompts), past.shape[1])
    sampled = SampledLengths(of, past.ravel(), past.ravel() < setting.limit, np.ones(past.size))
    tokens = np.clip(lengths, least, setting.limit).astype(np.int64).ravel()
    return Drawn(tokens, fit_lengths(sampled, setting.prompts, setting.limit))


def _checkpoints(path: Path) -> Any:
    rows: dict[int, list[float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            rows.setdefault(int(row["prompt"]), []).append(int(row["characters"]) / CHARACTERS)
    return np.array([rows[prompt] for prompt in sorted(rows)])


def calibration(path: Path) -> dict[str, float]:
    """Shares of the last six checkpoints' lengths below quantiles that are fitted to the first five, and both means."""
    tokens = np.clip(_checkpoints(path), 1, 32768).astype(np.int64)
    first, last = tokens[:, :5], tokens[:, 5:]
    of = np.repeat(np.arange(len(first)), 5)
    sampled = SampledLengths(of, first.ravel(), first.ravel() < 32768, np.ones(first.size))
    fitted = fit_lengths(sampled, len(first), 32768)
    shares = {}
    for share in (0.25, 0.5, 0.75, 0.9):
        bar = np.minimum(np.exp(fitted.mu + fitted.sigma * exceeded_with(np.array(1 - share))), 32768)
        shares[f"below {share:g}"] = float((last <= bar[:, None]).mean())
    mean = float(expected(fitted, np.arange(len(first))).mean.mean())
    return {**shares, "expected": mean, "mean": float(last.mean()), "cut": float((last == 32768).mean())}


def rollouts(setting: Setting, lengths: Ints, known: LengthDistributions) -> Iterator[tuple[str, float, float]]:
    """Name, seconds of the rollout and of a mean rank of every variant."""
    prompts = np.repeat(np.arange(setting.prompts), setting.samples)
    sizes = np.full(setting.prompts, setting.prompt)
    request = RolloutRequest(prompts, sizes, setting.ranks, setting.limit, setting.slots, 1 << 40)
    rollout = Rollout(request, lengths, H100_7B)
    samples = np.arange(len(lengths))
    longest = longest_first(lengths.astype(np.float64), setting.ranks)
    dealt = {
        "groups": [samples[prompts % setting.ranks == rank] for rank in range(setting.ranks)],
        "oracle": [samples[longest == rank] for rank in range(setting.ranks)],
    }
    plans = {name: RolloutPlan(tuple(ranks), name) for name, ranks in dealt.items()}
    plans |= {"graded": graded(request, lengths), "spread": spread(request), "tie": plan_rollout(request, known)}
    for name, plan in plans.items():
        rank_s = rollout.play(plan).rank_s
        yield name, float(rank_s.max()), float(rank_s.mean())
    computed = replace(rollout, costs=H100_7B._replace(prompt_s=COMPUTED_S))
    moves = {
        "in step": play_moved(rollout, known, EVERY, even_steps=True),
        "moved": play_moved(rollout, known, EVERY),
        "oftener": play_moved(rollout, known, EVERY // 2),
        "sent": play_moved(rollout, known, EVERY, KEY_S),
        "computed": play_moved(computed, known, EVERY),
    }
    for name, moved in moves.items():
        yield name, moved.seconds, moved.busy_s
    yield "bound", (bound := bound_of(request, lengths, H100_7B)).bound_s, bound.shared_s


def graded(request: RolloutRequest, lengths: Ints) -> RolloutPlan:
    """Ranks that have the longest samples, the next ones and so on, and all end at one time, the earliest."""
    order = np.argsort(-lengths, kind="stable")
    tokens = lengths[order].astype(np.float64)
    work_s = H100_7B.work_s(request.prompt_tokens[request.prompts[order]].astype(np.float64), tokens, tokens**2)
    work, full = (
        np.concatenate([[0.0], np.cumsum(one)]) for one in (work_s, work_s + H100_7B.step_s * tokens / request.slots)
    )

    def ends(seconds: float) -> list[int]:
        cuts = [0]
        while cuts[-1] < len(order) and len(cuts) <= request.num_ranks:
            i = cuts[-1]
            first = np.searchsorted(work, work[i] + seconds - H100_7B.step_s * tokens[i], side="right")
            cuts.append(max(i, int(min(first, np.searchsorted(full, full[i] + seconds, side="right"))) - 1))
        return cuts

    low, high = 0.0, float(full[-1] + H100_7B.step_s * tokens.sum())
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle)[-1] == len(order) else (middle, high)
    cuts = [*ends(high), *[len(order)] * request.num_ranks][: request.num_ranks + 1]
    return RolloutPlan(tuple(order[a:b] for a, b in pairwise(cuts)), "graded")


def orders(setting: Setting, checkpoints: Path | None, seeds: int) -> dict[str, Any]:
    """Seconds of a rollout, mean of draws, by the order in which ranks start the same samples."""
    prompts = np.repeat(np.arange(setting.prompts), setting.samples)
    sizes = np.full(setting.prompts, setting.prompt)
    request = RolloutRequest(prompts, sizes, setting.ranks, setting.limit, setting.slots, 1 << 40)
    ends: dict[str, list[float]] = {}
    for seed in range(10, 10 + seeds):
        lengths, known = drawn(setting, checkpoints, seed)
        if setting.name.startswith("sharp"):
            lengths, known = _sharp(known, prompts, seed)
        tail = expected(known, prompts).tail
        plans = {"chosen": plan_rollout(request, known), "least first": plan_rollout(request, known, waits_for="each")}
        ranks = tuple(own[np.argsort(-tail[own], kind="stable")] for own in plans["chosen"].ranks)
        plans |= {"largest tail first": RolloutPlan(ranks, "tail"), "spread": spread(request)}
        for name, plan in plans.items():
            ends.setdefault(name, []).append(float(Rollout(request, lengths, H100_7B).play(plan).rank_s.max()))
    return {"setting": setting.name, **{name: float(np.mean(values)) for name, values in ends.items()}}


def _sharp(known: LengthDistributions, prompts: Ints, seed: int) -> Drawn:
    sigma = np.full(len(known.mu), 0.05)
    noise = np.random.default_rng(seed).standard_t(3.5, size=len(prompts))
    lengths = np.clip(np.exp(known.mu[prompts] + 0.05 * noise), 1, known.limit).astype(np.int64)
    return Drawn(lengths, LengthDistributions(known.mu, sigma, known.limit))


def row_of(setting: Setting, checkpoints: Path | None, seeds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}
    idle: dict[str, list[float]] = {}
    totals: dict[str, list[float]] = {}
    for seed in range(seeds):
        lengths, known = drawn(setting, checkpoints, seed)
        update_s = (lengths.sum() + len(lengths) * setting.prompt) / setting.ranks * UPDATE_S
        for name, rollout_s, busy_s in rollouts(setting, lengths, known):
            seconds.setdefault(name, []).append(rollout_s)
            idle.setdefault(name, []).append(1 - busy_s / rollout_s)
            totals.setdefault(name, []).append(rollout_s + float(update_s))
    mean_s = {name: float(np.mean(values)) for name, values in seconds.items()}
    total_s = {name: float(np.mean(values)) for name, values in totals.items()}
    return {
        "setting": setting.name,
        "earlier": setting.gains,
        "rollout_s": mean_s,
        "idle": {name: float(np.mean(values)) for name, values in idle.items()},
        "gain": {name: total_s["groups"] / total for name, total in total_s.items()},
        "over_bound": {name: value / mean_s["bound"] - 1 for name, value in mean_s.items()},
    }


def planning_s(slots: int) -> float:
    """Least of five: 8,192 samples of 512 prompts on 64 ranks, CPU seconds of a plan."""
    random = np.random.default_rng(1)
    known = LengthDistributions(np.log(2500) + 0.8 * random.normal(size=512), np.full(512, 0.5), 32768)
    request = RolloutRequest(np.repeat(np.arange(512), 16), np.full(512, 512), 64, 32768, slots, 1 << 40)
    return timed(lambda: plan_rollout(request, known), 5)[1]


def table(result: dict[str, Any]) -> Any:
    names = [name for name in result["rows"][0]["gain"] if name != "bound"]
    rows = [
        (
            row["setting"],
            *(f"{row['rollout_s'][n]:.0f} s {row['gain'][n]:.2f}x +{row['over_bound'][n]:.0%}" for n in names),
            f"{row['rollout_s']['bound']:.0f} s",
            row["earlier"],
        )
        for row in result["rows"]
    ]
    by_order = "; ".join(
        f"{row['setting']}: " + ", ".join(f"{name} {value:.0f} s" for name, value in row.items() if name != "setting")
        for row in result["orders"]
    )
    about = (
        "cells: rollout, rollout with update over groups, rollout over the bound\n"
        "planning 8,192 samples on 64 ranks, ms of CPU (measured): "
        + ", ".join(f"{slots} slots {1e3 * taken:.1f}" for slots, taken in result["planning_s"].items())
        + f"\norders: {by_order}"
        + f"\nfitted to five checkpoints: {result['calibration']}"
    )
    return grid("Rollouts on many ranks (predicted)", ("setting", *names, "bound", "earlier"), rows, about)


def benchmark(asked: Any) -> dict[str, Any]:
    file = asked.checkpoints
    settings = [setting for setting in SETTINGS if setting.median or file]
    if asked.quick:
        settings = [settings[-1]._replace(prompts=32)]
    return {
        "predicted": True,
        "rows": [row_of(setting, file, 1 if asked.quick else asked.draws) for setting in settings],
        "orders": [orders(s, file, 8) for s in ORDERS if s.median or file] if not asked.quick else [],
        "calibration": calibration(file) if file else {},
        "planning_s": {slots: planning_s(slots) for slots in (128, 64, 16)},
    }


if __name__ == "__main__":
    main(options(__doc__, checkpoints=Path, quick=False, draws=4), benchmark, table)
