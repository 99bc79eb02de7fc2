"""What ranks of either trainer run: tenants that begin under one of them and go on under the other."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evenload.core.recipe import recipe as recipes
from evenload.runtime.adapters.places import AdapterState
from evenload.runtime.world.world import init_world
from harness.groups import giving_groups_back
from harness.proof import LENGTHS, planned
from harness.proof.tenants import TRAINS, adapters_of, with_tenants

RATES = {0: 5e-3, 1: 2e-3, 2: 1e-3}


def call(arguments: dict[str, Any]) -> list[list[float]]:
    if arguments["trainer"] != "deepspeed":
        return went(**arguments)
    with giving_groups_back():
        return went(**arguments)


def went(trainer: str, folder: str, steps: int, read: str = "", write: str = "", **more: Any) -> list[list[float]]:
    """Losses of the tenants in each step. They go on from the file ``read``, and are written into ``write`` half-way.

    Tokens of a step depend on how many steps a tenant has made.
    """
    torch.set_num_threads(1)
    if trainer == "megatron":
        from evenload.patches import bridge_cpu

        bridge_cpu()
    world = init_world()
    data = {"trainer": trainer, "model": {"weights": folder}, "data": {"max_length": 64}, "train": {"dtype": "fp32"}}
    recipe = recipes.parse({**data, **more, "plugins": {"lora": {"enabled": True}}})
    host = import_module(f"evenload.integrations.{trainer}").open_host(recipe, world)
    tenants = range(len(TRAINS))
    states = [AdapterState(*fields) for fields in torch.load(read)] if read else [None] * len(TRAINS)
    for number, adapter in enumerate(adapters_of("llama")):
        host.adapters.join(number, adapter, TRAINS[number], states[number])
    first = states[0].steps if states[0] else 0
    losses = []
    for step in range(first, first + steps):
        plan = with_tenants(planned(host, "packs"))
        result = host.train_step(plan, lambda i, step=step: _tokens(step, i), lr=RATES)
        losses.append([result.tenants[number].loss for number in tenants])
        written = [host.adapters.state(number) for number in tenants]
        if write and step + 1 == steps // 2 and world.rank == 0:
            torch.save([tuple(map(_plain, state)) for state in written], write)
    host.close()
    return losses


def _plain(field: Any) -> Any:
    return field if isinstance(field, int) else dict(field)


def _tokens(step: int, sequence: int) -> Any:
    return np.random.default_rng((step, sequence)).integers(0, 64, LENGTHS[sequence])


def wrote_folder(folder: Path) -> None:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
