"""Replicas of unlike shapes train the adapters that one shape trains, and agree to the bit."""

import ast
import copy
import json
from collections import Counter
from pathlib import Path

import evenload
import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.planner import Draw
from evenload.core.recipe.recipe import parse
from evenload.plugins.lora.arrivals.preflight import say_without_effect
from evenload.training.adapting import adapter_training
from evenload.training.replicas import Replicas
from harness.cases import only_full
from safetensors.torch import load_file

load_plugins()
ROOT = Path(evenload.__file__).parent

pytestmark = pytest.mark.slow

ACME = {
    "data": {"source": "python-docstrings/email", "max_length": 256},
    "adapter": {"r": 4, "lora_dropout": 0.1},
    "train": {"steps": 4, "batch_size": 5, "lr": 2e-3, "clip_grad": 0.05},
    "evaluate": {"source": "python-docstrings-held-out/email", "every": 2},
}
SOLO = {
    "data": {"source": "python-docstrings/asyncio", "max_length": 192, "loss_on": "all"},
    "adapter": {"r": 8, "target_modules": ["q_proj", "down_proj"]},
    "train": {"steps": 6, "batch_size": 1, "seed": 7, "lr": 1e-3, "weight_decay": 0.1},
}
FP64 = {"train": {"dtype": "fp64"}}
ALWAYS_COMPARED = "from evenload.plugins.lora import loop\nloop.COMPARED_EVERY = 1\n"
LORA = {"plugins": {"lora": {"enabled": True}}}


def trained(job_of, path, *replicas, **sections):
    parallel = {"replicas": [*replicas]} if replicas else {"dp": 1}
    job = job_of(path, parallel=parallel, **copy.deepcopy(FP64 | sections))
    job.put(acme=ACME, solo=SOLO)
    return job, job.trained(planted=ALWAYS_COMPARED)


@pytest.fixture(scope="module")
def one_shape(job_of, tmp_path_factory):
    return trained(job_of, tmp_path_factory.mktemp("one_shape"))


@pytest.mark.parametrize(
    ("shapes", "allowed"),
    [
        ([{"tp": 2}, {"dp": 1}], 1e-6),
        only_full([{"dp": 2}, {"dp": 1}], 1e-9),
        only_full([{"pp": 3}, {"dp": 1}], 1e-9),
    ],
)
def test_replicas_train_what_one_shape_trains(job_of, tmp_path, one_shape, shapes, allowed):
    reference, _ = one_shape
    job, result = trained(job_of, tmp_path, *shapes)
    for name in ("acme", "solo"):
        rows, wanted = job.rows(name), reference.rows(name)
        assert [row["samples"] for row in rows] == [row["samples"] for row in wanted]
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in wanted], rel=allowed, abs=0), name
        adapters = (load_file(one.out / name / "last" / "adapter_model.safetensors") for one in (job, reference))
        ours, theirs = adapters
        for key, matrix in theirs.items():
            error = (ours[key].double() - matrix.double()).norm() / (matrix.double().norm() or 1.0)
            assert error <= max(allowed, 1e-7), key  # written in float32
    losses = [[row["loss"] for row in one.rows("acme", evaluations=True)] for one in (job, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=allowed, abs=0)
    replicas = result["replicas"]
    assert [row["replica"] for row in replicas] == list(range(len(shapes)))
    assert sum(row["sequences"] for row in replicas) == 4 * 5 + 6  # each once
    assert all(row["sequences"] for row in replicas)
    assert json.dumps(result["recipe"]["parallel"]).count("replicas") == 1


def test_what_fails_on_a_rank_ends_all_with_its_rank_and_replica(job_of, tmp_path):
    planted = """
from evenload.runtime.world.replicas import own_rank
from evenload.plugins.lora import loop
def breaks(self, planned, train=loop.TenantLoop._train):
    if own_rank() == 2 and self.step == 1:
        raise ZeroDivisionError("planted")
    train(self, planned)
loop.TenantLoop._train = breaks
"""
    job = job_of(tmp_path, parallel={"replicas": [{"dp": 2}, {"dp": 1}]})
    job.put(acme=ACME)
    done = job.run(planted=planted)
    assert done.returncode == 1
    assert done.stderr.count("ZeroDivisionError: planted") == 2  # in the traceback, and in the one message
    assert "rank 2 (replica 1) of 3" in done.stderr


REFUSED = {
    "no replica": ([], "names no replica"),
    "a pipeline that does not fit": ([{"dp": 1}, {"pp": 3}], r"replica 1: parallel\.pp does not divide"),
    "a stage of ZeRO on Megatron": ([{"dp": 1}, {"zero_stage": 3}], "and Megatron-Core runs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_replicas_that_cannot_be_are_refused_before_a_rank_starts(name):
    replicas, message = REFUSED[name]
    with pytest.raises(EvenloadError, match=message):
        parse(LORA | {"parallel": {"replicas": replicas}})


def test_replicas_go_with_no_other_degrees(caplog):
    parallel = {"replicas": [{"dp": 1}, {"tp": 2}]}
    with pytest.raises(EvenloadError, match="which this trainer keeps to itself"):
        parse({"trainer": "deepspeed", "parallel": {"replicas": [{"dp": 1}, {"dp": 2}]}})
    with pytest.raises(EvenloadError, match="parallel gives others"):
        parse(LORA | {"parallel": {**parallel, "dp": 2}})
    recipe = parse(LORA | {"parallel": parallel})
    say_without_effect(recipe)
    say_without_effect(parse(LORA | {"parallel": {"replicas": [{"tp": 2}]}}))
    assert caplog.text.count("parallel.replicas names one replica") == 1
    assert recipe.ranks_of_replicas == (1, 2)
    assert recipe.min_world_size == 3
    with pytest.raises(EvenloadError, match="run replicas"):
        recipe.layout(3)


def test_another_number_of_processes_than_replicas_have_is_refused():
    recipe = parse(LORA | {"parallel": {"replicas": [{"dp": 1}, {"tp": 2}]}, "model": {"vocab_size": 128}})
    with pytest.raises(EvenloadError, match="the replicas do not fill the job") as caught:
        adapter_training(recipe).preflight(recipe, 4, (), proof=True)
    assert "4 processes" in caught.value.found
    assert adapter_training(recipe).preflight(recipe, None, (), proof=True) == 3


def test_a_sequence_goes_where_it_fits_and_a_replica_without_any_runs_a_copy():
    chains = [chain_of(max_tokens) for max_tokens in (64, 512)]
    lengths = np.array([40, 200, 500, 30, 64, 65])
    draw = Draw(np.arange(6), lengths, {}, tenants=np.zeros(6, np.int64))
    parts = [Replicas(chains, own).part_of(draw) for own in (0, 1)]
    places = [one.part.places.tolist() for one in parts]
    assert sorted(places[0] + places[1]) == list(range(6))
    assert {1, 2, 5} <= set(places[1])
    assert all(one.lengths.tolist() == lengths[one.part.places].tolist() for one in parts)
    lone = Draw(np.arange(1), lengths[1:2], {}, tenants=np.zeros(1, np.int64))
    copies = [Replicas([chains[1]] * 2, own).part_of(lone) for own in (0, 1)]
    assert [one.part.counts for one in copies].count(True) == 1
    assert all(one.lengths.tolist() == [200] for one in copies)


def chain_of(max_tokens):
    packing = {"enabled": True, "max_tokens": max_tokens, "slices": "off"}
    recipe = parse({"model": {"vocab_size": 256}, "plugins": {"packing": packing, "lora": {"enabled": True}}})
    return PlanChain.of_recipe(recipe, recipe.layout(1))


def test_ranks_of_a_job_of_tenants_ask_the_whole_job_but_where_a_replica_proves_by_itself():
    asks = {"everyone", "from_first", "all_or_none", "agree"}
    within = Counter()
    for path in (ROOT / "plugins" / "lora").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in asks:
                of_job = any(isinstance(one, ast.Constant) and one.value == "job" for one in call.args)
                within[path.name] += not of_job
    assert +within == {"proof_steps.py": 2}, "each replica compares its own copy of plain training"
