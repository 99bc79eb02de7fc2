"""`evenload.cascade`: reward functions from cheap to dear as one, for TRL's ``reward_funcs``."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.cascade import Cascaded, cascaded, joined, warn_if_lossy
from ...core.corrected_mean import drawn
from ...core.errors import EvenloadError, RankError, refuse_first, shorten, shown
from ...core.recipe.generated import Band, bands_of
from ...runtime.world.agreement import all_or_none, everyone, rank_and_size
from .scorers import score_on_ranks

Reward = Callable[..., Sequence[float]]
_OF_A_RANK = ("log_extra", "log_metric")
"""Arguments of TRL about samples where they are, which scorers do not get."""
_CALLS = 1000
_DO = "give functions as TRL takes them: (function, (low, high)) each, and the last function alone"


def cascade(
    scorers: Sequence[tuple[Reward, Band] | Reward], rescore: float = 0.1, *, correct: bool = False, seed: int = 0
) -> CascadeReward:
    """Several reward functions as one, from cheap to dear. All ranks call it together, as TRL's Trainers do.

    Args:
        scorers: ``(function, (low, high))``, and the last function alone, as TRL calls them. Samples that score from
            low to high go on to the next one.
        rescore: share, drawn by hash, that the last one scores anyway: the mean in ``figures`` and TRL's log is its.
        correct: drawn rewards are cheap + (dear - cheap) / rescore, the last one's in the mean: for advantages that no
            deviation divides.

    Raises EvenloadError for bands that are none, and RankError, on every rank, for a scorer that fails.
    """
    pairs = [one if isinstance(one, tuple) else (one, None) for one in scorers]
    try:
        ends = [band if band is None else (float(band[0]), float(band[1])) for _, band in pairs]
    except (TypeError, ValueError, IndexError) as error:
        raise EvenloadError("evenload.cascade: a band is no two numbers", shown(scorers), _DO) from error
    bands = bands_of("evenload.cascade", ends)
    refuse_first(
        (not all(callable(one) for one, _ in pairs), "evenload.cascade: a scorer is no function", shown(scorers), _DO),
        (not 0 <= rescore <= 1, "evenload.cascade: rescore is no share", shown(rescore), "give a number from 0 to 1"),
        (correct and not rescore, "evenload.cascade: nothing is drawn to correct by", "rescore 0", "set rescore=0.1"),
    )
    warn_if_lossy(bands, rescore, "evenload.cascade")
    return CascadeReward([one for one, _ in pairs], bands, rescore, correct, seed)


class CascadeReward:
    """The reward function that `cascade` gives."""

    __name__ = "cascade"

    def __init__(
        self, functions: Sequence[Reward], bands: Sequence[Band], rescore: float, correct: bool, seed: int
    ) -> None:
        self._functions, self._bands = functions, bands
        self._rescore, self._seed = rescore, seed
        self._correct = correct
        self._names = [getattr(one, "__name__", type(one).__name__) for one in functions]
        self._alike: set[str] = set()
        self._calls = 0
        self._last: deque[Cascaded] = deque(maxlen=_CALLS)

    @property
    def figures(self) -> dict[str, float]:
        """What all ranks' samples of the last 1,000 calls came to: the mean with its interval, who scored how many."""
        return joined(self._last).figures if self._last else {}

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Rewards of this rank's samples. Collective."""
        arguments = {"prompts": prompts, "completions": completions}
        arguments |= {name: value for name, value in columns.items() if name not in _OF_A_RANK}
        of_all = {name: value for name, value in arguments.items() if not _is_column(value, len(completions))}
        own = [{name: arguments[name][i] for name in arguments.keys() - of_all} for i in range(len(completions))]
        costs = everyone([1.0 + len(row.get("completion_ids") or str(row["completions"])) for row in own])
        first = [range(end - len(part), end) for part, end in zip(costs, accumulate(map(len, costs)), strict=True)]
        here = first[rank_and_size()[0]]
        rows = dict(zip(here, own, strict=True))

        def work(number: int, places: Sequence[int]) -> list[float]:
            return self._rewards(number, [rows[place] for place in places], of_all) if places else []

        score = score_on_ranks(self._names, np.concatenate(costs), first, work, self._alike)

        def after_moves(number: int, places: Ints) -> tuple[Floats, Floats]:
            if number:
                rows.update(_everywhere({place: rows[place] for place in places.tolist() if place in here}))
            return score(number, places)

        keys = [f"{self._calls} {place}" for place in range(first[-1].stop)]
        self._calls += 1
        of = cascaded(self._bands, drawn(keys, self._rescore, self._seed), after_moves)
        self._last.append(of)
        corrected = of.scores + np.where(of.rescored, of.dear - of.scores, 0.0) / (self._rescore or 1.0)
        if log_metric := columns.get("log_metric"):
            log_metric("cascade/score_uncorrected", float(of.scores.mean()))
            log_metric("cascade/score", float(corrected.mean()))
            for number, count in enumerate(of.counts[1:], 2):
                log_metric(f"cascade/share_of_scorer_{number}", count / len(of.scores))
        rewards: list[float] = (corrected if self._correct else of.scores)[here.start : here.stop].tolist()
        return rewards

    def _rewards(self, number: int, rows: Sequence[Mapping[str, Any]], of_all: Mapping[str, Any]) -> list[float]:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        what, do = f"the scorer {self._names[number]}", "mend it: it gives a finite number for each completion"
        try:
            values = [float(value) for value in self._functions[number](**columns, **of_all)]
        except Exception as error:  # whatever the user's function raises or gives
            raise RankError(f"{what} failed", shorten(f"{type(error).__name__}: {error}"), do) from error
        if len(values) != len(rows) or not np.isfinite(values).all():
            raise RankError(f"{what} gave no number for each of {len(rows)} completions", shown(values), do)
        return values


def _is_column(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count


def _everywhere(rows: dict[int, Any]) -> dict[int, Any]:
    """Samples of all ranks by their places. Collective."""

    def packed() -> bytes:
        try:
            return pickle.dumps(rows)
        except Exception as error:
            do = "leave columns out that hold objects, or give a single scorer"
            raise RankError("samples cannot be sent to other ranks", shorten(str(error)), do) from error

    if rank_and_size()[1] == 1:
        return rows
    return {place: row for part in everyone(all_or_none(packed)) for place, row in pickle.loads(part).items()}
