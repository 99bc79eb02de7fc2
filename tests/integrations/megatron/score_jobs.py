"""What the ranks of test_score.py do: plans that run forward only, against whole sequences one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from evenload.core.plan.step_plan import as_lengths
from evenload.integrations.host import scoring
from evenload.integrations.megatron import PlainModel
from evenload.runtime.attention.labels import Labels
from evenload.runtime.attention.pack import IGNORE
from evenload.training.proof.weighing import drawn_weights
from harness.proof import LENGTHS, planned, tokens
from harness.proof.faults import around
from megatron_tests.expert_jobs import small
from megatron_tests.jobs import hosted
from megatron_tests.telling import planted

Plain = dict[int, tuple[torch.Tensor, np.ndarray]]


def scored(world: Any, *, plans: list[str | int], mutant: str = "", experts: bool = False, **changes: Any) -> Any:
    """Of each plan the largest errors of losses and logits against plain forwards, with half of all tokens masked the
    second time, and whether anything that training goes by has changed."""
    rows = []
    with hosted(world, **(small(**changes) if experts else changes)) as host:
        data, labels = tokens(), _masked()
        expected, vectors = _one_by_one(host, data)
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
                    "losses": _errors(whole, expected, None),
                    "masked": max(_errors(one, expected, labels) for one in (masked, pointed)),
                    "vectors": _off_in_vectors(pointed.vectors, vectors),
                    "logits": max((_off(logits[i], expected[i][0]) for i in logits), default=0.0),
                    "num_logits": len(logits),
                    "tokens": max((_off_by_token(by_token[i], i, expected, labels) for i in by_token), default=0.0),
                    "num_tokens": len(by_token),
                    "loss": whole.loss,
                }
            )
        changed = differing(before, state_of(host))
        how: Any = {"lr": 0.0, "labels": labels._replace(reference=_reference)}
        host.scores_steps = True
        with planted(FAULTS, mutant):
            steps = [host.train_step(planned(host, which), data, **how) for which in plans]
        trained = [_errors(step.scores, expected, labels) for step in steps]
        sums = [abs(step.scores.loss - step.loss) for step in steps]
        excess = [_off_in_excess(step.scores, expected, labels) for step in steps]
        return {"plans": rows, "changed": changed, "trained": trained, "sums": sums, "excess": excess}


def _masked() -> Labels:
    """Every second token carries loss, with a weight of its own, and of the last sequence none."""
    last, data = len(LENGTHS) - 1, tokens()

    def of(index: int) -> np.ndarray:
        return np.where((np.arange(LENGTHS[index]) % 2 == 1) & (index < last), data(index), IGNORE)

    targets = np.array([int((of(i)[1:] != IGNORE).sum()) for i in range(len(LENGTHS))])
    return drawn_weights(Labels(of, targets), data, as_lengths(LENGTHS), "token", [0])


@torch.no_grad()
def _one_by_one(host: Any, data: Any) -> tuple[Plain, dict[int, np.ndarray]]:
    """Of whole sequences in stock layers, each in a batch of its own: logits and token losses, and the sum of each
    token's place, from 1, times what the output layer gets."""
    plain, rows, vectors, seen = PlainModel(host.recipe, host), {}, {}, list[torch.Tensor]()
    hook = plain._model.output_layer.register_forward_pre_hook(lambda _, given: seen.append(given[0][:, 0]))
    plain.routers.begin(np.array(LENGTHS))
    for number, length in enumerate(LENGTHS):
        ids, mask = torch.from_numpy(data(number))[None], torch.ones(length, length, dtype=torch.bool).triu(1)
        call = ids, torch.arange(length)[None], mask[None, None]
        plain.routers.run(number)
        logits = plain._model(*call, runtime_gather_output=True)
        vectors[number] = sum((place + 1) * row for place, row in enumerate(seen.pop().double().cpu().numpy()))
        # Megatron's own loss is float32 inside, on both sides.
        rows[number] = logits[0], plain._model(*call, labels=ids.roll(-1))[0, :-1].double().numpy()
        seen.clear()
    hook.remove()
    plain.close()
    return rows, vectors


def _off_in_vectors(own: np.ndarray, expected: dict[int, np.ndarray]) -> float:
    return max(float(np.linalg.norm(own[i] - row) / np.linalg.norm(row)) for i, row in expected.items())


def _errors(scores: Any, expected: Plain, labels: Labels | None) -> float:
    """The largest relative error of a sequence's loss, and of that of all; infinite where its targets are others."""
    worst, total, divisor = 0.0, 0.0, 0.0
    for number, (_, losses) in expected.items():
        counts = labels.of(number)[1:] != IGNORE if labels else np.ones(len(losses), dtype=bool)
        if int(scores.targets[number]) != int(counts.sum()):
            return float("inf")
        weights = counts * (labels.weights.of(number)[1:] if labels and labels.weights else 1.0)
        wanted = float((losses * weights).sum())
        worst = max(worst, abs(wanted - float(scores.losses[number])) / max(1.0, abs(wanted)))
        total, divisor = total + wanted, divisor + float(weights.sum())
    return max(worst, abs(scores.loss * divisor / total - 1))


def _reference(index: int) -> np.ndarray:
    """Losses of the tokens of a sequence by another model: about half of them are exceeded."""
    return 5.5 + np.random.default_rng(index).normal(size=LENGTHS[index])


def _off_in_excess(scores: Any, expected: Plain, labels: Labels) -> float:
    """The largest relative error of what a sequence's token losses exceed those of a reference by."""
    worst = 0.0
    for number, (_, losses) in expected.items():
        counts = (labels.of(number)[1:] != IGNORE) * labels.weights.of(number)[1:]
        wanted = float((counts * np.maximum(losses - _reference(number)[1:], 0.0)).sum())
        worst = max(worst, abs(wanted - float(scores.excess[number])) / max(1.0, abs(wanted)))
    return worst


def _off_by_token(own: torch.Tensor, number: int, expected: Plain, labels: Labels) -> float:
    """The largest error of a token's loss, the first token's among them, which has none."""
    losses = np.append(0.0, np.where(labels.of(number)[1:] != IGNORE, expected[number][1], 0.0))
    return float(np.abs(own.double().numpy() - losses).max())


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
