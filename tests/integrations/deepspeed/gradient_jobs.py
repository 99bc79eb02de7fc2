"""Gradients of samples from one backward of packs, against one backward a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from deepspeed_tests.jobs import gathered, hosted
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.integrations.deepspeed.plain import PlainModel
from evenload.integrations.host.gradients import GradientSettings, PlannedSamples
from evenload.integrations.reference.textbook import AdamW
from evenload.integrations.reference.textbook_adapter import Alone
from evenload.runtime.adapters.places import AdapterState
from evenload.runtime.adapters.projection import projection
from evenload.runtime.attention.labels import part_of
from evenload.training.proof.weighing import drawn_weights
from harness.proof import planned, tokens

COLUMNS, SEED = 100, 5
ADAPTER = Adapter(r=4, lora_alpha=8)


def _case(host: Any, name: str, number: int) -> PlannedSamples:
    plan, data = planned(host, name), tokens()
    return PlannedSamples(plan, data, drawn_weights(None, data, plan.lengths, "token", [0]) if number % 2 else None)


def by_sample(names: list[str], **asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with hosted(**asked) as host:
        samples = [_case(host, name, number) for number, name in enumerate(names)]
        how: Any = {"labels": samples[0].labels}
        host.train_step(*samples[0][:2], lr=1e-3, **how)
        before, base = _state(host, samples[0]), host.weights()
        state = _matrices(base)
        one = Alone(PlainModel(host.recipe, host, "fp64"), base, ADAPTER, AdamW.of(state.weights, TenantTrain()))
        settings = GradientSettings(ADAPTER, COLUMNS, SEED, state=state)
        with host.gradient_scores(settings) as scores:
            for name, own in zip(names, samples, strict=True):
                found[name] = _errors(one, scores, own)
        found["changed"] = [n for n, t in _state(host, samples[0]).items() if not torch.equal(t, before[n])]
        found["gathered"] = gathered(host) if host.layout.pp == 1 else 0
    return found


def _matrices(weights: Any) -> AdapterState:
    """Of an adapter of a model with these weights; none is zero."""
    generator, matrices = torch.Generator().manual_seed(1), {}
    for name in [n.removesuffix(".weight") for n, w in weights.items() if ".layers." in n and w.ndim == 2]:
        outputs, inputs = weights[f"{name}.weight"].shape
        matrices[f"{name}.lora_A"] = torch.randn(ADAPTER.r, inputs, generator=generator) * 0.03
        matrices[f"{name}.lora_B"] = torch.randn(outputs, ADAPTER.r, generator=generator) * 0.03
    return AdapterState(matrices, {}, {}, 0)


def _errors(one: Alone, scores: Any, samples: PlannedSamples) -> dict[str, float]:
    rows, _ = scores.projected(samples)
    direction = scores.direction([samples])
    backward, forwards = (scores.along(direction, [samples], method).products for method in ("backward", "forwards"))
    plan, data, labels = samples
    whole = [
        one.gradients(lambda _, n=n: data(n), plan.lengths[[n]], part_of(labels, [n]))[1]
        for n in range(len(plan.lengths))
    ]
    expected = np.array(
        [
            sum(projection(n, g.flatten(), torch.arange(g.numel()), COLUMNS, SEED).numpy() for n, g in row.items())
            for row in whole
        ]
    )
    flat = np.array([np.concatenate([g.double().numpy().ravel() for g in row.values()]) for row in whole])
    norms = np.linalg.norm(flat, axis=1)
    mean = (flat / np.where(norms > 0, norms, 1)[:, None]).mean(axis=0)
    wanted, norms = flat @ mean, np.where(norms > 0, norms, 1)
    return {
        "rows": float((np.linalg.norm(rows - expected, axis=1) / norms).max()),
        "backward": float(np.linalg.norm(backward - wanted) / np.linalg.norm(wanted)),
        "forwards": float(np.linalg.norm(forwards - wanted) / np.linalg.norm(wanted)),
        "ranks": _ranks(forwards, wanted),
    }


def _ranks(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.argsort().argsort(), other.argsort().argsort())[0, 1])


def _state(host: Any, samples: PlannedSamples) -> dict[str, torch.Tensor]:
    result, gradients = host.gradients(*samples)
    kept = {f"weight {name}": weight for name, weight in host.weights().items()}
    kept |= {f"gradient {name}": gradient for name, gradient in gradients.items()}
    kept |= {f"{n} {i}": t for n, state in host.trained.optimizer_states().items() for i, t in enumerate(state)}
    wants = torch.tensor([p.requires_grad for p in host.engine.module.parameters()])
    training = torch.tensor([module.training for module in host.engine.module.modules()])
    kept |= {"random": torch.get_rng_state(), "training": training, "wants": wants}
    return kept | {"loss": torch.tensor(result.loss)}
