"""Hosts whose model comes from a Hugging Face folder and leaves as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed import open_host
from evenload.integrations.deepspeed.plain import plain_gradients, relative_error
from evenload.integrations.huggingface.folders.reading import WeightFolder
from evenload.integrations.huggingface.folders.writing import FolderWriter
from evenload.runtime.world.world import init_world
from harness.groups import giving_groups_back

LENGTHS = (21, 9, 13, 5)
TOKENS = [np.random.default_rng(i).integers(0, 64, n) for i, n in enumerate(LENGTHS)]


def came_and_went(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case: how far weights, loss, gradients and logits of a host are from those of Transformers' own model,
    and what of the folder that it exports differs from the one that came in."""
    return [_case(**case) for case in cases]


def _write_family(folder: str, config: str, fields: dict[str, Any]) -> None:
    """A folder of several shards, as Transformers saves it."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
    for name, parameter in model.named_parameters():  # also those that Transformers begins with zeros and ones
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    model.save_pretrained(folder, max_shard_size="20KB")


@giving_groups_back()
def _case(family: tuple[str, dict[str, Any]], folder: str, out: str, stage: int, **parallel: int) -> dict[str, Any]:
    world = init_world()
    if world.rank == 0:
        _write_family(folder, *family)
    torch.distributed.barrier()
    recipe = recipes.parse(
        {
            "trainer": "deepspeed",
            "model": {"weights": folder},
            "train": {"clip_grad": 0.0},
            "data": {"max_length": 64},
            "deepspeed": {"zero_stage": stage},
            "parallel": parallel,
        }
    )
    host = open_host(recipe, world)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    loss, gradients = plain_gradients(theirs, lambda i: TOKENS[i], as_lengths(LENGTHS))
    ours = host.weights()
    unlike = [name for name, p in theirs.named_parameters() if not torch.equal(p.to(ours[name].dtype), ours[name])]
    result, found = host.gradients(_plan(**parallel), lambda i: TOKENS[i])
    found = host.of_all_stages(found)
    logits = host.logits(_plan(**parallel), lambda i: TOKENS[i])
    with torch.no_grad():
        wanted = {i: theirs.eval()(torch.from_numpy(TOKENS[i])[None]).logits[0] for i in logits}
    _write(host, folder, out, leads=world.rank == 0)
    host.close()
    torch.distributed.barrier()
    return {
        "unlike": unlike,
        "loss": abs(result.loss - loss) / loss,
        "grad": relative_error(found, gradients),
        "logits": {str(i): relative_error({"": logits[i]}, {"": wanted[i]}) for i in logits},
        "exported": _differences(folder, out),
    }


def _plan(pp: int = 1, ep: int = 1) -> StepPlan:
    packs, dp = [(0,), (1, 2, 3)], 2 // pp
    micro_batches = tuple(
        MicroBatch(tuple(Slice(i, 0, LENGTHS[i]) for i in ids), (rank % dp,)) for rank, ids in enumerate(packs)
    )
    limits = Limits(dp, 64, num_stages=pp, layers_per_stage=2 // pp, in_step=ep)
    return check(StepPlan(as_lengths(LENGTHS), micro_batches, limits))


def _write(host: Any, folder: str, out: str, *, leads: bool) -> None:
    tensors = host.exported()
    if leads:
        with FolderWriter(Path(out), WeightFolder.open(Path(folder)).config, Path(folder), 1 << 14) as writer:
            for name, tensor in tensors:
                writer.add(name, tensor)
    else:
        assert all(tensor is None for _, tensor in tensors)


def _differences(folder: str, out: str) -> list[str]:
    """Names that are in one folder alone, or whose tensors differ."""
    one, other = (WeightFolder.open(Path(path)) for path in (folder, out))
    both = set(one.names) & set(other.names)
    return [*(set(one.names) ^ set(other.names)), *(n for n in both if not torch.equal(one.read(n), other.read(n)))]
