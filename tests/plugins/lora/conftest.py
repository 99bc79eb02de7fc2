"""Jobs of tenants: a folder with a recipe and their files, and what is left there when the job has ended."""

import json
import shutil

import pytest
import yaml
from evenload.api import load_plugins

load_plugins()

RECIPE = {
    "trainer": "megatron",
    "model": {"weights": "tiny-llama"},
    "parallel": {"dp": 1},
    "plugins": {
        "packing": {"enabled": True, "max_tokens": 2048},
        "lora": {"enabled": True, "tenants": "tenants", "out": "out"},
    },
}
BEFORE_STEP = """
import json, os, signal
from pathlib import Path
from evenload.plugins.lora import loop
_train = loop.TenantLoop._train
def train(self, planned):
    if self._job.is_rank0:
        happens(self.step, Path("tenants"))
    _train(self, planned)
loop.TenantLoop._train = train
def happens(step, tenants):
"""
"""Code that rank 0 runs before each step of the job: lines that follow, indented."""


class Job:
    """A folder in which a job of tenants runs."""

    def __init__(self, path, forged, recipe):
        self.path, self.tenants, self.out = path, path / "tenants", path / "out"
        self._forged, self._recipe, self.said = forged, recipe, ""
        self.tenants.mkdir(parents=True, exist_ok=True)
        (path / "r.yaml").write_text(yaml.safe_dump(recipe))

    def copy(self, path):
        """Another job, which goes on from where this one is."""
        shutil.copytree(self.path, path, dirs_exist_ok=True)
        return Job(path, self._forged, self._recipe)

    def put(self, **tenants):
        for name, tenant in tenants.items():
            (self.tenants / f"{name}.yaml").write_text(yaml.safe_dump(tenant))

    def run(self, *words, happens="", planted=""):
        planted += BEFORE_STEP + happens if happens else ""
        return self._forged(self.path, "train", "r.yaml", *words, "--json", planted=planted)

    def trained(self, *words, **how):
        done = self.run(*words, **how)
        self.said = done.stderr
        assert done.returncode == 0, self.said[-3000:]
        return json.loads(done.stdout)

    @staticmethod
    def states(result):
        return {tenant["name"]: (tenant["state"], tenant["step"]) for tenant in result["tenants"]}

    def rows(self, name, *, evaluations=False):
        """Of the steps of a tenant, or of its evaluations, without seconds."""
        lines = map(json.loads, (self.out / name / "metrics.jsonl").read_text().splitlines())
        rows = [
            row.get("evaluation", row) | {"step": row["step"]} for row in lines if ("evaluation" in row) == evaluations
        ]
        return [{key: value for key, value in row.items() if key not in ("seconds", "step_s")} for row in rows]


@pytest.fixture(scope="session")
def job_of(forged):
    """``job_of(folder, section={...})``: a job of tenants, who are yet to be put there."""
    return lambda path, **sections: Job(path, forged, RECIPE | sections)
