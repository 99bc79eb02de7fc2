"""plan.json: read back as it was written, and refused by name in every other case."""

import copy
import json
from contextlib import suppress
from dataclasses import replace
from functools import cache

import evenload
import pytest
from evenload.core.errors import PlanError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan
from evenload.core.plan_json import file_json, read_plans, read_step, step_json
from evenload.core.planning.setting import RECIPES
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = [3000, 100, 500, 700, 1200, 90, 2000, 4000]
NAMES = ("quickstart", "mesh", "pipeline", "slices")


@cache
def plan_of(name):
    overrides = ["train.global_batch_size=8", *(["plugins.packing.max_tokens=1024"] if name == "slices" else [])]
    return evenload.plan(evenload.load_recipe(RECIPES / f"{name}.yaml", overrides), LENGTHS)


@cache
def written(name):
    return json.dumps(step_json(plan_of(name)))


@pytest.mark.parametrize("name", NAMES)
def test_a_written_plan_is_read_back(name):
    again, plan = check(read_step(json.loads(written(name)))), plan_of(name)
    assert again.digest == plan.digest
    # Of the memory record a plan says what its passes hold, not what is there between steps.
    assert step_json(again)["limits"] == step_json(plan)["limits"]
    assert replace(again.limits, memory=plan.limits.memory) == plan.limits
    assert (again.made_by, again.bound_s) == (plan.made_by, plan.bound_s)


@pytest.mark.parametrize("tenants", [[7], [0], []])
def test_tenants_are_kept(tenants):
    plan = StepPlan([5], (MicroBatch((Slice(0, 0, 5),), (0,)),), Limits(1, 8), tenants=tenants)
    again = read_step(step_json(plan))
    assert again.sequences == plan.sequences
    assert again.tenants.tolist() == tenants


def paths(value, above=()):
    """Where something can be changed."""
    if above:
        yield above
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from paths(below, (*above, key))


ODD = [None, -1, 0, 1, 2, 99, 2**20, 2**63, 2**100, 1.5, float("nan"), float("inf"), True, "x", "", "F", "W", [], {}]
ODD += [[None], [[]], [0, 0, 0], {"a": 1}, "\udcff"]


@st.composite
def tampered(draw, *, kept):
    """A written plan with up to two values replaced, dropped or doubled, and of its sums only those ``kept``."""
    name = draw(st.sampled_from(NAMES))
    row = {
        key: value
        for key, value in json.loads(written(name)).items()
        if key in kept or key not in ("digest", "checksum")
    }
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(paths(row))))
        at = row
        for key in path[:-1]:
            at = at[key]
        how = draw(st.sampled_from(["replace", "replace", "replace", "drop", "double"]))
        if how == "replace":
            at[path[-1]] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif how == "drop":
            del at[path[-1]]
        elif isinstance(at, list):
            at.append(copy.deepcopy(at[path[-1]]))
    return name, row


@given(tampered(kept=("digest", "checksum")))
def test_a_tampered_plan_is_refused_or_the_same(case):
    name, row = case
    with suppress(PlanError):
        assert check(read_step(row)).digest == plan_of(name).digest


@given(tampered(kept=()))
def test_without_its_sums_a_tampered_plan_still_is_a_plan_or_refused(case):
    _, row = case
    with suppress(PlanError):
        plan = check(read_step(row))
        assert plan.lengths.tolist() == row["lengths"]


def test_every_change_is_noticed_that_the_laws_allow():
    row = json.loads(written("slices"))
    for key, value in (("bound_s", 0.5), ("made_by", "me"), ("limits", row["limits"] | {"heads": 64})):
        with pytest.raises(PlanError, match="has changed since it was written"):
            read_step(row | {key: value})
    bare = {key: value for key, value in row.items() if key != "checksum"}
    with pytest.raises(PlanError, match="not the plan that was written"):
        read_step(bare | {"digest": "0" * 32})


def test_files_without_limits_are_read_under_those_of_the_caller(tmp_path):
    plan = plan_of("quickstart")
    path = tmp_path / "plan.json"
    old = {key: value for key, value in json.loads(written("quickstart")).items() if key not in ("limits", "checksum")}
    path.write_text(json.dumps({"format": 1, "steps": [old]}))
    with pytest.raises(PlanError, match="does not say its limits"):
        read_plans(path)
    assert [again.digest for again in read_plans(path, plan.limits)] == [plan.digest]
    with pytest.raises(PlanError, match="over the token cap"):
        read_plans(path, replace(plan.limits, max_tokens=100))


def test_a_file_shows_and_keeps_the_caps_that_were_asked_for(tmp_path):
    plan = plan_of("slices")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(file_json([plan], {"packing": {"max_tokens": 1024, "activation_gib": 2.0}})))
    assert read_plans(path)[0].digest == plan.digest
    raised = replace(plan, limits=replace(plan.limits, max_tokens=2048))
    path.write_text(json.dumps(file_json([raised], {"packing": {"max_tokens": 1024}})))
    with pytest.raises(PlanError, match="made under a higher cap"):
        read_plans(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"format": 2, "steps": []}',
        '{"format": 1, "steps": [1]}',
        '{"format": 1, "steps": [{}]}',
    ],
)
def test_what_is_no_plan_json_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError) as caught:
        read_plans(tmp_path / "plan.json")
    assert caught.value.do


def test_an_unreadable_file_is_refused_as_a_plan_is(tmp_path):
    for path in (tmp_path, tmp_path / "nothing", "a\0b"):
        with pytest.raises(PlanError, match="cannot be read"):
            read_plans(path)
