"""pass@k and maj@k against what they stand for: all choices of k samples, and votes counted by hand."""

from itertools import combinations

import numpy as np
import pytest
from evenload.training.sampling.figures import figures_of, majority_at, pass_at


@pytest.mark.parametrize("of", [1, 4, 7])
def test_pass_at_k_is_the_share_of_choices_with_a_right_sample(of):
    for k in range(1, of + 1):
        for right in range(of + 1):
            chosen = [any(one < right for one in choice) for choice in combinations(range(of), k)]
            assert pass_at(k, np.array([right]), of) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


def test_pass_at_k_is_the_mean_of_prompts_and_exact_for_many_samples():
    assert pass_at(1, np.array([0, 1, 4]), 4) == pytest.approx((0 + 0.25 + 1) / 3)
    assert pass_at(2000, np.array([1]), 4000) == pytest.approx(0.5)


def test_the_majority_decides_and_ties_share():
    scores = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.5, 0.0]])
    answers = [["a", "b", "b", "a"], ["x", "y", "y", "z"]]
    assert majority_at(3, scores, answers) == pytest.approx((0.0 + 0.75) / 2)
    assert majority_at(4, scores, answers) == pytest.approx((0.5 + 0.75) / 2)
    assert majority_at(2, scores[:1], [["a", None]]) == 1.0
    assert majority_at(2, scores[:1], [[None, None]]) == 0.0, "nobody votes"


def test_a_line_has_the_scores_alone():
    row = {"score": 0.25, "pass_at_1": 0.25, "maj_at_4": 0.5, "tokens": 40, "cut_frac": 0.1}
    assert figures_of(row) == "score 0.250, pass@1 0.250, maj@4 0.500"
