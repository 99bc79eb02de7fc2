"""Examples for clusters: files that a scheduler would read, and what they ask of evenload."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import evenload
import pytest
import yaml
from evenload.api import load_recipe

EXAMPLES = Path(evenload.__file__).parent / "examples"
SCRIPTS = sorted((EXAMPLES / "slurm").glob("*.sbatch"))
CALLS = re.compile(r"evenload (train) recipe\.yaml ((?:[a-z_.]+=\S+ ?)*)")


def texts() -> dict[str, str]:
    """What shells run, by file."""
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text())
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    task = yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())
    own = {"pytorchjob.yaml": " ".join(map(str, container["command"])).replace("-m evenload", "evenload")}
    own["train.yaml"] = task["run"].replace("-m evenload", "evenload")
    return own | {script.name: script.read_text() for script in SCRIPTS}


@pytest.mark.parametrize("name", texts())
def test_a_shell_can_read_it_and_its_settings_are_those_of_a_recipe(name: str, tmp_path: Path) -> None:
    text = texts()[name]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if "script" in name:
        assert "evenload run recipe.yaml -- " in text
        return
    (call,) = CALLS.findall(text)
    recipe = load_recipe("quickstart", call[1].split())
    assert recipe.checkpoint.every == 100


def test_a_job_of_kubeflow_has_what_it_requires() -> None:
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert [container["name"] for container in template["containers"]] == ["pytorch"]  # the operator looks for it
    volumes = {volume["name"] for volume in template["volumes"]}
    assert {mount["name"] for mount in template["containers"][0]["volumeMounts"]} <= volumes
    assert template["terminationGracePeriodSeconds"] > 30


def test_a_run_that_ended_early_is_queued_again() -> None:
    from evenload.training.early_end import ASK_AGAIN

    text = (EXAMPLES / "slurm" / "train.sbatch").read_text()
    assert f'"$code" -eq {ASK_AGAIN}' in text
    assert "--signal=USR1@" in text
