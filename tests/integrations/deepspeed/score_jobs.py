"""Plans that run forward only, against whole sequences one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from deepspeed_tests.jobs import hosted
from evenload.integrations.deepspeed.engine.model import build_model
from evenload.integrations.deepspeed.plain import relative_error
from evenload.runtime.attention.labels import Labels
from evenload.runtime.attention.pack import IGNORE
from evenload.training.proof.weighing import drawn_weights
from harness.proof import LENGTHS, planned, tokens
from torch.nn.functional import cross_entropy

tokens_of = tokens()


def scored(pp: int, stage: int, plans: list[str], **more: Any) -> dict[str, Any]:
    """Of each plan the largest errors of losses and logits against plain forwards, with half of all tokens masked the
    second time, and whether weights, random states or the gradients of a step behind it have changed."""
    rows = []
    with hosted(stage, pp=pp, **more) as host:
        expected, vectors = _one_by_one(host), _vectors(host)
        labels = _masked()
        before = _state(host)
        for name in plans:
            plan = planned(host, name)
            whole, masked = host.score(plan, tokens_of), host.score(plan, tokens_of, labels=labels)
            pointed = host.score(plan, tokens_of, labels=labels, vectors=True)
            by_token = host.token_losses(plan, tokens_of, labels=labels)
            logits = host.logits(plan, tokens_of)
            rows.append(
                {
                    "losses": _error(whole, expected, None),
                    "masked": max(_error(one, expected, labels) for one in (masked, pointed)),
                    "vectors": _off_in_vectors(pointed.vectors, vectors),
                    "logits": max((_off(logits[i], expected[i]) for i in logits), default=0.0),
                    "has_all_logits": set(logits) == set(range(len(LENGTHS))),
                    "tokens": max((_off_by_token(by_token[i], i, expected[i], labels) for i in by_token), default=0.0),
                    "loss": whole.loss,
                }
            )
        changed = [n for n, state in _state(host).items() if not torch.equal(state, before[n])]
        how: Any = {"lr": 0.0, "labels": labels._replace(reference=_reference)}
        host.scores_steps = True
        steps = [host.train_step(planned(host, name), tokens_of, **how) for name in plans]
        trained = [_error(step.scores, expected, labels) for step in steps]
        excess = [_off_in_excess(step.scores, expected, labels) for step in steps]
        return {"plans": rows, "changed": changed, "trained": trained, "excess": excess}


def _masked() -> Labels:
    """Every second token carries loss, with a weight of its own, and of the last sequence none."""
    last = len(LENGTHS) - 1

    def of(index: int) -> np.ndarray:
        return np.where((np.arange(LENGTHS[index]) % 2 == 1) & (index < last), tokens_of(index), IGNORE)

    targets = np.array([int((of(i)[1:] != IGNORE).sum()) for i in range(len(LENGTHS))])
    return drawn_weights(Labels(of, targets), tokens_of, np.array(LENGTHS), "token", [0])


@torch.no_grad()
def _one_by_one(host: Any) -> dict[int, torch.Tensor]:
    """The logits of whole sequences in Transformers' own model, each in a batch of its own."""
    model = build_model(host.recipe, attn_implementation="sdpa", experts_implementation="eager").eval()
    model.load_state_dict(host.weights())
    return {i: model(torch.from_numpy(tokens_of(i))[None]).logits[0] for i in range(len(LENGTHS))}


@torch.no_grad()
def _vectors(host: Any) -> dict[int, np.ndarray]:
    """Of whole sequences in Transformers' own model: the sum of each token's place, from 1, times its last hidden
    state."""
    model = build_model(host.recipe, attn_implementation="sdpa", experts_implementation="eager").eval()
    model.load_state_dict(host.weights())
    states = {i: model.model(torch.from_numpy(tokens_of(i))[None]).last_hidden_state[0] for i in range(len(LENGTHS))}
    return {i: sum((t + 1) * row for t, row in enumerate(own.double().numpy())) for i, own in states.items()}


def _off_in_vectors(own: np.ndarray, expected: dict[int, np.ndarray]) -> float:
    return max(float(np.linalg.norm(own[i] - row) / np.linalg.norm(row)) for i, row in expected.items())


def _error(scores: Any, expected: dict[int, torch.Tensor], labels: Labels | None) -> float:
    """The largest relative error of a sequence's loss, and of that of all; infinite where its targets are others."""
    worst, total, divisor = 0.0, 0.0, 0.0
    for number, logits_LV in expected.items():
        wanted = torch.from_numpy((labels.of if labels else tokens_of)(number)[1:].copy())
        losses = cross_entropy(logits_LV[:-1].double(), wanted, ignore_index=IGNORE, reduction="none")
        if int(scores.targets[number]) != int((wanted != IGNORE).sum()):
            return float("inf")
        weights = (wanted != IGNORE).double()
        if labels and labels.weights:
            weights = weights * torch.from_numpy(labels.weights.of(number)[1:].copy())
        loss = float((losses * weights).sum())
        worst = max(worst, abs(loss - float(scores.losses[number])) / max(1.0, abs(loss)))
        total, divisor = total + loss, divisor + float(weights.sum())
    return max(worst, abs(scores.loss * divisor / total - 1))


def _reference(index: int) -> np.ndarray:
    """Losses of the tokens of a sequence by another model: about half of them are exceeded."""
    return 5.5 + np.random.default_rng(index).normal(size=LENGTHS[index])


def _token_losses(number: int, logits_LV: torch.Tensor, labels: Labels) -> np.ndarray:
    """Of every token but the first; 0 where it is no target."""
    wanted = torch.from_numpy(labels.of(number)[1:].copy())
    return cross_entropy(logits_LV[:-1].double(), wanted, ignore_index=IGNORE, reduction="none").numpy()


def _off_in_excess(scores: Any, expected: dict[int, torch.Tensor], labels: Labels) -> float:
    """The largest relative error of what a sequence's token losses exceed those of a reference by."""
    worst = 0.0
    for number, logits_LV in expected.items():
        counts = (labels.of(number)[1:] != IGNORE) * labels.weights.of(number)[1:]
        excess = np.maximum(_token_losses(number, logits_LV, labels) - _reference(number)[1:], 0.0)
        wanted = float((counts * excess).sum())
        worst = max(worst, abs(wanted - float(scores.excess[number])) / max(1.0, abs(wanted)))
    return worst


def _off_by_token(own: torch.Tensor, number: int, logits_LV: torch.Tensor, labels: Labels) -> float:
    """The largest error of a token's loss, the first token's among them, which has none."""
    losses = np.append(0.0, _token_losses(number, logits_LV, labels))
    return float(np.abs(own.double().numpy() - losses).max() / losses.max(initial=1.0))


def _off(values: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_error({"": values}, {"": expected})


def _state(host: Any) -> dict[str, torch.Tensor]:
    """All that a step goes by, but for the plan, and what a step gives."""
    result, gradients = host.gradients(planned(host, "packs"), tokens_of)
    kept = {f"weight {name}": weight for name, weight in host.weights().items()}
    kept |= {f"gradient {name}": gradient for name, gradient in gradients.items()}
    training = torch.tensor([module.training for module in host.engine.module.modules()])
    return kept | {"random": torch.get_rng_state(), "training": training, "loss": torch.tensor(result.loss)}
