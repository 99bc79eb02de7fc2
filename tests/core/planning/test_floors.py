"""Floors of settings under the plans of drawn settings: `benchmarks/planning/drawn_plans.py` draws them."""

import importlib.util
import json
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from evenload.api import load_recipe
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.floors import step_floor_s
from evenload.core.planning.judge import judge

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "planning" / "drawn_plans.py"
FEW, ALL = 24, 1500
"""Settings here, the first ones, and in `make explore`."""
LONG_S = 0.3
"""Of planning, from which on a setting is left out."""
TOLERANCE = 1e-9
FORMS = ((True, False), (True, True), (False, False))
"""Whether plans must fit, and plugins are asked."""


@pytest.fixture(scope="module")
def draws():
    spec = importlib.util.spec_from_file_location("settings_that_are_drawn", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.timeout(900)
def test_no_plan_of_a_drawn_setting_is_below_its_floor(draws):
    """Those with layouts of their own for attention are no settings of a search: it has no ``parallel.cp``."""
    ratios = []
    for number in range(ALL if hypothesis.settings.get_current_profile_name() == "explore" else FEW):
        setting, batch = draws.drawn(number)
        setting["parallel"]["cp"] = 1
        try:
            words = ["plugins={}", *(f"{key}={json.dumps(value)}" for key, value in setting.items())]
            recipe = load_recipe(draws.RECIPE, words)
            chain = PlanChain.of_recipe(recipe, recipe.layout())
            if chain.work_s(batch) > LONG_S:
                continue
            step = judge(chain.plan(batch), chain.context)
        except EvenloadError:
            continue
        floors_s = [
            step_floor_s(chain, batch, fits=fits, asked=asked) for fits, asked in FORMS if step.fits or not fits
        ]
        assert all(0 < floor_s <= step.step_s * (1 + TOLERANCE) for floor_s in floors_s), number
        ratios.append(max(floors_s) / step.step_s)
    assert len(ratios) > FEW // 2
    assert np.quantile(ratios, 0.75) > 0.9, "some are near enough that a floor of a fifth more would be above a plan"
