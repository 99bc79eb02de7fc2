"""What `benchmarks/planning/search_measured.py` says of two orders; its runs train for minutes."""

import pytest
from evenload.api import load_recipe
from evenload.benchmarks.planning import search_measured


def test_tau_b_counts_pairs_and_leaves_ties_out():
    assert search_measured.tau_b([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert search_measured.tau_b([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert search_measured.tau_b([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 6**0.5)


def test_an_inversion_is_a_pair_far_apart_that_is_predicted_the_other_way_round():
    rows = [
        {"setting": name, "experts": False, "measured_s": measured, "predicted_s": predicted}
        for name, measured, predicted in (("a", 1.0, 2.0), ("b", 1.1, 1.0), ("c", 1.3, 1.5))
    ]
    assert search_measured.inversions(rows) == [("a", "c")]
    said = search_measured.summary(rows)
    assert (said["choice"], said["settings"]) == ("b", 3)
    assert said["choice_over_best"] == pytest.approx(1.1)
    assert said["tau_b"] == pytest.approx(-1 / 3)


def test_every_setting_is_a_recipe():
    for setting in search_measured.SETTINGS:
        words = search_measured.words_of(setting, 2)
        assert load_recipe(words[0], words[1:]).trainer == setting.trainer
    assert len({setting.name for setting in search_measured.SETTINGS}) >= 16
