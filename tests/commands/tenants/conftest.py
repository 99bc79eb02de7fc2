"""A folder with a job of tenants on the tiny model that evenload makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

RECIPE = {
    "trainer": "megatron",
    "model": {"weights": "tiny-llama"},
    "parallel": {"dp": 1},
    "plugins": {
        "packing": {"enabled": True, "max_tokens": 2048},
        "lora": {"enabled": True, "tenants": "tenants", "out": "out"},
    },
    "checkpoint": {"dir": "checkpoints", "every": 2},
}
ACME: dict[str, Any] = {
    "data": {"source": "python-docstrings", "max_length": 256},
    "adapter": {"r": 4, "lora_dropout": 0.1},
    "train": {"steps": 6, "batch_size": 3, "lr": 2e-3, "lr_schedule": "cosine", "warmup_steps": 2},
}
BOLT: dict[str, Any] = {
    "data": {"source": "python-stdlib", "max_length": 192},
    "adapter": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "train": {"steps": 8, "batch_size": 2, "seed": 7, "lr": 1e-3, "weight_decay": 0.1},
}
CORE: dict[str, Any] = {
    "data": {"source": "python-docstrings-held-out", "max_length": 128},
    "adapter": {"r": 2, "target_modules": ["down_proj"]},
    "train": {"steps": 5, "batch_size": 4, "lr": 1e-3},
}


class Place:
    """A folder in which a job runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.tenants, self.out = path, path / "tenants", path / "out"
        self.tenants.mkdir()
        (path / "r.yaml").write_text(yaml.safe_dump(RECIPE))

    def put(self, **tenants: dict[str, Any]) -> None:
        for name, tenant in tenants.items():
            (self.tenants / f"{name}.yaml").write_text(yaml.safe_dump(tenant))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
