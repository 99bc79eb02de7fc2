"""Hosts whose model comes from a Hugging Face folder and leaves as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from evenload.core.plan.step_plan import as_lengths
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed import open_host
from evenload.integrations.deepspeed.plain import plain_gradients, relative_error
from evenload.integrations.huggingface.folders.reading import WeightFolder
from evenload.runtime.world.world import init_world
from harness.groups import giving_groups_back
from harness.proof import LENGTHS, planned

TOKENS = [np.random.default_rng(i).integers(0, 64, n) for i, n in enumerate(LENGTHS)]


def came_and_went(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case: how far weights, loss, gradients and logits of a host are from those of Transformers' own model,
    and what of the folder is not in what leaves, bit by bit."""
    return [_case(**case) for case in cases]


def _write_family(folder: str, config: str, fields: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
    for name, parameter in model.named_parameters():  # also those that Transformers begins with zeros and ones
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    model.save_pretrained(folder, max_shard_size="20KB")


@giving_groups_back()
def _case(family: tuple[str, dict[str, Any]], folder: str, stage: int, **parallel: int) -> dict[str, Any]:
    world = init_world()
    if world.rank == 0:
        _write_family(folder, *family)
    torch.distributed.barrier()
    recipe = {"trainer": "deepspeed", "model": {"weights": folder}, "train": {"clip_grad": 0.0}, "parallel": parallel}
    recipe |= {"data": {"max_length": max(LENGTHS)}, "deepspeed": {"zero_stage": stage}}
    host = open_host(recipes.parse(recipe), world)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    loss, gradients = plain_gradients(theirs, TOKENS.__getitem__, as_lengths(LENGTHS))
    ours, plan = host.weights(), planned(host, "packs")
    unlike = [name for name, p in theirs.named_parameters() if not torch.equal(p.to(ours[name].dtype), ours[name])]
    result, found = host.gradients(plan, TOKENS.__getitem__)
    found = host.of_all_stages(found)
    logits = host.logits(plan, TOKENS.__getitem__)
    with torch.no_grad():
        wanted = {i: theirs.eval()(torch.from_numpy(TOKENS[i])[None]).logits[0] for i in logits}
    left = {name: tensor.clone() for name, tensor in host.exported() if tensor is not None}
    host.close()
    came = WeightFolder.open(Path(folder))
    assert bool(left) == (world.rank == 0)
    return {
        "unlike": unlike,
        "loss": abs(result.loss - loss) / loss,
        "grad": relative_error(found, gradients),
        "logits": {str(i): relative_error({"": logits[i]}, {"": wanted[i]}) for i in logits},
        "exported": [name for name in {*left, *came.names} if not _is_one(name, left, came)] if left else [],
    }


def _is_one(name: str, left: dict[str, torch.Tensor], came: WeightFolder) -> bool:
    return name in left and name in came.names and torch.equal(left[name], came.read(name))
