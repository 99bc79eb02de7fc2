"""Runs under policies of data, on ranks: by the policies' equations, from losses that another command has written."""

import json
import math
import shutil

import numpy as np
import pytest
from evenload.api import load_recipe
from evenload.core.planning.chain import PlanChain
from evenload.plugins.data.draws import drawn
from evenload.plugins.data.reference import LossFiles
from evenload.plugins.data.selects import LossThirds, third_probabilities
from evenload.training.checkpoint.manifest import read as load_manifest
from evenload.training.drawing import drawing_of
from evenload.training.preflight import open_data
from harness.cases import full

pytestmark = pytest.mark.slow
RECIPE = """
trainer: {trainer}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}}
data: {{max_length: 256, domains: {{long: {{source: long.jsonl, share: 2}}, short: {{source: short.jsonl}}}}}}
train: {{steps: 5, global_batch_size: 8, lr: 2.0e-2, dtype: {dtype}}}
checkpoint: {{dir: kept, every: 1, keep: 9}}
plugins: {{packing: {{enabled: true, max_tokens: 512}}}}
"""
SIZES = {"long": (30, 90, 250), "short": (34, 5, 40)}
DOREMI = "plugins.data={enabled: true, reference: losses, mix: {policy: doremi, settings: {rate: 2.0, uniform: 0.01}}}"
SELECT = "plugins.data={enabled: true, select: {policy: loss, every: 2, pool: 2, settings: {factor: 50.0}}}"
LESS = "plugins.data={enabled: true, select: {policy: less, every: 2, pool: 2}}"
ADAPT = (
    "plugins.data={enabled: true, weight: {policy: adapt, settings: {tau: 0.1, every: 2}}}",
    "data.validation={source: short.jsonl, every: 9, batches: 1}",
)
WEIGH = "plugins.data={enabled: true, weight: {policy: loss, settings: {strategy: uniform}}}"


@pytest.fixture(scope="module")
def place(tmp_path_factory, two_domains):
    """A folder with two domains and a recipe for each trainer."""
    folder = tmp_path_factory.mktemp("policies")
    two_domains(folder, **SIZES)
    for trainer, dtype in (("megatron", "fp64"), ("deepspeed", "fp32")):
        (folder / f"{trainer}.yaml").write_text(RECIPE.format(trainer=trainer, dtype=dtype))
    return folder


@pytest.fixture(scope="module")
def trained(place, ran, logged):
    """``trained("name", "key=value")``: the lines of a run of that name, and its result."""

    def train(name, *words, recipe="megatron.yaml"):
        result = ran(place, "train", recipe, *words, f"checkpoint.dir={name}", f"log.jsonl={name}.log")
        return logged(place / f"{name}.log"), result

    return train


@pytest.fixture(scope="module")
def resumed(place, trained):
    """Lines of a run on 2 ranks, its result, and lines of one that goes on on 1 rank behind its second step."""

    def train(name, *words):
        lines, result = trained(name, *words, "parallel.dp=2")
        shutil.copytree(place / name / "step00000002", place / f"{name}.parts" / "step00000002")
        parts, _ = trained(f"{name}.parts", *words, "parallel.dp=1")
        assert [line["samples"] for line in parts] == [line["samples"] for line in lines[2:]]
        assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in lines[2:]], rel=1e-9)
        return lines, result, parts

    return train


@pytest.fixture(scope="module")
def losses_of(place, ran):
    """Losses of all tokens by a checkpoint, of every domain, as `evenload score` writes them."""

    def scored(checkpoint, out):
        words = "parallel.dp=1", "--checkpoint", checkpoint, "--out", out
        result = ran(place, "score", "megatron.yaml", *words)
        arrays = {name: np.load(place / out / f"{name}.npy") for name in SIZES}
        for name, own in result["domains"].items():
            assert own["loss"] == pytest.approx(arrays[name].astype(float).sum() / own["targets"], rel=1e-6)
        return arrays

    return scored


class Sums:
    """Of every sample, by its number through the domains, the sum of what its tokens have, and its targets."""

    def __init__(self):
        self.recipe = load_recipe("megatron.yaml")
        self.source = open_data(self.recipe)
        self.targets = self.source.targets
        self.domain = np.repeat([0, 1], [SIZES["long"][0], SIZES["short"][0]])

    def of(self, arrays):
        tokens, ends = np.concatenate(list(arrays.values())).astype(float), np.cumsum(self.source.lengths)
        return np.array([tokens[end - n : end].sum() for end, n in zip(ends, self.source.lengths, strict=True)])


@pytest.fixture
def sums(place, monkeypatch):
    monkeypatch.chdir(place)
    return Sums()


@full
def test_doremi_weighs_domains_by_their_excess_over_a_reference(place, trained, resumed, losses_of, sums):
    trained("reference", "parallel.dp=1", "train.steps=3")
    reference = losses_of("reference", "losses")
    lines, result, parts = resumed("doremi", DOREMI)
    for line in lines:
        assert line["shares"] == {"long": 0.5, "short": 0.5}
        wanted = sum(line["objective"][name] * own["loss"] for name, own in line["domains"].items())
        assert line["loss"] == pytest.approx(wanted, rel=1e-9), "the sum of mean losses"
    for line, part in zip(lines[2:], parts, strict=True):
        assert list(part["objective"].values()) == pytest.approx(list(line["objective"].values()), rel=1e-9)
    assert lines[0]["objective"] == lines[1]["objective"] == {"long": 0.5, "short": 0.5}
    for step in (1, 2):
        now = losses_of(f"doremi/step{step:08d}", f"now{step}")
        excess = sums.of({name: np.maximum(now[name] - reference[name], 0) for name in SIZES})
        samples = np.array(lines[step]["samples"])
        owned = [samples[sums.domain[samples] == k] for k in (0, 1)]
        grown = [
            alpha * math.exp(2.0 * excess[own].sum() / sums.targets[own].sum())
            for alpha, own in zip(lines[step + 1]["objective"].values(), owned, strict=True)
        ]
        alphas = [0.99 * one / sum(grown) + 0.01 / 2 for one in grown]
        assert list(lines[step + 2]["objective"].values()) == pytest.approx(alphas, rel=1e-6)
        assert abs(alphas[0] - lines[step + 1]["objective"]["long"]) > 1e-4
    learned = result["policies"]["learned_shares"]
    assert list(learned.values()) == load_manifest(place / "doremi" / "step00000005").state["mix"]["state"]["average"]


def test_an_objective_is_weighed_under_deepspeed_too(place, trained, sums):
    files = LossFiles(place / "drawn", sums.source)
    for sample, length in enumerate(sums.source.lengths.tolist()):
        files.write(sample, np.random.default_rng(sample).uniform(4, 6, length))
    files.finish()
    words = DOREMI.replace("losses", "drawn"), "parallel.dp=2", "deepspeed.zero_stage=2"
    lines, _ = trained("deepspeed", *words, recipe="deepspeed.yaml")
    for line in lines:
        wanted = sum(line["objective"][name] * own["loss"] for name, own in line["domains"].items())
        assert line["loss"] == pytest.approx(wanted, rel=2e-6)
    assert lines[2]["objective"] != lines[4]["objective"]


def test_samples_are_selected_by_their_losses_at_that_step(resumed, losses_of, sums):
    lines, result, _ = resumed("select", SELECT)
    means = sums.of(losses_of("select/step00000002", "selected")) / sums.targets
    order = drawing_of(sums.recipe, sums.source, PlanChain.of_recipe(sums.recipe, sums.recipe.layout(1)))
    pools = [np.concatenate([order().samples for _ in range(4)]) for _ in range(2)]
    pool = np.array(list(dict.fromkeys(pools[1].tolist())))
    odds = third_probabilities(means[pool], LossThirds(factor=50.0))
    taken = drawn(pool, odds, 16, seed=sums.recipe.train.seed, update=1)
    assert lines[2]["samples"] + lines[3]["samples"] == taken.tolist()
    own = result["policies"]
    assert own["selection"]["updates"] == 3
    assert own["scoring_s"] > 0


def test_samples_are_weighed_by_their_losses_in_that_step(trained, losses_of, sums):
    lines, result = trained("weigh", WEIGH, "parallel.dp=2", "train.steps=2")
    own = np.array(lines[1]["samples"])
    losses = sums.of(losses_of("weigh/step00000001", "weighed"))[own]
    targets, means = sums.targets[own], losses / sums.targets[own]
    weights = np.exp((2 * means - means.max() - means.min()) / (means.max() - means.min()))
    wanted = (weights * losses).sum() / (weights * targets).sum()
    assert lines[1]["loss"] == pytest.approx(wanted, rel=1e-6)
    assert abs(wanted / (losses.sum() / targets.sum()) - 1) > 1e-3
    assert result["policies"]["scoring_s"] > 0


LESS_WORDS = LESS, "data.domains={two: {source: two.jsonl}}", "data.validation={source: odd.jsonl, every: 9}"


@pytest.fixture(scope="module")
def less(place, resumed):
    """Half of the domain `two` are sequences of one pattern, half of another; the validation is all of the second."""
    rng = np.random.default_rng(5)
    rows = [{"input_ids": (3 + 2 * rng.integers(0, 60, 40) + i % 2 * 120).tolist()} for i in range(64)]
    (place / "two.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "odd.jsonl").write_text("\n".join(json.dumps(row) for row in rows[1:20:2]))
    return resumed("less", *LESS_WORDS)


def test_less_selects_what_has_the_gradient_of_the_validation(less):
    lines, result, _ = less
    odd = [[sample % 2 for sample in line["samples"]] for line in lines]
    assert sum(odd[2] + odd[3] + odd[4]) >= 23, "of 24, behind any two batches"
    assert 2 <= sum(odd[0] + odd[1]) <= 14
    own = result["policies"]["selection"]
    assert (own["updates"], own["taken"]) == (3, 48)
    assert own["gradients_s"] > 0


def test_less_selects_under_deepspeed_too(less, trained):
    words = *LESS_WORDS, "parallel.dp=2", "deepspeed.zero_stage=3", "train.steps=3"
    _, plain = trained("less.deepspeed", *words, recipe="deepspeed.yaml")
    assert plain["policies"]["selection"]["gradients_s"] > 0


@pytest.mark.parametrize("degree", ["pp", pytest.param("tp", marks=full)])
def test_less_selects_the_same_on_ranks_that_share_a_model(degree, less, trained):
    lines, _ = trained(f"less.{degree}", *LESS_WORDS, f"parallel.{degree}=2", "train.steps=4")
    assert [line["samples"] for line in lines] == [line["samples"] for line in less[0][:4]]


def test_samples_are_weighed_by_their_likeness_to_the_validation(trained, losses_of, sums):
    lines, result = trained("adapt", *ADAPT, "parallel.dp=2", "train.steps=2")
    own = np.array(lines[1]["samples"])
    losses = sums.of(losses_of("adapt/step00000001", "likened"))[own]
    means, plain = losses / sums.targets[own], losses.sum() / sums.targets[own].sum()
    assert min(means) < lines[1]["loss"] < max(means)
    assert abs(lines[1]["loss"] / plain - 1) > 1e-6
    assert result["policies"]["scoring_s"] > 0


@full
@pytest.mark.parametrize("words", [(WEIGH,), ADAPT])
def test_a_run_that_goes_on_on_other_ranks_weighs_the_same(words, resumed):
    resumed(f"resumed.{len(words)}", *words)
