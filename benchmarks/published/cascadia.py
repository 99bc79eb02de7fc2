"""Cascadia (arXiv 2506.04203): models of 7B, 70B and 671B on 32 H100; 2.3x tighter latency, 2.4x the throughput.

    python benchmarks/published/cascadia.py [--quick] [--json] [--out FILE]

A request comes to the 7B model; where its answer scores below a threshold it goes on. A replica of tp x pp cards reads
its weights once a decode step and a key's bytes for each key, at 3.35 TB/s a card, with 10 us for each all-reduce; a
token of a prompt takes 2 FLOPs a weight at 40 % of the peak. What a model takes on f cards is the least p95 latency of
any tp x pp x dp, played by `plugins.rollout` with Poisson arrivals; replicas get requests in turn.

    one model    the 671B on all cards, in its best layout
    equal        our thresholds, as many cards for each model that is used
    ours         `plan_cascade` of all three, two, or the 671B: the fewest seconds of the slowest above the floor

latency      p95 from a request's arrival to its last answer, all models that it passes, at the most one model serves
throughput   most requests/s at which that is within 3 times what one model takes for a lone request

At these costs the 671B, of which a token needs 37 billion weights, is hardly dearer than the 70B, so nothing is gained;
``slower``: as many times its seconds, since servers of such models are far from what their bytes allow.

Guessed, as the paper's traces could not be had: prompts of 512 tokens, outputs log-normal (median 300, sigma 0.6, 2,048
at most), a judge's scores (sigmoid of skill over difficulty, skills 0, 1 and 1.8, noise 0.5), 4-bit weights of the 671B
of which a step of a full batch reads two thirds; floors are shares of its mean score. The paper's baselines are other
servers than these two, so that its gains stand next to ours for their size alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from evenload.benchmarks.frame import columns
from evenload.benchmarks.published.common import arguments, finish
from evenload.core.aliases import Floats
from evenload.core.errors import EvenloadError
from evenload.core.input.format import seconds
from evenload.plugins.rollout import CascadePlan, InOrder, Rollout, RolloutCosts, RolloutRequest, plan_cascade

CARDS, PROMPT, LIMIT, SLOTS = 32, 512, 2048, 128
BYTES_PER_S, FLOPS, MEMORY, REDUCE_S = 3.35e12, 9.89e14, 0.9 * 80e9, 1e-5
PAPER = {"latency": 2.3, "throughput": 2.4}
RATES = np.geomspace(0.02, 160, 18)
"""Requests/s of a replica."""


class Model(NamedTuple):
    name: str
    weights: float
    """Active in a token."""
    layers: int
    held_bytes: float
    read_bytes: float
    """Of a decode step of a full batch."""
    key_bytes: float
    skill: float


MODELS = (
    Model("7B", 7.6e9, 28, 15e9, 15e9, 57344, 0.0),
    Model("70B", 70e9, 80, 141e9, 141e9, 327680, 1.0),
    Model("671B", 37e9, 61, 350e9, 233e9, 70272, 1.8),
)
LAYOUTS = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) if tp == 8 or pp == 1]


class Requests(NamedTuple):
    lengths: Any
    scores: Floats


def requests(count: int, seed: int) -> Requests:
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(np.log(300) + 0.6 * random.normal(size=count)), 1, LIMIT).astype(np.int64)
    margin = np.array([model.skill for model in MODELS]) - random.normal(size=(count, 1))
    return Requests(lengths, 1 / (1 + np.exp(-2 * margin - 0.5 * random.normal(size=margin.shape))))


class Setting(NamedTuple):
    slower: float
    window_s: float
    """For which requests come."""

    def count(self, rate: float) -> int:
        return max(150, int(rate * self.window_s))


def replica(model: Model, tp: int, pp: int, slower: float = 1.0) -> tuple[RolloutCosts, int] | None:
    """Costs and room for keys of tp x pp cards; None where the model does not fit."""
    cap = int((MEMORY * tp * pp - model.held_bytes) / model.key_bytes)
    if cap < 2 * (PROMPT + LIMIT):
        return None
    step_s = model.read_bytes / (BYTES_PER_S * tp) + (2 * model.layers * REDUCE_S if tp > 1 else 0.0) + 2e-5 * (pp - 1)
    token_s = 2 * model.weights / (0.4 * FLOPS * tp * pp)
    each_s = step_s, token_s, model.key_bytes / (BYTES_PER_S * tp * pp), token_s
    return RolloutCosts(*(slower * one for one in each_s)), cap


def ends(model: int, slower: float, layout: tuple[int, int], num: int, lengths: Any, arrivals_s: Floats) -> Floats:
    """When requests end on ``num`` replicas that get them in turn."""
    fitted = replica(MODELS[model], *layout, slower)
    assert fitted is not None
    costs, cap = fitted
    end_s, order = np.zeros(len(lengths)), np.argsort(arrivals_s, kind="stable")
    for own in (order[first::num] for first in range(min(num, len(lengths)))):
        request = RolloutRequest(np.arange(len(own)), np.full(len(own), PROMPT), 1, LIMIT, SLOTS * layout[1], cap)
        rollout = Rollout(request, lengths[own], costs, np.full(len(own), 400))
        end_s[own] = rollout.serve(InOrder(), arrivals_s[own]).end_s
    return end_s


def p95(values: Floats) -> float:
    return float(np.quantile(values, 0.95))


@cache
def curve(model: int, setting: Setting, layout: tuple[int, int]) -> Floats:
    """p95 latency of one replica by requests/s; infinite where it falls behind."""
    values = np.full(len(RATES), np.inf)
    for place, rate in enumerate(RATES):
        of = requests(count := setting.count(rate), 1)
        arrivals_s = np.cumsum(np.random.default_rng(2).exponential(1 / rate, count))
        took_s = ends(model, setting.slower, layout, 1, of.lengths, arrivals_s) - arrivals_s
        if took_s[count // 2 :].mean() > 1.5 * took_s[: count // 2].mean():
            break
        values[place] = p95(took_s)
    return values


def latency_s(model: int, setting: Setting, layout: tuple[int, int], rate: float) -> float:
    values = curve(model, setting if model == 2 else setting._replace(slower=1.0), layout)
    place = int(np.searchsorted(RATES, rate))
    if place in (0, len(RATES)) or values[place] == np.inf:
        return float(values[0] if place == 0 else np.inf)
    share = np.log(rate / RATES[place - 1]) / np.log(RATES[place] / RATES[place - 1])
    return float(values[place - 1] ** (1 - share) * values[place] ** share)


def best_layout(model: int, setting: Setting, cards: int, rate: float) -> tuple[float, tuple[int, int], int]:
    """The least p95 latency on so many cards, and its layout and replicas."""
    fitting = [one for one in LAYOUTS if one[0] * one[1] <= cards and replica(MODELS[model], *one)]
    counts = [cards // (tp * pp) for tp, pp in fitting]
    each = [(latency_s(model, setting, one, rate / num), one, num) for one, num in zip(fitting, counts, strict=True)]
    return min(each, default=(np.inf, (1, 1), 1))


def served(setting: Setting, plan: CascadePlan, devices: tuple[int, ...], rate: float) -> float:
    """p95 from arrival to the last answer of drawn requests; a model without devices is passed by."""
    of = requests(setting.count(rate), 3)
    arrivals_s = np.cumsum(np.random.default_rng(4).exponential(1 / rate, len(of.lengths)))
    end_s, comes = arrivals_s.copy(), np.arange(len(of.lengths))
    for model, cards in enumerate(devices):
        if cards and len(comes):
            least_s, layout, num = best_layout(model, setting, cards, rate * len(comes) / len(end_s))
            if least_s == np.inf:
                return np.inf
            slower = setting.slower if model == 2 else 1.0
            end_s[comes] = ends(model, slower, layout, num, of.lengths[comes], end_s[comes])
        if model < len(plan.thresholds):
            comes = comes[of.scores[comes, model] < plan.thresholds[model]]
    return p95(end_s - arrivals_s)


def plan_of(setting: Setting, rate: float, floor: float) -> CascadePlan | None:
    """The best plan of some models; those that it leaves out have no device, and nothing stops there."""
    scores, best = requests(400, 5).scores, None
    for used in [(0, 1, 2), (0, 2), (1, 2), (0, 1), (2,)]:

        def latencies(place: int, share: float, used: tuple[int, ...] = used) -> Floats:
            cards = range(1, CARDS + 1)
            return np.array([best_layout(used[place], setting, one, rate * share)[0] for one in cards])

        try:
            plan = plan_cascade(scores[:, used], latencies, CARDS, floor * scores[:, -1].mean(), most=12)
        except EvenloadError:
            continue
        if best is None or plan.seconds < best.seconds:
            devices = dict(zip(used, plan.devices, strict=True))
            stops = dict(zip(used[:-1], plan.thresholds, strict=True)) | {used[-1]: -np.inf}
            thresholds = tuple(stops.get(model, np.inf) for model in range(2))
            best = plan._replace(thresholds=thresholds, devices=tuple(devices.get(model, 0) for model in range(3)))
    return best


NAMES = ("one model", "equal", "ours")
ALONE = CascadePlan((np.inf, np.inf), (0, 0, CARDS), (0, 0, 1), 0.0, 0.0)


def planned(setting: Setting, rate: float, floor: float) -> tuple[dict[str, float], CascadePlan]:
    """p95 seconds of the three at a rate, and our plan."""
    plan = plan_of(setting, rate, floor)
    took = {"one model": served(setting, ALONE, ALONE.devices, rate), "equal": np.inf, "ours": np.inf}
    if plan is not None:
        num = sum(cards > 0 for cards in plan.devices)
        equal = tuple(CARDS // num if cards else 0 for cards in plan.devices)
        took |= {"equal": served(setting, plan, equal, rate), "ours": served(setting, plan, plan.devices, rate)}
    return took, plan or ALONE


def row(setting: Setting, floor: float, rates: Floats) -> dict[str, Any]:
    limit_s = 3 * best_layout(2, setting, CARDS, RATES[0])[0]
    by_rate = {float(rate): planned(setting, float(rate), floor)[0] for rate in rates}
    most = {name: max((rate for rate, took in by_rate.items() if took[name] <= limit_s), default=0.0) for name in NAMES}
    at = most["one model"]
    took, plan = planned(setting, at, floor)
    return {
        "slower": setting.slower,
        "floor": floor,
        "at": at,
        "seconds": {name: _finite(one) for name, one in took.items()},
        "devices": plan.devices,
        "most": most,
        "latency": {name: _finite(took[name] / took["ours"]) for name in NAMES[:2]},
        "throughput": {name: _finite(most["ours"] / most[name]) if most[name] else None for name in NAMES[:2]},
    }


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def table(result: dict[str, Any]) -> Any:
    def gain(kind: str) -> Any:
        return lambda row: ", ".join(f"{over:.2f}x" if over else "-" for over in row[kind].values())

    def p95_of(name: str) -> Any:
        return lambda row: seconds(row["seconds"][name]) if row["seconds"][name] else "falls behind"

    cells = {
        "671B slower": "{slower:g}x",
        "floor": "{floor:percent}",
        "cards": lambda row: ", ".join(str(cards) for cards in row["devices"]),
        **{f"p95, {name}": p95_of(name) for name in NAMES},
        "tighter": gain("latency"),
        **{f"requests/s, {name}": f"{{most[{name}]:.1f}}" for name in NAMES},
        "more": gain("throughput"),
    }
    about = "tighter, more: ours over one model and over equal cards; the paper: 2.3x and 2.4x over other servers"
    return columns(f"{result['title']} (predicted)", result["rows"], cells, about)


def benchmark(quick: bool) -> dict[str, Any]:
    settings = [Setting(slower, 10 if quick else 30) for slower in ((4.0,) if quick else (1.0, 4.0, 8.0))]
    rates = np.geomspace(4, 256, 4 if quick else 13)
    rows = [row(setting, floor, rates) for setting in settings for floor in ((0.9,) if quick else (0.95, 0.9, 0.8))]
    return {"title": "Cascadia: 7B, 70B, 671B on 32 H100", "paper": PAPER, "rows": rows}


if __name__ == "__main__":
    asked = arguments(__doc__)
    finish(benchmark(asked.quick), asked, table)
