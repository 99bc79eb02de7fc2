"""What is wrong with a mixture's data is said before any rank starts, with the domain's name."""

import json
from contextlib import suppress

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.recipe.recipe import parse
from evenload.data.mixed import MixedSource
from evenload.training.preflight import preflight


@pytest.fixture
def data(tmp_path):
    """Files of two domains, and of one whose samples have no target."""
    rows = {
        "code": [{"input_ids": [i, 2, 3, 4]} for i in range(30)],
        "web": [{"input_ids": [i, 2, 300]} for i in range(10)],
        "masked": [{"input_ids": [1, 2], "labels": [-100, -100]}],
        "nothing": [{"input_ids": [1]}],
    }
    for name, own in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return {name: {"source": str(tmp_path / f"{name}.jsonl")} for name in rows}


def recipe_of(sources, *names, validation=None, **sections):
    sections["data"] = {"domains": {name: sources[name] for name in names}, "validation": validation}
    return parse({"train": {"global_batch_size": 4}, **sections})


def test_a_mixture_is_opened_with_a_vocabulary_for_all_of_it(data):
    ready = preflight(recipe_of(data, "web", "code"))
    assert isinstance(ready.source, MixedSource)
    assert ready.source.domains == ("code", "web")
    assert ready.recipe.model.vocab_size == 384


def test_an_extent_is_counted_by_drawing(data):
    epochs = preflight(recipe_of(data, "web", "code", train={"global_batch_size": 4, "epochs": 1}))
    assert epochs.recipe.train.steps == 2 * 30 // 4, "until the larger domain, half of each batch, has been drawn"
    tokens = preflight(recipe_of(data, "web", "code", train={"global_batch_size": 4, "max_tokens": 29}))
    assert tokens.recipe.train.steps == 3, "of 14 tokens each"


@pytest.mark.parametrize(("name", "what"), [("masked", "has no target to train on"), ("nothing", "has no sample")])
def test_an_empty_domain_is_refused_by_name(data, name, what):
    specs = {one: data[one]["source"] for one in ("code", name)}
    for recipe in (recipe_of(data, "code", name), recipe_of(data, "code", validation={"domains": specs})):
        with pytest.raises(EvenloadError, match=f"the domain {name}: .* {what}"):
            preflight(recipe)


def test_a_domain_whose_loss_is_wanted_and_never_scored_is_refused(data):
    specs, checkpoint = {name: data[name]["source"] for name in ("code", "web")}, {"dir": "kept", "best": "web"}
    outcomes = set()
    for seed in range(8):
        train, validation = {"global_batch_size": 1, "seed": seed}, {"domains": specs, "batches": 1}
        recipe = recipe_of(data, "code", validation=validation, train=train, checkpoint=checkpoint)
        with suppress(EvenloadError):
            outcomes.add(preflight(recipe).source.name)
            continue
        with pytest.raises(EvenloadError, match="no sample of it is validated"):
            preflight(recipe)
        outcomes.add("refused")
    assert outcomes == {"1 domains", "refused"}, "one sample of 40 is of either domain"
    preflight(recipe_of(data, "code", validation={"domains": specs}, checkpoint=checkpoint))


def test_the_best_by_scores_is_no_domain(data, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n')
    scored = {"prompts": str(tmp_path / "prompts.jsonl"), "score": "builtins:len"}
    validation = {"domains": {name: data[name]["source"] for name in ("code", "web")}, "generate": scored}
    own = {"checkpoint": {"dir": "kept", "best": "generate.score"}, "generate": {"end_tokens": []}}
    assert preflight(recipe_of(data, "code", validation=validation, **own)).source.name == "1 domains"
