"""The bound of whole and cut sequences, term by term as its equations have it, in seconds by hand."""

from __future__ import annotations

import numpy as np
import pytest
from evenload.core.balance.bound import lower_bound_s
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.plan.limits import Limits

CAP, RANKS = 100, 4
FORWARD = PassCost(launch_s=1.0, token_s=0.01, expert_s=0.03, pair_s=1e-4)
BACKWARD = PassCost(launch_s=2.0, token_s=0.02, expert_s=0.05, pair_s=2e-4)
LIMITS = Limits(num_ranks=RANKS, max_tokens=CAP)
BATCHES = {
    "alone": [250],
    "even": [25] * 16,
    "few": [30, 20],
    "at the cap": [100] * 3,
    "many": [1] * 90 + [350],
    "short": [5] * 16,
}


def costs(ep: int, *, recompute: bool = False) -> Costs:
    return Costs(source="by hand", forward=FORWARD, backward=BACKWARD, ep=ep, recompute=recompute)


def by_hand(lengths: list[int], ep: int, forward_share: float = 1.0, prefix_s: tuple[float, ...] = ()) -> float:
    """The largest of mean, most tokens and costliest sequence; ``forward_share``: of forwards that must run."""
    launch_s = 1.0 * forward_share + 2.0
    token_s, expert_s, pair_s = 0.01 * forward_share + 0.02, 0.03 * forward_share + 0.05, 1e-4 * forward_share + 2e-4
    more_s = prefix_s or (0.0,) * len(lengths)
    each_s = [(token_s + expert_s) * n + pair_s * n * n / 2 + more for n, more in zip(lengths, more_s, strict=True)]
    launches = max(min(RANKS, len(lengths)), -(-sum(lengths) // CAP))
    mean_s = (sum(each_s) + launches * launch_s) / RANKS
    tokens = sum(lengths) / RANKS
    most_s = (token_s + expert_s) * tokens + -(-tokens // CAP) * launch_s
    alone_s = max(
        (token_s + expert_s / ep) * n + pair_s * n * n / 2 + more + -(-n // CAP) * launch_s
        for n, more in zip(lengths, more_s, strict=True)
    )
    return max(mean_s, most_s, alone_s)


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_the_bound_is_the_largest_of_its_terms(name: str, ep: int) -> None:
    """Of a sequence alone on a rank its experts may be on all ranks of the group."""
    lengths = BATCHES[name]
    assert lower_bound_s(np.array(lengths), LIMITS, costs(ep)) == pytest.approx(by_hand(lengths, ep), rel=1e-12)
    whole = Limits(num_ranks=RANKS, max_tokens=CAP, whole_sequences=True)
    kept = lower_bound_s(np.array(lengths), whole, costs(ep, recompute=True))
    assert kept == pytest.approx(by_hand(lengths, ep), rel=1e-12), "every stage runs all forwards"


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_a_last_stage_that_recomputes_need_not_run_forwards_but_for_keys_of_earlier_slices(name: str, ep: int) -> None:
    """Of two stages one, without its output layer: a quarter of a token's forward."""
    lengths, head = BATCHES[name], 0.25
    limits = Limits(num_ranks=RANKS, max_tokens=CAP, num_stages=2)
    early = [max(0, n - CAP) for n in lengths]
    prefix_s = tuple(0.5 * ((0.01 * (1 - head) + 0.03 / ep) * n + 1e-4 * n * n / 2) for n in early)
    bound_s = lower_bound_s(np.array(lengths), limits, costs(ep, recompute=True), head)
    assert bound_s == pytest.approx(by_hand(lengths, ep, 0.5, prefix_s), rel=1e-12)


def test_no_sequence_takes_no_time() -> None:
    assert lower_bound_s(np.zeros(0, int), LIMITS, costs(1)) == 0.0
