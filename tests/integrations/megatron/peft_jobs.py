"""What the ranks of test_peft.py do: tenants in company on a base from a Hugging Face folder, as peft trained each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from evenload.core.recipe.adapter import Adapter
from evenload.core.recipe.tenant import TenantTrain
from evenload.integrations.exactness import largest_error, relative_error
from evenload.integrations.megatron import open_host
from evenload.runtime.adapters.state import AdapterState
from megatron_float64 import all_in_float64
from megatron_pretrained_jobs import recipe_from
from megatron_tenant_jobs import plan_of


def as_with_peft(world: Any, *, folder: str, saved: str, plans: list[str | int], **parallel: int) -> dict[str, float]:
    """Largest errors over tenants and steps; see `test_peft.trained_by_peft` for what is saved."""
    tenants = torch.load(saved)
    numbers = range(len(tenants))
    host = open_host(recipe_from(folder, plugins={"lora": {"enabled": True}}, **parallel), world)
    for number, tenant in enumerate(tenants):
        adapter, train = Adapter(**tenant["adapter"]), TenantTrain(**tenant["train"])
        host.adapters.join(number, adapter, train, AdapterState(tenant["start"], {}, {}, 0))
    worst = dict.fromkeys(("loss", "grad", "norm", "weights"), 0.0)

    def took(what: str, error: float) -> None:
        worst[what] = max(worst[what], error)

    for step, which in enumerate(plans):
        samples = [sample for tenant in tenants for sample in tenant["steps"][step]["samples"]]
        owners = [number for number, tenant in enumerate(tenants) for _ in tenant["steps"][step]["samples"]]
        mixed = np.random.default_rng(step).permutation(len(samples))
        data = [samples[i].numpy() for i in mixed]
        plan = plan_of(host, which, [len(sample) for sample in data], [owners[i] for i in mixed])
        tokens_of = data.__getitem__
        with all_in_float64():
            _, gradients = host.gradients(plan, tokens_of)
            result = host.train_step(plan, tokens_of, lr={number: tenants[number]["rate"] for number in numbers})
        for number, tenant in enumerate(tenants):
            expected, own = tenant["steps"][step], result.tenants[number]
            took("loss", abs(own.loss - expected["loss"]) / expected["loss"])
            took("norm", abs(own.grad_norm - expected["norm"]) / expected["norm"])
            of_tenant = {n.partition(".")[2]: g for n, g in gradients.items() if n.startswith(f"{number}.")}
            assert of_tenant.keys() == expected["gradients"].keys()
            took("grad", largest_error(of_tenant, expected["gradients"]).error)
    for number, tenant in enumerate(tenants):
        for name, weight in host.adapters.state(number).weights.items():
            start = tenant["start"][name]
            took("weights", relative_error(weight - start, tenant["end"][name] - start))
    host.close()
    return worst
