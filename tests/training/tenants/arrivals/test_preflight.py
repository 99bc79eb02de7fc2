"""What a job of tenants is told before it starts."""

import pytest
from evenload.core.recipe.recipe import parse
from evenload.training.tenants.arrivals.preflight import say_no_tenants

LORA = {"tenants": "tenants"}


@pytest.mark.parametrize(
    ("lora", "says"), [({**LORA, "enabled": True}, False), (LORA, True), ({"enabled": False}, False)]
)
def test_a_folder_of_tenants_without_the_plugin_is_named(lora, says, caplog):
    say_no_tenants(parse({"plugins": {"lora": lora}}))
    assert ("plugins.lora.tenants has no effect" in caplog.text) is says
