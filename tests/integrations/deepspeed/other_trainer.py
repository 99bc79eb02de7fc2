"""What ranks of either trainer run: tenants that begin under one of them and go on under the other."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.recipe import recipe as recipes
from evenload.core.recipe.adapter import Adapter
from evenload.core.recipe.tenant import TenantTrain
from evenload.runtime.adapters.places import AdapterState
from evenload.runtime.world.world import init_world
from safetensors.torch import save_file

LENGTHS = (21, 9, 13, 5, 17, 30)
TENANTS = (0, 1, 2, 0, 1, 2)
ADAPTERS = (
    Adapter(r=4, lora_alpha=8),
    Adapter(r=8, target_modules=("q_proj", "v_proj", "down_proj")),
    Adapter(r=16, rank_pattern={"o_proj": 5}, use_rslora=True),
)
RATES = {0: 5e-3, 1: 2e-3, 2: 1e-3}


def call(arguments: dict[str, Any]) -> list[list[float]]:
    """`went`, on a rank."""
    if arguments["trainer"] != "deepspeed":
        return went(**arguments)
    from deepspeed_tests.jobs import giving_groups_back

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
    states = [AdapterState(*fields) for fields in torch.load(read)] if read else [None] * len(ADAPTERS)
    for number, (adapter, state) in enumerate(zip(ADAPTERS, states, strict=True)):
        host.adapters.join(number, adapter, TenantTrain(weight_decay=0.1, clip_grad=0.5), state)
    first = states[0].steps if states[0] else 0
    losses = []
    for step in range(first, first + steps):
        result = host.train_step(_plan(host), lambda i, step=step: _tokens(step, i), lr=RATES)
        losses.append([result.tenants[number].loss for number in range(len(ADAPTERS))])
        written = [host.adapters.state(number) for number in range(len(ADAPTERS))]
        if write and step + 1 == steps // 2 and world.rank == 0:
            torch.save([tuple(map(_plain, state)) for state in written], write)
    host.close()
    return losses


def _plain(field: Any) -> Any:
    return field if isinstance(field, int) else dict(field)


def _tokens(step: int, sequence: int) -> Any:
    return np.random.default_rng((step, sequence)).integers(0, 64, LENGTHS[sequence])


def _plan(host: Any) -> StepPlan:
    packs, layout = [(0, 1), (2, 3, 4), (5,)], host.layout
    ranks = layout.dp
    micro_batches = tuple(
        MicroBatch(tuple(Slice(i, 0, LENGTHS[i]) for i in ids), (number % ranks,)) for number, ids in enumerate(packs)
    )
    limits = Limits(ranks, 64, num_stages=layout.pp, layers_per_stage=2 // layout.pp)
    return check(StepPlan(as_lengths(LENGTHS), micro_batches, limits)).revised(tenants=as_lengths(TENANTS))


def wrote_folder(folder: Path) -> None:
    """A small llama as Transformers saves it."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    config.save_pretrained(folder)
    torch.manual_seed(1)
    weights = transformers.LlamaForCausalLM(config).state_dict()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
