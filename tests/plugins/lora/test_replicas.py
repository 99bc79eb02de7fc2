"""Replicas of unlike shapes train the adapters that one shape trains, and agree to the bit."""

import copy
import json

import pytest
from harness.cases import only_full
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

ACME = {
    "data": {"source": "python-docstrings/email", "max_length": 256},
    "adapter": {"r": 4, "lora_dropout": 0.1},
    "train": {"steps": 4, "batch_size": 5, "lr": 2e-3},
    "evaluate": {"source": "python-docstrings-held-out/email", "every": 2},
}
SOLO = {
    "data": {"source": "python-docstrings/asyncio", "max_length": 192, "loss_on": "all"},
    "adapter": {"r": 8, "target_modules": ["q_proj", "down_proj"]},
    "train": {"steps": 6, "batch_size": 1, "seed": 7, "lr": 1e-3, "weight_decay": 0.1},
}
FP64 = {"train": {"dtype": "fp64"}}
ONE_SEQUENCE_STEPS = 2


def trained(job_of, path, *replicas, **sections):
    parallel = {"replicas": [*replicas]} if replicas else {"dp": 1}
    job = job_of(path, parallel=parallel, **copy.deepcopy(FP64 | sections))
    job.put(acme=ACME, solo=SOLO)
    return job, job.trained()


@pytest.fixture(scope="module")
def one_shape(job_of, tmp_path_factory):
    return trained(job_of, tmp_path_factory.mktemp("one_shape"))


@pytest.mark.parametrize(
    ("shapes", "allowed"),
    [
        ([{"dp": 2}, {"dp": 1}], 1e-9),
        only_full([{"tp": 2}, {"dp": 1}], 1e-6),
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
