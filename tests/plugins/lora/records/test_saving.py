"""A tenant goes on from its own row of a checkpoint, with its own data and its own file."""

import json
from types import SimpleNamespace

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.recipe.adapter import Adapter
from evenload.data.sources import open_source
from evenload.plugins.lora.arrivals.opening import Entrant
from evenload.plugins.lora.members import TenantTable
from evenload.plugins.lora.records.saving import restore, row_of
from evenload.plugins.lora.state.tenant import ActiveTenant


def rows(folder, letter):
    path = folder / f"{letter}.jsonl"
    path.write_text("".join(json.dumps({"text": letter * 8}) + "\n" for _ in range(20)))
    return open_source(str(path), max_length=64)


def tenant(folder, data="a", scored="b"):
    parts = {"config": None, "drawing": None, "adapter": Adapter(), "digest": "f00d"}
    held_out = rows(folder, scored) if scored else None
    return ActiveTenant(number=1, name="acme", source=rows(folder, data), steps=9, held_out=held_out, **parts)


def kept(folder):
    """The row of one with four steps, three evaluations and an order."""
    one = tenant(folder)
    one.step, one.best, one.best_step, one.losses, one.tokens, one.seconds = 4, 1.5, 3, [4.0, 3.0], 99, 2.5
    one.order, one.state, one.until = {"consumed": 8}, "training", 6
    return json.loads(json.dumps(row_of(one, has_adapter=True)))


def test_a_tenant_goes_on_with_all_that_it_had(tmp_path, caplog):
    one = tenant(tmp_path)
    restore(one, kept(tmp_path))
    assert (one.step, one.best, one.best_step, one.losses) == (4, 1.5, 3, [4.0, 3.0])
    assert (one.tokens, one.seconds, one.order, one.until) == (99, 2.5, {"consumed": 8}, 6)
    assert not caplog.records


def test_data_of_the_same_lengths_and_other_content_are_refused(tmp_path):
    with pytest.raises(EvenloadError, match="the data are not those of the checkpoint") as caught:
        restore(tenant(tmp_path, data="s"), kept(tmp_path))
    assert "begins anew" in caught.value.do


def test_the_lowest_loss_counts_for_the_samples_that_it_was_measured_on(tmp_path):
    one = tenant(tmp_path, scored="s")
    restore(one, kept(tmp_path))
    assert (one.step, one.best, one.best_step) == (4, None, 0)


def test_a_row_of_an_earlier_version_goes_on_with_a_warning(tmp_path, caplog):
    row = kept(tmp_path)
    row["data"] = row["data"].partition("-")[0]
    del row["held_out"]
    one = tenant(tmp_path)
    restore(one, row)
    assert (one.step, one.best) == (4, 1.5)
    assert "the data of tenant acme: an earlier version kept their lengths alone" in caplog.text


@pytest.mark.parametrize(
    ("change", "goes_on"),
    [({}, True), ({"digest": "other"}, False), ({"state": "done"}, False), ({"name": "bolt"}, False)],
)
def test_who_was_under_way_goes_on_where_the_file_is_the_same(tmp_path, change, goes_on):
    row = {**kept(tmp_path), **{key: value for key, value in change.items() if key == "state"}}
    saved = SimpleNamespace(tenants={"acme": row})
    entrant = Entrant(change.get("name", "acme"), "acme", None, change.get("digest", "f00d"))
    members = SimpleNamespace(_saved=saved, replaced=set())
    assert (TenantTable._row_of(members, entrant) is not None) == goes_on
    members.replaced.add("acme")
    assert TenantTable._row_of(members, entrant) is None, "whoever left and came back begins anew"
