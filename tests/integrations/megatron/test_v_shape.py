from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.slow
V = {"plugins__pipeline": {"enabled": True, "v_shape": True}}


@pytest.mark.parametrize("model", [{}, {"model__tied_embeddings": True}], ids=["", "tied"])
def test_devices_hold_the_weights_of_their_stages(on_ranks, model):
    whole = on_ranks(1, "initial_weights", **model)[0]
    parts = on_ranks(2, "initial_weights", parallel__pp=2, **V, **model)
    names = [{int(n.split(".")[2]) for n in part if ".layers." in n} for part in parts]
    assert names == [{0, 3}, {1, 2}]
    assert not parts[0].keys() & parts[1].keys()
    assert {n for n in whole if ".layers." not in n} <= parts[0].keys()
    together = parts[0] | parts[1]
    assert together.keys() == whole.keys()
    assert all(np.array_equal(whole[name], together[name]) for name in whole)
