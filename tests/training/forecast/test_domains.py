"""Plans of a mixture from the lengths of its domains: drawn as training draws, by shares that a sweep may change."""

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.recipe.recipe import parse
from evenload.training.drawing import Domains, Drawing, batch_size
from evenload.training.forecast.forecast import look_ahead
from evenload.training.forecast.samples import lengths_of, samples_of
from evenload.training.forecast.sweep import sweep


@pytest.fixture(scope="module")
def recipe():
    domains = {"short": {"source": "python-docstrings/json", "share": 3}, "long": {"source": "python-stdlib/json"}}
    model = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8}
    packing = {"enabled": True, "max_tokens": 4096}
    data, train = {"domains": domains, "max_length": 4096}, {"global_batch_size": 32, "dtype": "bf16"}
    rest = {"parallel": {"dp": 4}, "cluster": "a100", "plugins": {"packing": packing}}
    return parse({"model": model, "data": data, "train": train, **rest})


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    for name, length in (("short", 100), ("long", 3000)):
        (folder / f"{name}.txt").write_text(f"{length}\n" * 200)
    return {name: folder / f"{name}.txt" for name in ("short", "long")}


def test_a_plan_draws_by_shares_as_training_does(recipe, files):
    forecast = look_ahead(recipe, lengths_of(recipe, [f"{name}={path}" for name, path in files.items()]), 3)
    for step in forecast.steps:
        batch = step.ours.plan.lengths
        assert [int((batch == length).sum()) for length in (100, 3000)] == [24, 8]
    parts = {"short": np.full(200, 100), "long": np.full(200, 3000)}
    domains = Domains.of_lengths(recipe, parts, {name: own - 1 for name, own in parts.items()})
    whole = np.concatenate([parts["long"], parts["short"]])
    one = Drawing(None, whole, batch_size(recipe), forecast.chain, seed=recipe.train.seed, domains=domains)
    assert [step.ours.plan.lengths.tolist() for step in forecast.steps] == [one().lengths.tolist() for _ in range(3)]


def test_without_lengths_the_data_of_each_domain_are_opened(recipe):
    lengths = lengths_of(recipe, [])
    assert isinstance(lengths, dict)
    assert set(lengths) == {"short", "long"}
    assert lengths["long"].max() > lengths["short"].max()
    samples = samples_of(recipe, lengths)
    assert samples.domains.mixture.names == ["long", "short"]


def test_a_sweep_of_a_share_is_a_row_for_each(recipe, files):
    none = {}
    rows = sweep(recipe, ["data.domains.long.share=0,1,9"], files, 1, 4, none)["rows"]
    tokens = [row["tokens_per_s"] * row["step_s"] for row in rows]
    assert tokens == pytest.approx([32 * 100, 24 * 100 + 8 * 3000, 8 * 100 + 24 * 3000])
    with pytest.raises(EvenloadError, match="has no key 'lnog'") as caught:
        sweep(recipe, ["data.domains.lnog.share=1,2"], files, 1, 4, none)
    assert "did you mean 'long'?" in caught.value.do


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["x.txt"], "lengths of domains are given by name"),
        (["short=x.txt", "short=y.txt"], "given twice"),
        (["short={short}", "lnog={long}"], "the recipe has no domain lnog"),
        (["short={short}"], "there are no lengths of the domain long"),
        (["short={short}", "long=nowhere.txt"], "the domain long: "),
    ],
)
def test_lengths_that_are_not_those_of_the_domains_are_refused(recipe, files, words, what):
    with pytest.raises(EvenloadError, match=what):
        look_ahead(recipe, lengths_of(recipe, [word.format(**files) for word in words]), 1)
    with pytest.raises(EvenloadError, match="given by name"):
        look_ahead(recipe, files["short"], 1)


def test_groups_are_of_one_source(recipe, files):
    with pytest.raises(EvenloadError, match="say no groups"):
        look_ahead(recipe, files, 1, groups=files["short"])
