"""What the ranks of a test world run: every function here is a case of test_tenants.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed import open_host
from evenload.integrations.deepspeed.engine.engine import Releases
from evenload.integrations.reference.exactness import relative_error
from evenload.runtime.world.world import init_world
from evenload.training.proof.masking import half_masked
from evenload.training.proof.weighing import drawn_weights
from torch.nn.functional import cross_entropy


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file, Path(__file__).with_name(f"{file}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


alone, slices, shared, pipelines = (_load(f) for f in ("alone", "rank_slices", "shared_plans", "rank_pipeline"))


def recipe(stage: int, pp: int = 1, **more: Any) -> Any:
    made = pipelines.recipe(pp, stage, **more) if pp > 1 else slices.recipe(stage, **more)
    return recipes.parse({**made.model_dump(exclude_unset=True), "plugins": {"lora": {"enabled": True}}})


@contextmanager
def hosted(stage: int, **more: Any) -> Iterator[tuple[Any, list[Any]]]:
    """A host with three tenants, and each of them alone."""
    host = open_host(recipe(stage, **more), init_world())
    base = host.weights()
    adapters = alone.adapters_of(more.get("family", "llama"), host.recipe.model.num_layers)
    pairs = list(zip(adapters, alone.drawn_states(adapters, base), strict=True))
    for number, (adapter, state) in enumerate(pairs):
        host.adapters.join(number, adapter, alone.TRAIN, state)
    try:
        yield host, [alone.Alone(host.recipe, base, number, *pair) for number, pair in enumerate(pairs)]
    finally:
        host.close()


def of_tenants(plan: StepPlan, number: int, absent: int = -1) -> StepPlan:
    """The plan with tenants drawn for its sequences; those of an absent one go to the next."""
    drawn = np.random.default_rng(number).permutation(np.arange(len(plan.lengths)) % 3)
    return plan.revised(tenants=as_lengths(np.where(drawn == absent, (absent + 1) % 3, drawn)))


def case(host: Any, name: str, number: int, absent: int = -1) -> tuple[StepPlan, Any, Any]:
    """A plan of this name with tenants, its tokens, and labels for every second number: of pipelines, or such that
    four ranks share micro-batches, or of two ranks."""
    if host.layout.pp > 1:
        plan = of_tenants(pipelines.planned(host, name), number, absent)
        tokens_of = pipelines.tokens_of
        labels = half_masked(None, tokens_of, np.arange(len(plan.lengths)), plan.lengths, 0) if number % 2 else None
        if number % 4 > 1:
            by: Any = "token" if number % 2 else "sequence"
            labels = drawn_weights(labels, tokens_of, plan.lengths, by, [0], plan.tenants)
        return plan, tokens_of, labels
    plans = shared if host.world.size > 2 else slices.plans
    plan = of_tenants(shared.named(name) if plans is shared else slices.plan_named(name), number, absent)
    return plan, plans.tokens_of(plan), plans.labels_of(plan, number)


def exactness(stage: int, names: list[str], **more: Any) -> dict[str, Any]:
    """Errors of every plan against each tenant alone, and what of the base stays gathered."""
    found: dict[str, Any] = {}
    with hosted(stage, **more) as (host, tenants):
        for number, name in enumerate(names):
            plan, tokens_of, labels = case(host, name, number)
            result, gradients = host.gradients(plan, tokens_of, labels)
            found[name] = _errors(plan, tenants, result, gradients, tokens_of, labels)
            found[name]["gathered"] = slices._gathered(host)
    return found


def _errors(plan: StepPlan, tenants: list[Any], result: Any, gradients: Any, tokens_of: Any, labels: Any) -> Any:
    errors: dict[str, Any] = {"loss": 0.0, "grad": 0.0, "norm": 0.0, "tenants": 0}
    for one in tenants:
        own = {n.partition(".")[2]: g for n, g in gradients.items() if n.startswith(f"{one.number}.")}
        if one.number not in result.tenants or not result.tenants[one.number].num_targets:
            assert not any(g.any() for g in own.values())
            continue
        loss, wanted = one.gradients(plan, tokens_of, labels)
        norm = float(torch.stack([g.norm() for g in wanted.values()]).norm())
        of_tenant = result.tenants[one.number]
        errors["loss"] = max(errors["loss"], abs(of_tenant.loss / loss - 1))
        errors["grad"] = max(errors["grad"], *(_error(own[name], g, norm) for name, g in wanted.items()))
        assert own.keys() == wanted.keys()
        errors["norm"] = max(errors["norm"], abs(of_tenant.grad_norm - norm) / norm)
        errors["tenants"] += 1
    return errors


def _error(value: torch.Tensor, wanted: torch.Tensor, whole: float) -> float:
    """Of one matrix; of one whose gradient is zero but for rounding (a query that sees one key), by the whole one's."""
    if float(wanted.norm()) < 1e-9 * whole:
        return float(value.double().norm()) / whole
    return relative_error(value, wanted)


def trained(stage: int, names: list[str], **more: Any) -> dict[str, Any]:
    """A step of each plan, the second without tenant 1: errors against each tenant alone, and what must not move."""
    told: dict[str, Any] = {"loss": 0.0, "norm": 0.0, "score": 0.0, "logits": 0.0}
    with hosted(stage, **more) as (host, tenants):
        before = host.weights()
        for number, name in enumerate(names):
            plan, tokens_of, labels = case(host, name, number, absent=1 if number == 1 else -1)
            kept = host.adapters.state(1)
            rates = {tenant: alone.RATES[tenant] for tenant in sorted(set(plan.tenants.tolist()))}
            result = host.train_step(plan, tokens_of, lr=rates, labels=labels)
            for one in (one for one in tenants if one.number in rates):
                (loss, norm), found = one.step(plan, tokens_of, labels), result.tenants[one.number]
                told["loss"] = max(told["loss"], abs(found.loss - loss) / (abs(loss) or 1.0))
                told["norm"] = max(told["norm"], abs(found.grad_norm - norm) / (norm or 1.0))
            if number == 1:
                told["absent"] = [_equal(kept, host.adapters.state(1)), set(rates) == {0, 2}]
            told |= _scored(host, plan, tokens_of, tenants, told)
        told["base"] = all(torch.equal(weight, before[name]) for name, weight in host.weights().items())
        told["steps"] = [host.adapters.state(number).steps for number in range(3)]
        told["apart"] = [
            max(relative_error(host.adapters.state(one.number).weights[n], m) for n, m in one.matrices.items())
            for one in tenants
        ]
    return told


def _scored(host: Any, plan: StepPlan, tokens_of: Any, tenants: list[Any], so_far: dict[str, Any]) -> dict[str, float]:
    """Errors of a forward through each sequence's own tenant."""
    scores, logits = host.score(plan, tokens_of), host.logits(plan, tokens_of)
    errors = {name: so_far[name] for name in ("score", "logits")}
    for i, tenant in enumerate(plan.tenants.tolist()):
        wanted = tenants[tenant].logits(tokens_of(i))
        if logits:
            errors["logits"] = max(errors["logits"], relative_error(logits[i], wanted))
        loss = float(cross_entropy(wanted[:-1], torch.as_tensor(tokens_of(i))[1:].long(), reduction="sum"))
        errors["score"] = max(errors["score"], abs(scores.losses[i] - loss) / max(loss, 1.0))
    return errors


def _equal(one: Any, other: Any) -> bool:
    """Whether two states of an adapter are the same, bit by bit."""
    pairs = [(one[k], other[k]) for k in range(3)]
    return one.steps == other.steps and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )


def gathered_while_backward_ends(counted: bool, recompute: bool) -> list[int]:
    """Parameters that ZeRO 3 has gathered when the backward of the first layer ends, for each backward of a step.

    Without `counted` the counters by which DeepSpeed releases parameters are left as the last forward set them.
    """
    seen: list[int] = []
    with hosted(3, recompute=recompute) as (host, _):
        first = host.engine.module.model.layers[0].input_layernorm
        handle = first.register_full_backward_hook(lambda *_: seen.append(slices._gathered(host)))
        plan, tokens_of, _ = case(host, "chains none equal", 0)
        with patch.object(Releases, "after_forward", Releases.after_forward if counted else lambda _: None):
            host.gradients(plan, tokens_of)
        handle.remove()
    return seen
