"""What `sparse` refuses, and where it says that a setting has no effect."""

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.recipe.recipe import parse
from evenload.core.recipe.sections import SPARSE_BLOCKS
from evenload.core.recipe.sparse import state_bytes_of

LONG = {"source": "python-stdlib", "max_length": 32768, "validation": {"source": "python-stdlib"}}


def recipe(sparse, **more):
    return parse({"data": LONG, "sparse": sparse, **more})


@pytest.mark.parametrize(
    ("sparse", "said"),
    [
        ({"choose": "sample", "mass": 0}, "sparse.mass is not valid"),
        ({"choose": "sample", "mass": 1.01}, "sparse.mass is not valid"),
        ({"choose": "sample", "limit": 0}, "sparse.limit 0 allows no error"),
        ({"choose": "sample", "dense_share": 0}, "sparse.dense_share is not valid"),
        ({"choose": "kept", "state_bytes": 1000}, "sparse.state_bytes holds the blocks of no sample"),
        ({"choose": "all"}, "sparse.choose is not valid"),
        ({"tau": 0.008}, "sparse has no key 'tau'"),
    ],
)
def test_what_is_wrong_is_refused(sparse, said):
    with pytest.raises(EvenloadError) as caught:
        recipe(sparse)
    assert said in caught.value.what
    assert caught.value.do


def test_the_bytes_of_a_sample_are_those_that_its_blocks_take():
    """The least cap that is not refused; blocks are of the sizes that attention has."""
    from evenload.runtime.attention.choosers import GRID, BlockChoice
    from torch import zeros

    assert (GRID.queries, GRID.keys) == SPARSE_BLOCKS
    one = recipe({"choose": "kept"}, model={"num_layers": 2, "num_query_groups": 4}, parallel={"tp": 2})
    blocks = BlockChoice(zeros(1500, 4, 2), zeros(1500, 2, 2), 1.0, 0.9).empty()
    assert state_bytes_of(one, 1500) == 2 * -(-blocks.numel() // 8)
    least = state_bytes_of(recipe({"choose": "kept"}), 16384)
    recipe({"choose": "kept", "state_bytes": least})
    with pytest.raises(EvenloadError, match="holds the blocks of no sample"):
        recipe({"choose": "kept", "state_bytes": least - 1})


@pytest.mark.parametrize(
    ("sparse", "more", "said"),
    [
        ({}, {}, ""),
        ({"choose": "sample"}, {}, ""),
        ({"mass": 0.5}, {}, "sparse.mass without effect: sparse.choose is dense"),
        ({"choose": "sample", "mass": 1}, {}, "all keys are kept"),
        ({"choose": "sample", "state_bytes": 10**9}, {}, "sparse.state_bytes has no effect"),
        ({"choose": "sample", "min_length": 65536}, {}, "data.max_length 32768 is below sparse.min_length 65536"),
        ({"choose": "sample"}, {"data": LONG | {"validation": None}}, "sparse has no effect in train"),
    ],
)
def test_what_has_no_effect_is_said(sparse, more, said):
    own = recipe(sparse) if not more else parse({"data": LONG, "sparse": sparse, **more})
    assert (own.idle() == []) if not said else (said in own.idle()[0])


def test_a_section_that_is_absent_changes_no_recipe():
    assert not parse({"data": LONG}).sparse.is_on
    assert not recipe({"choose": "sample", "mass": 1}).sparse.is_on
