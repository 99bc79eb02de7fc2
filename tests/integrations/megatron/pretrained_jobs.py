"""What the ranks of test_pretrained.py do: models that come from a Hugging Face folder and leave as one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from evenload.core.recipe.recipe import parse
from evenload.integrations.huggingface.folders.reading import WeightFolder
from evenload.integrations.megatron import open_host
from evenload.integrations.megatron.model.gpt import DTYPES
from harness.proof import LENGTHS, planned
from megatron_tests.jobs import save_new
from megatron_tests.telling import told


def recipe_from(folder: str, dtype: str = "fp64", *, plugins: Any = None, **parallel: Any) -> Any:
    return parse(
        {
            "model": {"weights": folder},
            "data": {"max_length": 128},
            "parallel": parallel,
            "train": {"global_batch_size": 8, "dtype": dtype},
            "plugins": plugins or {},
        }
    )


def came_and_went(world: Any, *, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case: how far the logits of some plans are from those of Transformers' own model, and what of the folder
    is not in what leaves, bit by bit."""
    return [_case(world, **case) for case in cases]


def _case(world: Any, folder: str, plans: tuple[Any, ...] = (), **asked: Any) -> dict[str, Any]:
    host = open_host(recipe_from(folder, **asked), world)
    samples, expected = torch.load(Path(folder) / "logits.pt")
    off = 0.0
    for which in plans:
        logits = host.logits(planned(host, which), lambda index: samples[index].numpy())
        assert sorted(logits) == (list(range(len(LENGTHS))) if world.rank == 0 else [])
        off = max([off, *(float((logits[i] - expected[i]).norm() / expected[i].norm()) for i in logits)])
    unlike = _unlike(folder, _left(host), DTYPES[host.recipe.train.dtype]) if world.rank == 0 else _left(host)
    host.close()
    return {"logits": off, "unlike": sorted(unlike)}


def _left(host: Any) -> dict[str, torch.Tensor]:
    """What the host exports, on rank 0."""
    return {name: tensor.clone() for name, tensor in host.exported() if tensor is not None}


def _unlike(folder: str, left: dict[str, torch.Tensor], dtype: torch.dtype) -> set[str]:
    came = WeightFolder.open(Path(folder))
    both = [name for name in came.names if name in left]
    return {*left} ^ {*came.names} | {n for n in both if not torch.equal(left[n], came.read(n).to(dtype))}


def stepped(world: Any, *, folder: str, write: str = "", read: str = "", **asked: Any) -> dict[str, Any]:
    """What leaves after a step from the folder that is saved, or after it was read again."""
    host = open_host(recipe_from(folder, "fp32", **asked), world)
    samples, _ = torch.load(Path(folder) / "logits.pt")
    if read:
        host.load(Path(read))
    else:
        host.train_step(planned(host, "packs"), lambda index: samples[index].numpy(), lr=1e-2)
    if write:
        save_new(world, host, Path(write))
    states = host.of_all_stages({name: state.exp_avg_sq for name, state in host.trained.optimizer_states().items()})
    left = _left(host)
    host.close()
    return {"left": {n: t.numpy() for n, t in left.items()}, "norm": {n: float(t.norm()) for n, t in states.items()}}


def unreadable(world: Any, *, folders: list[str], **asked: Any) -> list[str]:
    """What is said of a host of each folder."""
    return [told(partial(open_host, recipe_from(folder, **asked), world)) for folder in folders]
