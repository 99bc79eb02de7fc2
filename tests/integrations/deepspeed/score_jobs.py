"""Plans that run forward only, against whole sequences one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from deepspeed_tests.jobs import hosted
from evenload.integrations.deepspeed.engine.model import build_model
from evenload.integrations.deepspeed.plain import relative_error
from harness.proof import LENGTHS, planned, tokens
from harness.proof.scores import (
    BLOCKS,
    Plain,
    causal,
    half_weighed,
    of_a_reference,
    off_by_token,
    off_in_blocks,
    off_in_excess,
    off_in_losses,
    off_in_vectors,
    seen_of,
)
from torch.nn.functional import cross_entropy

tokens_of = tokens()


def scored(pp: int, stage: int, plans: list[str], **more: Any) -> dict[str, Any]:
    """Of each plan the largest errors of losses and logits against plain forwards, with half of all tokens masked the
    second time, and whether weights, random states or the gradients of a step behind it have changed."""
    rows = []
    with hosted(stage, pp=pp, **more) as host:
        labels = half_weighed()
        expected, vectors = _one_by_one(host)
        sparse, _ = _one_by_one(host, lambda length: seen_of(BLOCKS, length))
        before = _state(host)
        for name in plans:
            plan = planned(host, name)
            whole, masked = host.score(plan, tokens_of), host.score(plan, tokens_of, labels=labels)
            pointed = host.score(plan, tokens_of, labels=labels, vectors=True)
            by_token = host.token_losses(plan, tokens_of, labels=labels)
            logits = host.logits(plan, tokens_of)
            rows.append(
                {
                    "losses": off_in_losses(whole, expected, None),
                    "masked": max(off_in_losses(one, expected, labels) for one in (masked, pointed)),
                    "vectors": off_in_vectors(pointed.vectors, vectors),
                    "logits": max((_off(logits[i], expected[i][0]) for i in logits), default=0.0),
                    "has_all_logits": set(logits) == set(range(len(LENGTHS))),
                    "tokens": max((off_by_token(by_token[i], i, expected, labels) for i in by_token), default=0.0),
                    "loss": whole.loss,
                    **off_in_blocks(host, plan, tokens_of, expected, sparse),
                }
            )
        changed = [n for n, state in _state(host).items() if not torch.equal(state, before[n])]
        how: Any = {"lr": 0.0, "labels": labels._replace(reference=of_a_reference)}
        host.scores_steps = True
        steps = [host.train_step(planned(host, name), tokens_of, **how) for name in plans]
        trained = [off_in_losses(step.scores, expected, labels) for step in steps]
        excess = [off_in_excess(step.scores, expected, labels) for step in steps]
        return {"plans": rows, "changed": changed, "trained": trained, "excess": excess}


@torch.no_grad()
def _one_by_one(host: Any, seen: Callable[[int], torch.Tensor] = causal) -> tuple[Plain, dict[int, np.ndarray]]:
    """Of whole sequences in Transformers' own model, one by one: logits and token losses, and the sum of each token's
    place, from 1, times its last hidden state. ``seen``: keys by query, of a length."""
    model = build_model(host.recipe, attn_implementation="sdpa", experts_implementation="eager").eval()
    model.load_state_dict(host.weights())
    rows, vectors = {}, {}
    for number in range(len(LENGTHS)):
        ids = torch.from_numpy(tokens_of(number))[None]
        mask = seen(LENGTHS[number])[None, None]
        out = model(ids, attention_mask=mask)
        rows[number] = out.logits[0], cross_entropy(out.logits[0, :-1].double(), ids[0, 1:], reduction="none").numpy()
        states = model.model(ids, attention_mask=mask).last_hidden_state[0].double().numpy()
        vectors[number] = sum((place + 1) * row for place, row in enumerate(states))
    return rows, vectors


def _off(values: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_error({"": values}, {"": expected})


def _state(host: Any) -> dict[str, torch.Tensor]:
    """All that a step goes by, but for the plan, and what a step gives."""
    result, gradients = host.gradients(planned(host, "packs"), tokens_of)
    kept = {f"weight {name}": weight for name, weight in host.weights().items()}
    kept |= {f"gradient {name}": gradient for name, gradient in gradients.items()}
    training = torch.tensor([module.training for module in host.engine.module.modules()])
    return kept | {"random": torch.get_rng_state(), "training": training, "loss": torch.tensor(result.loss)}
