"""Ranks that srun or mpirun has started."""

import json
import os

import pytest
from evenload.core.errors import EvenloadError
from evenload.runtime.world.schedulers import adopt

SMALL = ("model.hidden_size=32", "model.num_attention_heads=4", "model.num_query_groups=2", "model.num_layers=2")

STEP = {
    "SLURM_JOB_ID": "481516",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_NODELIST": "gpu[003-004,17],head",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def adopted(environment):
    changed = dict(environment)
    adopt(changed)
    return changed


def test_a_task_of_srun_is_a_rank():
    changed = adopted(STEP)
    assert [changed[name] for name in OWN] == ["9", "11", "1", "3", "gpu003"]
    others = [adopted({**STEP, "SLURM_PROCID": str(rank)})["MASTER_PORT"] for rank in range(11)]
    assert set(others) == {changed["MASTER_PORT"]}
    assert adopted({**STEP, "SLURM_STEP_ID": "3"})["MASTER_PORT"] != changed["MASTER_PORT"]
    assert 15_000 <= int(changed["MASTER_PORT"]) < 30_000


@pytest.mark.parametrize(
    ("names", "first"),
    [("node7", "node7"), ("a1,a2", "a1"), ("n[1,5]", "n1"), ("r2-n[08-09]", "r2-n08"), ("b[0-3],c", "b0")],
)
def test_the_first_node_of_a_list_is_where_ranks_meet(names, first):
    assert adopted({**STEP, "SLURM_STEP_NODELIST": names})["MASTER_ADDR"] == first


def test_ranks_of_mpirun_meet_on_their_machine_or_where_the_user_says():
    changed = adopted(MPI)
    assert [changed[name] for name in OWN] == ["1", "2", "1", "2", "127.0.0.1"]
    with pytest.raises(EvenloadError, match="no machine that ranks can meet"):
        adopted({**MPI, "OMPI_COMM_WORLD_SIZE": "4"})
    named = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    changed = adopted({**MPI, "OMPI_COMM_WORLD_SIZE": "4", **named})
    assert named.items() <= changed.items()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script, which is no task of a step
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {**STEP, "RANK": "0", "WORLD_SIZE": "4"},  # of torchrun
    ],
)
def test_whatever_is_no_rank_of_a_scheduler_stays_as_it_is(environment):
    assert adopted(environment) == environment


@pytest.mark.slow
def test_tasks_of_srun_train_one_job(forge, tmp_path):
    script = tmp_path / "task.py"
    script.write_text("from evenload.cli import main\n\nmain()\n")
    words = ["train", "quickstart", *SMALL, "train.steps=2", "--json"]
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_JOB_ID": str(os.getpid()), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    tasks = [
        forge("megatron").start(
            script, *words, environment={**os.environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        )
        for rank in "01"
    ]
    assert [task.wait() for task in tasks] == [0, 0], [task.output for task in tasks]
    result, _ = json.JSONDecoder().raw_decode(tasks[0].output)
    assert result["host"]["dp"] == 2
    assert '"host"' not in tasks[1].output, "one rank speaks"
