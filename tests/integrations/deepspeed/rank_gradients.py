"""What the ranks of a test world run: every function here is a case of test_gradients.py."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evenload.core.plan.step_plan import as_lengths
from evenload.core.recipe.adapter import Adapter
from evenload.integrations.host.gradients import GradientSettings, PlannedSamples
from evenload.runtime.adapters.places import AdapterState
from evenload.runtime.adapters.projection import projection
from evenload.training.proof.weighing import drawn_weights


def _load(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(file, Path(__file__).with_name(f"{file}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


alone, slices, pipelines = (_load(f) for f in ("alone", "rank_slices", "rank_pipeline"))
COLUMNS, SEED = 100, 5
ADAPTER = Adapter(r=4, lora_alpha=8)


@contextmanager
def hosted(stage: int, pp: int = 1, **more: Any) -> Any:
    if pp > 1:
        with pipelines.hosted(pp, stage, **more) as host:
            yield host
        return
    host = slices.open_host(slices.recipe(stage, **more), slices.init_world())
    try:
        yield host
    finally:
        host.close()


def _case(host: Any, name: str, number: int) -> PlannedSamples:
    if host.layout.pp > 1:
        plan, tokens_of = pipelines.planned(host, name), pipelines.tokens_of
        labels = drawn_weights(None, tokens_of, plan.lengths, "token", [0]) if number % 2 else None
        return PlannedSamples(plan, tokens_of, labels)
    plan = slices.plan_named(name)
    tokens_of = slices.plans.tokens_of(plan)
    labels = drawn_weights(None, tokens_of, plan.lengths, "token", [0]) if number % 2 else None
    return PlannedSamples(plan, tokens_of, labels)


def by_sample(stage: int, names: list[str], **more: Any) -> dict[str, Any]:
    """Errors of rows and products of each plan, and what has changed of the host."""
    found: dict[str, Any] = {}
    with hosted(stage, **more) as host:
        samples = [_case(host, name, number) for number, name in enumerate(names)]
        how: Any = {"labels": samples[0].labels}
        host.train_step(*samples[0][:2], lr=1e-3, **how)
        before, base = _state(host, samples[0]), host.weights()
        (state,) = alone.drawn_states([ADAPTER], base)
        settings = GradientSettings(ADAPTER, COLUMNS, SEED, state=state)
        with host.gradient_scores(settings) as scores:
            for name, own in zip(names, samples, strict=True):
                found[name] = _errors(host, scores, own, state, base)
        found["changed"] = [n for n, t in _state(host, samples[0]).items() if not torch.equal(t, before[n])]
        found["gathered"] = slices._gathered(host) if more.get("pp", 1) == 1 else 0
    return found


def _errors(host: Any, scores: Any, samples: PlannedSamples, state: AdapterState, base: Any) -> dict[str, float]:
    rows, _ = scores.projected(samples)
    direction = scores.direction([samples])
    backward, forwards = (scores.along(direction, [samples], method).products for method in ("backward", "forwards"))
    one = alone.Alone(host.recipe, base, 0, ADAPTER, state)
    whole = []
    for n in range(len(samples.plan.lengths)):
        if int(samples.plan.lengths[n]) < 2:
            whole.append({name: torch.zeros_like(m).double() for name, m in one.matrices.items()})
            continue
        own = samples.plan.revised(tenants=as_lengths(np.where(np.arange(len(samples.plan.lengths)) == n, 0, 1)))
        whole.append(one.gradients(own, samples.tokens_of, samples.labels)[1])
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
    """Spearman's correlation."""
    return float(np.corrcoef(one.argsort().argsort(), other.argsort().argsort())[0, 1])


def _state(host: Any, samples: PlannedSamples) -> dict[str, torch.Tensor]:
    """All that a step goes by, and the gradients of one."""
    result, gradients = host.gradients(*samples)
    kept = {f"weight {name}": weight for name, weight in host.weights().items()}
    kept |= {f"gradient {name}": gradient for name, gradient in gradients.items()}
    kept |= {f"{n} {i}": t for n, state in host.optimizer_states().items() for i, t in enumerate(state)}
    wants = torch.tensor([p.requires_grad for p in host.engine.module.parameters()])
    training = torch.tensor([module.training for module in host.engine.module.modules()])
    kept |= {"random": torch.get_rng_state(), "training": training, "wants": wants}
    return kept | {"loss": torch.tensor(result.loss)}
