"""The comparison of two sets of texts: every pair in both orders, repeated; what a judge's place and style do to it.

| row | rests on |
|---|---|
| one order | what a plain comparison says: A first, once |
| both orders | the mean of both orders and all repeats, a tie half a win |
| within 10 words | pairs of equal length alone |
| equal style | all pairs, with words, list items and headings regressed out (`estimates`) |
| people | both orders, corrected by people's verdicts on some prompts (`core.corrected_mean`) |

The verdict is that of people where there are some, else that at equal style.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.corrected_mean import CorrectedMean, corrected_mean
from ...core.errors import refuse_first
from .estimates import FEWEST, Rate, counts_of, rate_at_equal_style, rate_of, sign_test
from .judges import Judge, Question
from .pairs import Pairs

CLOSE = 10
"""Words by which texts of one length may differ."""
MISSED = 0.01
"""A share of prompts of which the result says how probably people saw none."""


def compare(pairs: Pairs, judge: Judge, repeats: int = 1, people: tuple[Ints, Floats] | None = None) -> dict[str, Any]:
    """The documented result of ``compare --json``.

    Args:
        people: pairs that people judged, and how far they preferred A, as `pairs.read_people` gives them.

    Raises EvenloadError where the judge fails, or says the same of every pair.
    """
    answers, asked = _answers(pairs, judge, repeats)
    values, of, counts = answers.mean((1, 2)), pairs.of, counts_of(pairs.texts)
    longer = counts[:, 0, 0] - counts[:, 1, 0]
    strata = {"shorter": longer < -CLOSE, "within": abs(longer) <= CLOSE, "longer": longer > CLOSE}
    both = rate_of(values, of)
    style = rate_at_equal_style(values, of, counts)
    means = np.bincount(of, values) / np.bincount(of)
    corrected = _corrected(means, values, of, *people) if people else None
    wins, losses = int((means > 0.5).sum()), int((means < 0.5).sum())
    verdict, says = _verdict(style, corrected, wins + losses)
    first, unequal = answers[asked] * [1, -1] + [0, 1], asked & (longer != 0)
    return {
        "verdict": verdict,
        "says": says,
        "prompts": len(means),
        "pairs": len(values),
        "left_out": pairs.left_out,
        "calls": int(asked.sum()) * 2 * repeats,
        "one_order": _row(rate_of(answers[:, 0, 0], of)),
        "both_orders": _row(both),
        "by_length": {name: _row(rate_of(values[inside], of[inside])) for name, inside in strata.items()},
        "equal_style": None if isinstance(style, str) else _row(style),
        "people": corrected and {**_row(Rate(*corrected)), "missed": corrected.missed(MISSED)},  # type: ignore[dict-item]
        "sign_test": {"wins": wins, "losses": losses, "ties": len(means) - wins - losses, "p": sign_test(wins, losses)},
        "judge": {
            "first": _mean(first),
            "flips": _mean((first[:, :, 0] - 0.5) * (first[:, :, 1] - 0.5) > 0),
            "repeats_differ": _mean(np.ptp(answers[asked], 1) > 0) if repeats > 1 else None,
            "longer": _mean(np.where(longer > 0, values, 1 - values)[unequal]),
        },
        "words": counts[:, :, 0].mean(0).tolist(),
    }


def _answers(pairs: Pairs, judge: Judge, repeats: int) -> tuple[Floats, Any]:
    """How far A is preferred [P, repeats, 2], A first and B first, and the pairs that were asked about, bool [P]: equal
    texts are a tie."""
    asked = np.array([a != b for a, b in pairs.texts])
    answers = np.full((len(asked), repeats, 2), 0.5)
    chosen = [(pairs.prompts[pairs.of[place]], *pairs.texts[place]) for place in np.flatnonzero(asked)]
    questions = [
        Question(prompt, *texts) for prompt, a, b in chosen for _ in range(repeats) for texts in ((a, b), (b, a))
    ]
    said = np.array(judge(questions) if questions else [])
    do = "check that it reads what it is given"
    same = len(chosen) > 1 and float(np.ptp(said)) == 0
    detail = f"{said[0] if same else ''} for the first text in all {len(said)} answers"
    refuse_first((same, "the judge says the same of every pair", detail, do))
    answers[asked] = said.reshape(-1, repeats, 2)
    answers[asked, :, 1] = 1 - answers[asked, :, 1]
    return answers, asked


def _corrected(means: Floats, values: Floats, of: Ints, judged: Ints, people: Floats) -> CorrectedMean:
    """What people would say of all prompts: on a prompt they correct the judge by the pairs of it that they judged."""
    prompts, inside = np.unique(of[judged], return_inverse=True)
    error = np.bincount(inside, people - values[judged]) / np.bincount(inside)
    return corrected_mean(means, means[prompts] + error, prompts, of_these=False)


def _verdict(style: Rate | str, people: CorrectedMean | None, decided: int) -> tuple[str, str]:
    if people is None and isinstance(style, str):
        return "no verdict", f"{style}: what is style and what is better cannot be told apart"
    if (people.drawn if people else decided) < FEWEST:
        who = "people judged" if people else "the judge prefers a text for"
        return "no verdict", f"{who} fewer than {FEWEST} prompts"
    rate = Rate(*people) if people else style
    assert isinstance(rate, Rate)
    whose = "by people's verdicts" if people else "at equal style"
    says = f"{whose} A wins {100 * rate.rate:.1f} % ({100 * rate.low:.1f} to {100 * rate.high:.1f} %)"
    if rate.low <= 0.5 <= rate.high:
        return "no verdict", f"{says}, which holds the middle"
    return "A" if rate.rate > 0.5 else "B", says


def _row(rate: Rate | None) -> dict[str, Any] | None:
    return None if rate is None else rate._asdict()


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if np.size(values) else None
