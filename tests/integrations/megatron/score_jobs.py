"""What the ranks of test_score.py do: plans that run forward only, against whole sequences one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from evenload.integrations.host import scoring
from evenload.integrations.megatron import PlainModel
from harness.proof import LENGTHS, planned, tokens
from harness.proof.faults import around
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
from megatron_tests.expert_jobs import small
from megatron_tests.jobs import hosted
from megatron_tests.telling import planted


def scored(world: Any, *, plans: list[str | int], mutant: str = "", experts: bool = False, **changes: Any) -> Any:
    """Of each plan the largest errors of losses and logits against plain forwards, with half of all tokens masked the
    second time, and whether anything that training goes by has changed."""
    rows = []
    with hosted(world, **(small(**changes) if experts else changes)) as host:
        data, labels = tokens(), half_weighed()
        expected, vectors = _one_by_one(host, data)
        sparse, _ = _one_by_one(host, data, lambda length: seen_of(BLOCKS, length))
        host.gradients(planned(host, "packs"), data)
        before = state_of(host)
        for which in plans:
            plan = planned(host, which)
            with planted(FAULTS, mutant):
                whole, masked = host.score(plan, data), host.score(plan, data, labels=labels)
                pointed = host.score(plan, data, labels=labels, vectors=True)
            by_token = host.token_losses(plan, data, labels=labels)
            logits = host.logits(plan, data)
            rows.append(
                {
                    "losses": off_in_losses(whole, expected, None),
                    "masked": max(off_in_losses(one, expected, labels) for one in (masked, pointed)),
                    "vectors": off_in_vectors(pointed.vectors, vectors),
                    "logits": max((_off(logits[i], expected[i][0]) for i in logits), default=0.0),
                    "num_logits": len(logits),
                    "tokens": max((off_by_token(by_token[i], i, expected, labels) for i in by_token), default=0.0),
                    "num_tokens": len(by_token),
                    "loss": whole.loss,
                    **off_in_blocks(host, plan, data, expected, sparse),
                }
            )
        changed = differing(before, state_of(host))
        how: Any = {"lr": 0.0, "labels": labels._replace(reference=of_a_reference)}
        host.scores_steps = True
        with planted(FAULTS, mutant):
            steps = [host.train_step(planned(host, which), data, **how) for which in plans]
        trained = [off_in_losses(step.scores, expected, labels) for step in steps]
        sums = [abs(step.scores.loss - step.loss) for step in steps]
        excess = [off_in_excess(step.scores, expected, labels) for step in steps]
        return {"plans": rows, "changed": changed, "trained": trained, "sums": sums, "excess": excess}


@torch.no_grad()
def _one_by_one(
    host: Any, data: Any, seen: Callable[[int], torch.Tensor] = causal
) -> tuple[Plain, dict[int, np.ndarray]]:
    """Of whole sequences in stock layers, each in a batch of its own: logits and token losses, and the sum of each
    token's place, from 1, times what the output layer gets. ``seen``: keys by query, of a length."""
    plain, rows, vectors, last = PlainModel(host.recipe, host), {}, {}, list[torch.Tensor]()
    hook = plain._model.output_layer.register_forward_pre_hook(lambda _, given: last.append(given[0][:, 0]))
    plain.routers.begin(np.array(LENGTHS))
    for number, length in enumerate(LENGTHS):
        ids, mask = torch.from_numpy(data(number))[None], ~seen(length)
        call = ids, torch.arange(length)[None], mask[None, None]
        plain.routers.run(number)
        logits = plain._model(*call, runtime_gather_output=True)
        vectors[number] = sum((place + 1) * row for place, row in enumerate(last.pop().double().cpu().numpy()))
        # Megatron's own loss is float32 inside, on both sides.
        rows[number] = logits[0], plain._model(*call, labels=ids.roll(-1))[0, :-1].double().numpy()
        last.clear()
    hook.remove()
    plain.close()
    return rows, vectors


def _off(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values - expected).abs().max() / expected.abs().max())


def state_of(host: Any) -> dict[str, Any]:
    """All that a step goes by, but for the plan."""
    kept = {f"weight {name}": weight for name, weight in host.weights().items()}
    kept |= {f"gradient {i}": p.main_grad.clone() for i, p in enumerate(host.model.parameters())}
    kept |= {f"bias {layer}": bias for layer, bias in host.expert_biases().items()}
    kept |= {f"buffer {name}": buffer.clone() for name, buffer in host.model.named_buffers()}
    training = torch.tensor([module.training for module in host.ddp.modules()])
    return kept | {"random": torch.get_rng_state(), "training": training}


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def _twice(add: Any, collector: Any, values: Any, pack: Any) -> None:
    for _ in range(1 + any(s.start for s in pack.slices)):
        add(collector, values, pack)


FAULTS = {"a slice counted twice": lambda: around(scoring.LossCollector, "add", _twice)}
