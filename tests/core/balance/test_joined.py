"""Numbers joined to each other, against sets that are merged by hand."""

from evenload.core.balance.joined import Joined
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=5), max_size=12))
def test_what_is_joined_has_one_first_number_and_nothing_else_does(groups):
    joined, sets = Joined(20), [{number} for number in range(20)]
    for numbers in groups:
        met = set().union(*(one for one in sets if one & set(numbers)))
        sets = [one for one in sets if not one & met] + [met]
        assert joined.join(numbers) == min(met)
    for one in sets:
        assert {joined.first(number) for number in one} == {min(one)}
