"""Functions of users draw what they like: what training draws next is the same."""

import random

import numpy as np
import pytest
import torch
from evenload.training.sampling.scored import unchanged_random_states


def drawn():
    return random.random(), float(np.random.random()), float(torch.rand(1))


@pytest.mark.parametrize("raises", [False, True])
def test_random_states_are_those_of_before(raises):
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    want = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    try:
        with unchanged_random_states():
            drawn()
            torch.manual_seed(3)
            if raises:
                raise ValueError
    except ValueError:
        assert raises
    assert drawn() == want
