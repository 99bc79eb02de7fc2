"""What the ranks of a test world run: every function here is a case of test_engine.py or test_checkpoint.py."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed import open_host
from evenload.integrations.deepspeed.engine import engine as engine_module
from evenload.integrations.deepspeed.engine import stage as stage_module
from evenload.integrations.deepspeed.plain import reference, relative_error
from evenload.runtime.attention.labels import count_targets
from evenload.runtime.world.world import init_world
from evenload.training.proof.masking import half_masked
from evenload.training.proof.weighing import drawn_weights

LENGTHS = (40, 9, 13, 22, 5, 17)
TOKENS = [np.random.default_rng(i).integers(0, 97, n) for i, n in enumerate(LENGTHS)]
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 97}


def tokens_of(index: int) -> Any:
    return TOKENS[index]


def recipe(stage: int, **more: Any) -> Any:
    train = {"dtype": more.pop("dtype", "fp32"), "clip_grad": more.pop("clip_grad", 0.0), "weight_decay": 0.1}
    model = {**MODEL, **more.pop("model", {})}
    return recipes.parse(
        {"trainer": "deepspeed", "model": model, "train": train, "deepspeed": {"zero_stage": stage, **more}}
    )


def plan_of(packs: list[tuple[int, ...]], ranks: list[int], size: int, pad: bool = False, order: str = "") -> StepPlan:
    """Sequences ``packs[k]`` on rank ``ranks[k]``; `order` "FB" runs all forwards first."""
    micro_batches = tuple(
        MicroBatch(tuple(Slice(i, 0, LENGTHS[i]) for i in ids), (rank,), max(LENGTHS[i] for i in ids) if pad else 0)
        for ids, rank in zip(packs, ranks, strict=True)
    )
    passes = tuple(Op(kind, i) for kind in order for i in range(len(packs)))  # type: ignore[arg-type]
    batch = as_lengths(LENGTHS)
    return check(StepPlan(batch, micro_batches, Limits(size, 64), order=(passes,) if passes else ()))


PLANS = {
    "unequal counts": lambda: plan_of([(0, 1), (2,), (3,), (4, 5)], [0, 1, 1, 1], 2),
    "padded": lambda: plan_of([(1, 5), (2, 3), (0,), (4,)], [0, 1, 0, 1], 2, pad=True),
    "idle rank": lambda: plan_of([(0, 1), (2, 3), (4, 5)], [0, 0, 0], 2),
    "forwards first": lambda: plan_of([(0,), (1, 2), (3,), (4, 5)], [0, 1, 0, 1], 2, order="FB"),
}


def exactness(stage: int, dtype: str = "fp32", family: str = "llama") -> dict[str, Any]:
    """Errors of every plan against the plain reference, and whether anything moved the weights."""
    groups = {"num_query_groups": 4} if family == "gpt" else {}
    made = recipe(stage, dtype=dtype, model={"family": family, **groups})
    host = open_host(made, init_world())
    before = host.weights()
    batch = as_lengths(LENGTHS)
    masked = half_masked(None, tokens_of, np.arange(len(LENGTHS)), batch, 0)
    weighed = (
        drawn_weights(None, tokens_of, batch, "sequence", [0]),
        drawn_weights(masked, tokens_of, batch, "token", [0]),
    )
    references = [(labels, *reference(made, host, tokens_of, batch, labels)) for labels in (None, masked, *weighed)]
    results = {}
    for (name, make), (labels, loss, wanted) in zip(PLANS.items(), cycle(references), strict=False):
        result, found = host.gradients(make(), tokens_of, labels)
        norm = float(torch.stack([g.double().norm() for g in wanted.values()]).norm())
        results[name] = {
            "loss": abs(result.loss / loss - 1),
            "grad": relative_error(found, wanted),
            "norm": abs(result.grad_norm - norm) / norm,
            "miscounted": result.num_targets - count_targets(batch, labels),
            "executed": result.executed,
            "busy": result.busy_s,
        }
    after = host.weights()
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    describe = host.describe()
    host.close()
    return {"plans": results, "moved": moved, "describe": describe}


def mutants(stage: int) -> dict[str, float]:
    """relative_error of deliberately broken runs; all must be far above rounding."""
    made = recipe(stage)
    host = open_host(made, init_world())
    _, wanted = reference(made, host, tokens_of, as_lengths(LENGTHS))
    good, build = PLANS["unequal counts"](), stage_module.build_pack

    def error(plan: StepPlan = good) -> float:
        return relative_error(host.gradients(plan, tokens_of)[1], wanted)

    def broken_pack(**changes: Any) -> Any:
        def build_broken(*args: Any, **more: Any) -> Any:
            pack = build(*args, **more)
            for key, change in changes.items():
                object.__setattr__(pack, key, change(getattr(pack, key)))
            return pack

        return build_broken

    def moved(borders: Any) -> Any:
        return (borders[0], *(b - 2 for b in borders[1:-1]), borders[-1]) if len(borders) > 2 else borders

    def dropped(labels_T: torch.Tensor) -> torch.Tensor:
        return torch.cat([labels_T.new_full((1,), -100), labels_T[1:]])

    errors = {"none": error()}
    for name, changes in {
        "moved border": {"segments": moved},
        "dropped token": {"labels_T": dropped},
        "restarted position": {"positions_T": lambda p: torch.arange(len(p)) // 2},
    }.items():
        stage_module.build_pack = broken_pack(**changes)
        errors[name] = error()
    stage_module.build_pack = build

    weighed = stage_module.PackStage._weighed
    stage_module.PackStage._weighed = lambda stage, *of_pack: weighed(stage, *of_pack) * 1.01  # type: ignore[method-assign]
    errors["wrong scale"] = error()
    stage_module.PackStage._weighed = weighed  # type: ignore[method-assign]

    if stage == 3:
        forwards_first = PLANS["forwards first"]()
        errors["none, forwards first"] = error(forwards_first)
        before_backward = engine_module.OneReduction.before_backward

        def without_clear(reduction: Any) -> None:
            host.engine.optimizer.clear_backward_seen_flag = lambda: None
            before_backward(reduction)
            del host.engine.optimizer.clear_backward_seen_flag

        engine_module.OneReduction.before_backward = without_clear  # type: ignore[method-assign]
        errors["flag not cleared"] = error(forwards_first)
        engine_module.OneReduction.before_backward = before_backward  # type: ignore[method-assign]
    labels = half_masked(None, tokens_of, np.arange(len(LENGTHS)), good.lengths, 0)
    with pytest.raises(EvenloadError, match="another number of targets"):
        host.train_step(good, tokens_of, lr=1e-2, labels=labels._replace(targets=labels.targets + 1))
    weights = drawn_weights(labels, tokens_of, good.lengths, "token", [0]).weights
    labels = labels._replace(weights=weights._replace(sums=weights.sums * np.nan))
    with pytest.raises(EvenloadError, match="add up to nothing that its loss can be divided by"):
        host.train_step(good, tokens_of, lr=1e-2, labels=labels)
    host.close()
    return errors


def training(stage: int, dtype: str, clip_grad: float, plan: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of four steps under one plan, with a learning rate that changes."""
    host = open_host(recipe(stage, dtype=dtype, clip_grad=clip_grad), init_world())
    marks: list[str] = []
    results = [host.train_step(PLANS[plan](), tokens_of, lr=lr, mark=marks.append) for lr in (1e-2, 2e-2, 5e-3, 1e-2)]
    host.close()
    assert marks[0].startswith("forward")
    assert marks[-1] == "update"
    return [(r.loss, r.grad_norm) for r in results]


def save_and_go_on(stage: int, dtype: str, folder: str) -> list[str]:
    world = init_world()
    host = open_host(recipe(stage, dtype=dtype, clip_grad=1.0), world)
    _steps(host, world.size, 1)
    host.save(Path(folder))
    losses = _steps(host, world.size, 2)
    host.close()
    return losses


def resume(stage: int, dtype: str, folder: str) -> list[str]:
    world = init_world()
    host = open_host(recipe(stage, dtype=dtype, clip_grad=1.0), world)
    host.load(Path(folder))
    losses = _steps(host, world.size, 2)
    host.close()
    return losses


def refused_loads(folder: str) -> list[str]:
    """Messages of loading nothing, and of loading another stage's checkpoint."""
    host = open_host(recipe(2), init_world())
    told = []
    for path in (Path(folder), Path(folder) / "missing"):
        try:
            host.load(path)
        except EvenloadError as error:
            told.append(str(error))
    host.close()
    return told


def refused_plans() -> list[str]:
    host = open_host(recipe(3), init_world())
    batch = as_lengths(LENGTHS)
    whole = tuple(MicroBatch((Slice(i, 0, n),), (i % 2,)) for i, n in enumerate(LENGTHS))
    both = tuple(Op(kind, i) for kind in ("F", "B") for i in range(len(whole)))  # type: ignore[arg-type]
    plans = [
        StepPlan(batch, whole, Limits(4, 64)),
        StepPlan(batch, (whole[0]._replace(ranks=(0, 1)), *whole[1:]), Limits(2, 64)),
        StepPlan(batch, whole, Limits(2, 64, num_stages=2), order=(both, both)),
    ]
    told = []
    for plan in plans:
        try:
            host.train_step(plan, tokens_of, lr=1e-3)
        except EvenloadError as error:
            told.append(str(error))
    host.close()
    return told


def _steps(host: Any, size: int, count: int) -> list[str]:
    packs = [(0, 1), (2, 3), (4,), (5,)]
    plan = plan_of(packs, [k % size for k in range(4)], size)
    return [host.train_step(plan, tokens_of, lr=1e-2).loss.hex() for _ in range(count)]


def misuse() -> dict[str, Any]:
    """A script's engine in one process, used as a script should not; messages of the errors, and what is left after."""
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
    from evenload.integrations.deepspeed.engine.engine import prepare_deepspeed
    from evenload.integrations.deepspeed.engine.model import build_model
    from evenload.integrations.deepspeed.unmodified import loop as unmodified
    from evenload.patches import deepspeed as patch
    from evenload.patches.ledger import Ledger

    prepare_deepspeed()
    init_world()
    ledger, told = Ledger(), {}

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        (row,) = rows
        return {"input_ids": row[None], "labels": row[None]}

    def make(section: Any, collate_fn: Any = collate, **more: Any) -> Any:
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, **more, "evenload": section}
        model = build_model(recipe(1), attn_implementation="sdpa")
        data = [torch.from_numpy(tokens) for tokens in TOKENS[:5]]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, _, loader, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, training_data=data, collate_fn=collate_fn
        )
        return engine, loader

    def errs(name: str, call: Any) -> None:
        try:
            call()
        except EvenloadError as error:
            told[name] = str(error)

    section = {"packing": {"enabled": True, "max_tokens": 64}}
    with ledger:
        ledger.apply(patch.rows())
        errs("unknown key", lambda: make({"packin": {}}))
        errs("unmanaged", lambda: make(section, managed_gradient_accumulation=False))
        engine, loader = make(section, collate_fn=lambda rows: {"x": rows[0][None]})
        errs("other keys", lambda: next(iter(loader)))
        engine, loader = make({"packing": {"enabled": True, "max_tokens": 30}})
        errs("too long", lambda: list(loader))

        engine, loader = make(section)
        told["micro-batches"] = [len(loader), len(list(loader))]
        engine, loader = make({**section, "mesh": {"enabled": True}})
        told["with mesh"] = len(list(loader))
        engine, loader = make(section)
        batches = iter(loader)
        first = next(batches)
        errs("other tokens", lambda: engine(input_ids=first["input_ids"] + 1, labels=first["labels"]))
        loss = engine(first["input_ids"], labels=first["labels"]).loss
        errs("two forwards", lambda: engine(**next(batches)))
        errs("step without backward", lambda: engine.step())
        returned = engine.backward(loss)
        told["returned"] = [float(loss.detach()), float(returned)]
        engine.step()
        told["attention"] = [engine.module.config._attn_implementation]
    unmodified.release()
    told["attention"].append(engine.module.config._attn_implementation)
    errs("disabled inside an epoch", lambda: next(batches) and next(batches))
    told["stock again"] = type(iter(loader)).__name__
    told["methods"] = [type(vars(DeepSpeedEngine)[n]).__name__ for n in ("deepspeed_io", "forward", "backward", "step")]
    return told
