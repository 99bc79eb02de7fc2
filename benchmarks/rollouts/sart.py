"""SART (arXiv 2505.13326): keep M of N samples, prune by score; 15.7x in the mean at equal accuracy.

    python benchmarks/rollouts/sart.py [--quick] [--json] [--out FILE]

Votes: 600 questions, each right with a chance of its own (Beta 2, 1.5), wrong answers one of four. Lengths of samples
are log-t (3.5 degrees of freedom, scale 0.5) about their question's median (2,500, log-normal 0.6), wrong ones a fifth
longer, at most 16,384 tokens. A score at a border is 0.5, for right samples 0.15 more, with noise of 0.2 that stays
with the sample and 0.1 that does not. Every rule is run by `plugins.rollout.Collected`, borders every 1,024 tokens.

    work    tokens that are generated
    wait    tokens until the last sample that is needed ends

of the cheapest rule of each kind that is as accurate as the vote of all of 4, 8 and 16, to half a point; samples of the
same questions for all. What the paper has beyond this is its server: fewer tokens let more requests run at once there.

Gradients: a policy with a short and a long strategy, alike in chance, of which the long one earns more (0.7, 0.3): its
REINFORCE gradient with a leave-one-out mean is -0.1 for the logit of the short one, if all samples count.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.commands.tables.show import emit, grid
from evenload.core.aliases import Floats, Ints
from evenload.plugins.rollout import Collect, Collected, Prune, ended_by, kept_beside_all, samples_for
from evenload.plugins.rollout.student_t import survival

LIMIT, EVERY, MOST = 16_384, 1024, 24
LEEWAY = 0.005


class Questions(NamedTuple):
    """Samples of every question, `MOST` each."""

    lengths: Ints
    answers: Ints
    """0 is right."""
    scores: Floats
    """At each border [Q, N, borders]."""


def drawn(count: int, seed: int = 0) -> Questions:
    random = np.random.default_rng(seed)
    shape = (count, MOST)
    right = random.random(shape) < random.beta(2, 1.5, (count, 1))
    answers = np.where(right, 0, random.choice([1, 2, 3, 4], shape, p=[0.5, 0.25, 0.15, 0.1]))
    mu = np.log(2500) + 0.6 * random.normal(size=(count, 1)) + np.log(1.2) * ~right
    lengths = np.clip(np.exp(mu + 0.5 * random.standard_t(3.5, size=shape)), 16, LIMIT).astype(np.int64)
    own = 0.5 + 0.15 * right + 0.2 * random.normal(size=shape)
    return Questions(lengths, answers, own[..., None] + 0.1 * random.normal(size=(*shape, LIMIT // EVERY + 1)))


def rules(quick: bool) -> Iterator[tuple[str, Collect]]:
    """Kind and rule."""
    sizes = (4, 8) if quick else (2, 4, 6, 8, 12, 16, 24)
    for of in sizes:
        yield "all of N", Collect(of, of, EVERY)
        for keep in sizes:
            if keep < of:
                yield "M of N", Collect(keep, of, EVERY)
                for below in (0.3, 0.5):
                    yield "M of N, pruned", Collect(keep, of, EVERY, Prune(below, of // 2))


def run(rule: Collect, questions: Questions, question: int) -> dict[str, float]:
    """One question by a rule: whether the vote is right, what it takes, what is kept."""
    lengths, scores = questions.lengths[question, : rule.of], questions.scores[question]
    state = Collected(rule)
    while state.live:
        border, index = state.border + EVERY, state.border // EVERY
        ended = {i: int(lengths[i]) for i in state.live if lengths[i] <= border}
        at = {i: float(scores[i, index]) for i in state.live} if rule.prune else {}
        state = state.at_border(ended, at)
    votes = Counter(int(questions.answers[question, number]) for _, number in state.ended)
    row = kept_beside_all(state, lengths, scores[: rule.of, 0])
    best = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == best]
    return {**row, "right": (0 in winners) / len(winners), "wait": state.ended[-1][0]}


def votes(count: int, quick: bool) -> list[dict[str, Any]]:
    questions = drawn(count)
    rows = []
    for kind, rule in rules(quick):
        each = [run(rule, questions, question) for question in range(count)]
        means = {key: float(np.mean([one[key] for one in each])) for key in each[0]}
        rows.append({"kind": kind, "keep": rule.keep, "of": rule.of, "prune": rule.prune and rule.prune.below, **means})
    return rows


def at_equal_accuracy(rows: list[dict[str, Any]], of: int) -> list[dict[str, Any]]:
    """The cheapest rule of each kind, by work and by wait, that is as right as all of so many."""
    (bar,) = (row for row in rows if row["kind"] == "all of N" and row["of"] == of)
    answer = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        able = [row for row in rows if row["kind"] == kind and row["right"] >= bar["right"] - LEEWAY]
        for by in ("tokens", "wait") if able else ():
            best = min(able, key=lambda row: row[by])
            gains = {"work_gain": bar["tokens"] / best["tokens"], "wait_gain": bar["wait"] / best["wait"]}
            answer.append({"as": of, "by": "work" if by == "tokens" else by, **best, **gains})
    return answer


def gradients(count: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    rows = []
    for of in (8, 12, 16):
        short = random.random((count, of)) < 0.5
        log_lengths = np.where(short, 6.0, 7.2) + np.where(short, 0.4, 0.6) * random.standard_t(3.5, size=(count, of))
        rewards = (random.random((count, of)) < np.where(short, 0.3, 0.7)).astype(np.float64)
        kept = np.argsort(log_lengths, axis=1, kind="stable")[:, :8]
        s, r = np.take_along_axis(short, kept, 1), np.take_along_axis(rewards, kept, 1)
        each = ((s - 0.5) * (r - (r.sum(1, keepdims=True) - r) / 7)).mean(axis=1)
        rows.append({"of": of, "short": float(s.mean()), "gradient": float(each.mean()), "error": float(each.std())})
        rows[-1]["error"] /= count**0.5
    return rows


def order_statistics() -> dict[str, Any]:
    """Samples of which 8 end by the length that nine in ten samples of one question do not pass."""
    mu, sigma, tokens = float(np.log(2500)), 0.5, 3000
    share = 1 - float(survival(np.array((np.log(tokens) - mu) / sigma)))
    of = samples_for(8, mu, sigma, tokens, 0.9)
    return {"share": share, "of": of, "chance": ended_by(8, of, share), "one_fewer": ended_by(8, of - 1, share)}


def table(result: dict[str, Any]) -> Any:
    rows = [
        (
            f"all of {row['as']}",
            row["kind"],
            row["by"],
            f"{row['keep']} of {row['of']}" + (f", below {row['prune']}" if row["prune"] else ""),
            f"{100 * row['right']:.1f} %",
            f"{row['work_gain']:.2f}x",
            f"{row['wait_gain']:.2f}x",
            f"{row['kept_tokens']:.0f} / {row['mean_tokens']:.0f}",
            f"{row['kept_score']:.3f} / {row['mean_score']:.3f}",
        )
        for row in result["rows"]
    ]
    head = ("as right as", "kind", "least", "rule", "right", "work", "wait", "tokens kept / all", "score kept / all")
    notes = [
        f"8 of {row['of']}: {row['short']:.2f} are short, gradient {row['gradient']:+.4f} +- {row['error']:.4f}"
        for row in result["gradients"]
    ]
    o = result["order_statistics"]
    notes.append(f"8 by a length that {o['share']:.2f} do not pass: of {o['of']} in {o['chance']:.3f} of cases")
    return grid(f"{result['title']} (predicted)", head, rows, "\n".join(notes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="Few questions, few rules.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    options = parser.parse_args()
    rows = votes(100 if options.quick else 600, options.quick)
    result = {
        "predicted": True,
        "title": "SART: work and wait at equal accuracy; the paper has 15.7x",
        "rows": [row for of in ((4,) if options.quick else (4, 8, 16)) for row in at_equal_accuracy(rows, of)],
        "gradients": gradients(2000 if options.quick else 40_000),
        "order_statistics": order_statistics(),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, options.json, table)


if __name__ == "__main__":
    main()
