"""What the ranks of test_dropout.py do: tenants with dropout under many plans, and alone, by hooks on stock layers."""

from __future__ import annotations

from typing import Any

import torch
from evenload.core.plan.step_plan import as_lengths
from evenload.integrations.megatron import PlainModel
from evenload.integrations.reference.exactness import largest_error
from evenload.runtime.adapters.dropout import kept, key_of
from harness.proof import LENGTHS, tokens
from harness.proof.tenants import TENANTS, TRAINS, adapters_of, own_batch
from megatron_tests.float64 import all_in_float64
from megatron_tests.jobs import masked
from megatron_tests.tenant_jobs import company, join_anew, plan_of

SHARE = 0.3


def dropping(world: Any, *, plans: list[str | int], share: float = SHARE, **changes: Any) -> dict[str, Any]:
    """Loss and gradient of each tenant under plans, by plan; the gradients of one tenant in plans of its own; losses
    without a gradient, with and without dropout."""
    with company(world, dropout=share, **changes) as (host, starts):
        data, by_plan = tokens(LENGTHS), {}
        for which in plans:
            with all_in_float64():
                result, gradients = host.gradients(plan_of(host, which), data)
            losses = {number: one.loss for number, one in result.tenants.items()}
            by_plan[which] = losses, {name: g.numpy() for name, g in gradients.items()}
        places = [i for i, tenant in enumerate(TENANTS) if tenant == 0]
        own = plan_of(host, 7, [LENGTHS[i] for i in places], [0] * len(places))
        with all_in_float64():
            _, alone = host.gradients(own, lambda i: data(places[i]))
        scores = [host.score(plan_of(host, plans[0]), data).losses.tolist()]
        join_anew(host, starts)
        scores.append(host.score(plan_of(host, plans[0]), data).losses.tolist())
    return {"plans": by_plan, "alone": {name: g.numpy() for name, g in alone.items()}, "scores": scores}


def against_hooks(world: Any, *, share: float, plans: list[str | int], **changes: Any) -> list[dict[str, Any]]:
    """Errors of loss and gradients against autograd through y + s (drop(x) A^T) B^T on stock layers."""
    rows = []
    with company(world, dropout=share, **changes) as (host, starts):
        data, labels = tokens(LENGTHS), masked(LENGTHS)
        for which in plans:
            plan = plan_of(host, which)
            result, gradients = host.gradients(plan, data, labels)
            for number, start in enumerate(starts):
                adapter = adapters_of(host.recipe.model.family, share)[number]
                batch = own_batch(plan, number, data, labels)
                loss, expected = _hooked(host, adapter, TRAINS[number].seed, start.weights, batch)
                own = {n.partition(".")[2]: g for n, g in gradients.items() if n.startswith(f"{number}.")}
                found = result.tenants[number].loss
                rows.append({"loss": abs(found - loss) / loss, "grad": largest_error(own, expected).error})
                assert own.keys() == expected.keys()
    return rows


def _hooked(host: Any, adapter: Any, seed: int, weights: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one tenant alone, on one rank; nothing of hooks or products of the product is used."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    tokens_of, lengths, labels = batch
    plain, sample = PlainModel(host.recipe, host), [0]
    modules = {id(module.weight): module for module in plain._model.modules() if hasattr(module, "weight")}

    def adding(pieces: Any) -> Any:
        def add(_: Any, arguments: Any, output: Any) -> Any:
            x_LC = arguments[0].flatten(0, 1)
            rows = []
            for piece in pieces:
                name = piece.name.removesuffix(".weight")
                a, b = leaves.get(f"{name}.lora_A"), leaves.get(f"{name}.lora_B")
                if a is None:
                    rows.append(x_LC.new_zeros(len(x_LC), piece.shape[0]))
                    continue
                shown = x_LC
                if adapter.lora_dropout:
                    samples, positions = torch.full((len(x_LC),), sample[0]), torch.arange(len(x_LC))
                    place = key_of(seed, 0, name), samples, positions, (0, x_LC.shape[1]), adapter.lora_dropout
                    shown = x_LC * kept(*place) / (1 - adapter.lora_dropout)
                rows.append(adapter.scaling_of(name) * (shown @ a.T) @ b.T)
            grouped = [row.view(len(row), piece.groups, -1) for row, piece in zip(rows, pieces, strict=True)]
            return output[0] + torch.cat(grouped, -1).view_as(output[0]), output[1]

        return add

    by_parameter: dict[str, list[Any]] = {}
    for name, _, piece in plain._pieces():
        by_parameter.setdefault(name, []).append(piece)
    for name, pieces in by_parameter.items():
        if ".linear_" in name and name.endswith("weight") and "norm" not in name:
            modules[id(plain._parameters[name])].register_forward_hook(adding(pieces))

    def noted(index: int) -> Any:
        sample[0] = index
        return tokens_of(index)

    loss, _ = plain.gradients(noted, as_lengths(lengths), labels)
    plain.close()
    count = int(labels.targets.sum())
    return loss, {name: leaf.grad / count for name, leaf in leaves.items()}
