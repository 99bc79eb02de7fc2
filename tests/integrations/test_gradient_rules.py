"""Recipes whose samples have no gradients are refused by name, before anything runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from evenload.api import load_recipe
from evenload.core.errors import EvenloadError
from evenload.integrations.host.gradients import GradientSettings, opened
from evenload.integrations.host.trained import Weights

ODD = {
    "experts have none": ["model.family=mixtral", "model.moe.num_experts=4"],
    "tensor parallelism and stages come together": ["parallel.tp=2", "parallel.pp=2", "parallel.dp=1"],
    "all tokens of a pack on each": ["parallel.tp=2", "parallel.dp=1", "megatron.sequence_parallel=true"],
}


@pytest.mark.parametrize("text", ODD)
def test_what_has_no_gradients_of_samples_is_refused(text: str) -> None:
    trained = create_autospec(Weights, instance=True)
    host: Any = SimpleNamespace(recipe=load_recipe("quickstart", ODD[text]), trained=trained)
    with pytest.raises(EvenloadError, match=text), opened(host, GradientSettings(columns=64)):
        pass
