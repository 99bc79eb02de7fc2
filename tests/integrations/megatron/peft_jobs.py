"""What the ranks of test_peft.py do: tenants in company on a base from a Hugging Face folder, as peft trained each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.integrations.huggingface.folders.adapters import write_adapter
from evenload.integrations.megatron import open_host
from evenload.integrations.reference.exactness import largest_error, relative_error
from evenload.runtime.adapters.places import AdapterState
from megatron_tests.float64 import all_in_float64
from megatron_tests.pretrained_jobs import recipe_from
from megatron_tests.tenant_jobs import plan_of
from transformers import AutoModelForCausalLM


def as_with_peft(
    world: Any, *, folder: str, saved: str, out: str, plans: list[str | int], **parallel: int
) -> dict[str, float]:
    """Largest errors over tenants and steps; see `test_peft.trained_by_peft` for what is saved."""
    tenants = torch.load(saved)
    numbers = range(len(tenants))
    host = open_host(recipe_from(folder, plugins={"lora": {"enabled": True}}, **parallel), world)
    for number, tenant in enumerate(tenants):
        adapter, train = Adapter(**tenant["adapter"]), TenantTrain(**tenant["train"])
        host.adapters.join(number, adapter, train, AdapterState(tenant["start"], {}, {}, 0))
    worst = dict.fromkeys(("loss", "grad", "norm", "weights", "logits"), 0.0)

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
    with all_in_float64():
        took("logits", _logits_off(host, folder, out, tenants))
    host.close()
    return worst


def _logits_off(host: Any, folder: str, out: str, tenants: list[Any]) -> float:
    """How far the trained host's logits are from peft's, which opens the adapters that are written. Collective."""
    ids = [tenant["steps"][0]["samples"][0] for tenant in tenants]
    plan = plan_of(host, 0, [len(one) for one in ids], range(len(ids)))
    logits = host.logits(plan, [one.numpy() for one in ids].__getitem__)
    worst = 0.0
    for number, tenant in enumerate(tenants):
        weights = host.adapters.state(number).weights
        if torch.distributed.get_rank():
            continue
        written = Path(out) / f"tenant {number}"
        write_adapter(written, Adapter(**tenant["adapter"]), weights, folder)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        model = peft.PeftModel.from_pretrained(base, str(written), autocast_adapter_dtype=False)
        with torch.no_grad():
            expected = model(input_ids=ids[number][None]).logits[0]
        worst = max(worst, relative_error(logits[number][:, : expected.shape[1]], expected))
    return worst
