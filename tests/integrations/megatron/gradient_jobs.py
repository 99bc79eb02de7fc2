"""What the ranks of test_gradients.py do: gradients of samples from packs, against one backward a sample."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import torch
from evenload.api import load_plugins
from evenload.core.plan.step_plan import as_lengths
from evenload.core.policies import Pool, chosen_policy, started, stepped
from evenload.core.recipe.adapter import Adapter, TenantTrain
from evenload.core.registry import data_policies
from evenload.integrations.host.gradients import GradientSettings, PlannedSamples
from evenload.integrations.megatron import PlainModel
from evenload.integrations.reference.textbook import AdamW
from evenload.integrations.reference.textbook_adapter import Alone
from evenload.plugins.data.draws import mixed
from evenload.runtime.adapters.places import AdapterState, Place, drawn
from evenload.runtime.attention.labels import part_of
from harness.proof import LENGTHS, labels_in_turn, planned, tokens
from megatron_tests.jobs import hosted
from megatron_tests.score_jobs import differing, state_of
from megatron_tests.telling import told

COLUMNS, SEED = 100, 5
ADAPTER = Adapter(r=4, lora_alpha=8, lora_dropout=0.3, rank_pattern={"down_proj": 6})
TRAIN = TenantTrain(seed=11, betas=(0.8, 0.99), eps=1e-7)


@functools.cache
def signs(name: str, elements: int) -> np.ndarray:
    """Of a whole parameter [elements, columns], by the equation."""
    key = np.frombuffer(hashlib.blake2b(f"{SEED} {name}".encode(), digest_size=8).digest(), np.uint64)
    columns = np.arange(COLUMNS, dtype=np.uint64)
    words = mixed(mixed(np.arange(elements, dtype=np.uint64) ^ key)[:, None] ^ mixed(columns // np.uint64(64))[None])
    return 1.0 - 2.0 * (words >> columns % np.uint64(64) & np.uint64(1))


def projected(gradients: dict[str, torch.Tensor]) -> np.ndarray:
    rows = [g.double().numpy().ravel() @ signs(name, g.numel()) for name, g in gradients.items()]
    return np.sum(rows, axis=0) / np.sqrt(COLUMNS)


def _states(plain: Any, base: Any) -> tuple[AdapterState, AdapterState]:
    """Fresh matrices, and ones that have been trained, with moments."""
    shapes = {n: tuple(w.shape) for n, w in plain.of_linears(base).items() if ".layers." in n}
    fresh, trained, first, second = ({} for _ in range(4))
    draw = torch.Generator().manual_seed(2)
    for name in sorted(shapes):
        outputs, inputs = shapes[name]
        place = Place(name, outputs, inputs, (0, outputs), (0, inputs))
        for kind in ("lora_A", "lora_B"):
            key, rank = f"{name}.{kind}", ADAPTER.rank_of(name)
            fresh[key] = drawn(place, kind, rank, TRAIN.seed).double()
            shape = place.whole_shape(kind, rank)
            trained[key], first[key] = (0.1 * torch.randn(shape, generator=draw, dtype=torch.float64) for _ in "WM")
            second[key] = torch.rand(shape, generator=draw, dtype=torch.float64) * 1e-3
    return AdapterState(fresh, {}, {}, 0), AdapterState(trained, first, second, 3)


def _alone(plain: Any, base: Any, state: AdapterState, data: Any, lengths: Any, labels: Any) -> list[Any]:
    """Whole gradients of each sample, from a backward of it alone."""
    one = Alone(plain, base, ADAPTER, AdamW.of(state.weights, TRAIN))
    rows = []
    for n in range(len(lengths)):
        own = part_of(labels, [n])
        gradients = one.gradients(lambda _, n=n: data(n), lengths[[n]], own)[1]
        rows.append({name: g.nan_to_num() if own and not own.targets.any() else g for name, g in gradients.items()})
    return rows


def _direction_of_adam(gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    first, second = TRAIN.betas
    return (first * mean + (1 - first) * gradient) / ((second * square + (1 - second) * gradient**2).sqrt() + TRAIN.eps)


def _off(rows: np.ndarray, expected: np.ndarray) -> float:
    """The largest relative difference of a row; a sample without a target has a row of zeros."""
    norms = np.linalg.norm(expected, axis=1)
    return float((np.linalg.norm(rows - expected, axis=1) / np.where(norms > 0, norms, 1e-12)).max())


def by_sample(world: Any, *, plans: list[str | int], **changes: Any) -> dict[str, Any]:
    """Errors of each plan's rows, fresh and trained, plain and by Adam; of products along a direction by both ways; and
    what has changed of the host."""
    out: dict[str, Any] = {"rows": [], "changed": [], "refused": ""}
    with hosted(world, **changes) as host:
        data, lengths = tokens(), np.array(LENGTHS)
        host.train_step(planned(host, "packs"), data, lr=1e-3)
        host.gradients(planned(host, "packs"), data)
        base, plain = host.weights(), PlainModel(host.recipe, host)
        states = _states(plain, base)
        before = {**state_of(host), **_moments(host)}
        for turn, which in enumerate(plans):
            labels, plan = labels_in_turn(turn + 2, LENGTHS), planned(host, which)
            labels = labels._replace(weights=labels.weights._replace(divisor=None))  # rows are means of their samples
            for state in states if turn == 0 else states[:1]:
                row = _errors(host, state, PlannedSamples(plan, data, labels), plain, base, lengths)
                out["rows"].append({"plan": which, "steps": state.steps, **row})
        plain.close()
        out["changed"] = differing(before, {**state_of(host), **_moments(host)})
        scores = host.gradient_scores(GradientSettings(Adapter(target_modules=("nothing",))))
        out["refused"] = told(lambda: None, scores)
    return out


def _errors(host: Any, state: AdapterState, samples: PlannedSamples, plain: Any, base: Any, lengths: Any) -> Any:
    whole = _alone(plain, base, state, samples.tokens_of, lengths, samples.labels)
    fresh = not state.steps
    settings = GradientSettings(ADAPTER, COLUMNS, SEED, state=None if fresh else state, train=TRAIN)
    with host.gradient_scores(settings) as scores:
        rows, losses = scores.projected(samples)
        adam = None if fresh else scores.projected(samples, adam=True)[0]
        direction = scores.direction([samples])
        backward = scores.along(direction, [samples], "backward")
        forwards = scores.along(direction, [samples], "forwards") if fresh else None
    flat = np.array([np.concatenate([g.double().numpy().ravel() for g in one.values()]) for one in whole])
    norms = np.linalg.norm(flat, axis=1)
    mean = (flat / np.where(norms > 0, norms, 1.0)[:, None]).mean(axis=0)
    errors = {"rows": _off(rows, np.array([projected(one) for one in whole]))}
    if adam is not None and (norms > 0).all():  # moments alone turn a sample without a target
        turned = [
            {n: _direction_of_adam(g.double(), state.first[n], state.second[n]) for n, g in one.items()}
            for one in whole
        ]
        errors["adam"] = _off(adam, np.array([projected(one) for one in turned]))
    wanted = flat @ mean
    errors["backward"] = float(np.linalg.norm(backward.products - wanted) / np.linalg.norm(wanted))
    if forwards:
        errors["forwards"] = float(np.linalg.norm(forwards.products - wanted) / np.linalg.norm(wanted))
    scored = host.score(samples.plan, samples.tokens_of, labels=samples.labels)
    errors["losses"] = float(np.abs(losses.losses - scored.losses).max()) if fresh else 0.0
    return errors


def selected(world: Any, **changes: Any) -> dict[str, Any]:
    """What `less` takes of a pool in which every third sample has the few tokens that those of the validation have."""
    load_plugins()
    chosen = chosen_policy("select", "less", {}, data_policies("select"))
    count, generator = 24, np.random.default_rng(8)
    lengths = as_lengths(generator.integers(12, 40, count))

    def tokens_of(number: int) -> np.ndarray:
        return np.random.default_rng(number).integers(*((0, 8) if number % 3 == 0 else (8, 96)), 40)

    with hosted(world, **changes) as host:
        parts = [np.arange(count)[turn::2] for turn in range(2)]
        batches = [
            PlannedSamples(
                planned(host, (0, 11)[turn], tuple(lengths[own].tolist())),
                lambda i, own=own: tokens_of(int(own[i]))[: lengths[own[i]]],
            )
            for turn, own in enumerate(parts)
        ]
        wanted = (30, 25, 38)
        held_out = PlannedSamples(planned(host, 4, wanted), lambda i: tokens_of(300 + 3 * i)[: wanted[i]])
        with host.gradient_scores(GradientSettings(ADAPTER, 512)) as scores:
            rows, queries = scores.of_pool(batches), scores.of_pool([held_out])
            along = scores.along(scores.direction([held_out]), batches)
        pool = Pool(np.concatenate(parts), 8, seed=1, gradients=rows, query_gradients=queries)
        state, last = started(chosen, pool)
        _, numbers = stepped(chosen, state, pool, last)
        best = pool.numbers[np.argsort(-along.products)[:8]]
        return {"taken": sorted(numbers.tolist()), "along": sorted(best.tolist()), "way": along.method}


def ways(world: Any, **changes: Any) -> dict[str, Any]:
    """Products of four batches with a direction, where both ways are tried, and by each."""
    with hosted(world, **changes) as host:
        plans = ("packs", 5, "whole", 2)
        batches = [PlannedSamples(planned(host, which), tokens(seed=turn)) for turn, which in enumerate(plans)]
        with host.gradient_scores(GradientSettings(ADAPTER, COLUMNS)) as scores:
            direction = scores.direction(batches[:1])
            each = [scores.along(direction, batches, method) for method in (None, "backward", "forwards")]
    cheaper, backward, forwards = each
    norm = np.linalg.norm(backward.products)
    return {
        "way": cheaper.method,
        "seconds": cheaper.seconds,
        "cheaper": float(np.linalg.norm(cheaper.products - backward.products) / norm),
        "forwards": float(np.linalg.norm(forwards.products - backward.products) / norm),
        "ranks": float(np.corrcoef(forwards.products.argsort().argsort(), backward.products.argsort().argsort())[0, 1]),
        "differs": forwards.differs,
        "number": len(cheaper.products),
    }


def _moments(host: Any) -> dict[str, torch.Tensor]:
    return {f"{n} {i}": t for n, state in host.trained.optimizer_states().items() for i, t in enumerate(state)}
