"""Recipes name plugins, so that all of them are registered here as in every process of the command."""

import pytest
from evenload.api import load_plugins

load_plugins()


@pytest.fixture(scope="session")
def write_costs():
    """What a profile writes its costs with; its module imports torch."""
    from evenload.training.verbs.profile import write_costs

    return write_costs
