"""Shares of domains: what policies make of a recipe, and which mixtures are refused before anything starts."""

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.recipe.recipe import parse, parse_with
from evenload.core.recipe.shares import shares_of

TWO = {"web": {"source": "web.jsonl", "share": 3}, "code": {"source": "code.jsonl"}}

DRAWN = {"prompts": "p.jsonl", "samples": 4, "score": "own:score"}
SAMPLED = {"source": "x.jsonl", "generate": DRAWN}


def point(step, **shares):
    return {"step": step, "shares": shares}


def mix(*points, **more):
    return {"domains": TWO, "mix": {"policy": "schedule", "points": points, **more}}


def test_static_shares_are_those_of_the_domains_over_their_sum_by_ascending_names():
    shares = shares_of(parse({"data": {"domains": TWO}}).data)
    assert shares({}, 0) == shares({}, 10**6) == (0.25, 0.75)


def test_a_schedule_leads_from_point_to_point_in_a_straight_line():
    """Whatever the shares of a point add up to; a domain that a point leaves out has its own share."""
    points = point(10, code=1, web=0), point(20, code=1), point(40, code=30, web=10)
    shares = shares_of(parse({"data": mix(*points)}).data)
    wanted = {0: 1.0, 10: 1.0, 12: 1 - 0.2 * 0.75, 15: 0.625, 20: 0.25, 30: 0.5, 40: 0.75, 10**6: 0.75}
    wanted |= {9: 1.0, 11: 0.925, 19: 0.325, 21: 0.275, 39: 0.725, 41: 0.75}  # beside the points
    assert {step: shares({}, step)[0] for step in wanted} == pytest.approx(wanted)
    assert all(sum(shares({}, step)) == pytest.approx(1) for step in range(50))


def test_shares_are_overridden_as_any_key_is():
    recipe = parse_with({"data": {"domains": TWO}}, ["data.domains.web.share=1", "data.domains.code.weight=2"])
    assert shares_of(recipe.data)({}, 0) == (0.5, 0.5)
    assert recipe.data.domains["code"].weight == 2
    assert TWO == {"web": {"source": "web.jsonl", "share": 3}, "code": {"source": "code.jsonl"}}


REFUSED = {
    "nothing": ({"domains": {}}, "data.domains names no domain"),
    "a name with a dot": ({"domains": {"a.b": {"source": "x"}}}, "whose name is none"),
    "a source beside domains": ({"domains": TWO, "source": "x"}, "say the same thing twice"),
    "a negative share": ({"domains": {"a": {"source": "x", "share": -1}}}, "data.domains.a.share is not valid"),
    "a share that is no number": ({"domains": {"a": {"source": "x", "share": float("nan")}}}, "is not valid"),
    "a weight that is no number": ({"domains": {"a": {"source": "x", "weight": float("inf")}}}, "is not valid"),
    "shares of nothing": ({"domains": {"a": {"source": "x", "share": 0}}}, "nothing would be drawn"),
    "no source": ({"domains": {"a": {"share": 1}}}, "data.domains.a.source is not valid"),
    "an unknown key": ({"domains": {"a": {"source": "x", "shaer": 1}}}, "no key 'shaer'"),
    "an unknown policy": ({"domains": TWO, "mix": {"policy": "shedule"}}, "data.mix.policy is not valid"),
    "a schedule without points": (mix(), "leads through points, and there are none"),
    "points of nothing": (mix(point(0, code=1), policy="static"), "have no effect under the policy static"),
    "an unknown domain": (mix(point(0, cod=1)), "a domain that is not there: 'cod'"),
    "a point of nothing": (mix(point(0, code=0, web=0)), "in data.mix.points at step 0"),
    "points that do not ascend": (mix(point(5), point(5)), "do not ascend"),
    "a mix of one source": ({"mix": {"unit": "targets"}}, "and there are none"),
    "a validation of nothing": ({"validation": {"every": 5}}, "needs a source, or domains"),
    "a validation twice": ({"validation": {"source": "x", "domains": {"a": "y"}}}, "and not both"),
    "a k beyond the samples": ({"validation": {**SAMPLED, "generate": {**DRAWN, "k": [1, 5]}}}, "more samples than"),
    "samples without a score": ({"validation": {**SAMPLED, "generate": {"prompts": "p"}}}, "generate.score is not"),
    "a function without a module": ({"validation": {**SAMPLED, "generate": {**DRAWN, "score": "f"}}}, "is not valid"),
    "a validation of a nameless domain": ({"validation": {"domains": {"": "y"}}}, "whose name is none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_mixtures_are_refused(name):
    data, what = REFUSED[name]
    with pytest.raises(EvenloadError, match=what) as caught:
        parse({"data": data})
    assert caught.value.do


def test_the_nearest_names_are_told():
    with pytest.raises(EvenloadError) as caught:
        parse({"data": mix(point(0, cod=1))})
    assert "did you mean 'code'?" in caught.value.do
    with pytest.raises(EvenloadError, match="not validated: 'coed'") as caught:
        parse({"data": {"validation": {"domains": {"code": "x"}}}, "checkpoint": {"best": "coed", "dir": "kept"}})
    assert "did you mean 'code'?" in caught.value.do


@pytest.mark.parametrize("extent", [{"epochs": 1}, {"max_tokens": 1000}])
def test_shares_that_change_do_not_say_how_many_steps_an_extent_takes(extent):
    with pytest.raises(EvenloadError, match="shares which change do not tell"):
        parse({"data": mix(point(0), point(9, code=9)), "train": extent})
    parse({"data": {"domains": TWO}, "train": extent})
    with pytest.raises(EvenloadError, match="of a domain nothing is drawn"):
        parse({"data": {"domains": {**TWO, "a": {"source": "x", "share": 0}}}, "train": {"epochs": 1}})


@pytest.mark.parametrize("data", [{}, {"domains": TWO, "mix": {"unit": "targets"}}], ids=["a source", "a mixture"])
def test_a_recipe_whose_defaults_are_written_out_is_the_same(data):
    written = parse({"data": data}).model_dump(mode="json")
    assert parse(written).model_dump(mode="json") == written


def test_figures_of_samples_tell_the_best_checkpoint_by_their_names():
    for name in ("score", "pass_at_1", "pass_at_4", "maj_at_4"):
        data = {"data": {"validation": SAMPLED}, "checkpoint": {"dir": "kept", "best": f"generate.{name}"}}
        assert parse(data).checkpoint.best == f"generate.{name}"
    for name in ("generate.pass_at_2", "pass_at_4", "generate.maj_at_1"):
        with pytest.raises(EvenloadError, match="not validated"):
            parse({"data": {"validation": SAMPLED}, "checkpoint": {"dir": "kept", "best": name}})
