"""What the ranks of a test world run: every function here is a case of test_pipeline.py."""

from __future__ import annotations

import importlib.util
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.action import LETTERS
from evenload.core.plan.limits import Limits
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.recipe import recipe as recipes
from evenload.core.simulate.v_shape import merged
from evenload.integrations.deepspeed import open_host
from evenload.integrations.deepspeed.engine import stage as engine_stage
from evenload.integrations.deepspeed.engine.model import build_model
from evenload.integrations.deepspeed.pipeline import host as pipeline_host
from evenload.integrations.deepspeed.plain import plain_gradients, reference, relative_error
from evenload.runtime.attention.prefix import PrefixStore
from evenload.runtime.stage.deferred import WgradStore
from evenload.runtime.stage.executor import Executor
from evenload.runtime.stage.tape import Tape
from evenload.runtime.world.world import init_world
from evenload.training.proof.masking import half_masked
from evenload.training.proof.weighing import drawn_weights

for _file in ("random_plans", "shared_plans", "random_pipelines"):  # they know no trainer
    _path = Path(__file__).parent.parent / "megatron" / f"{_file}.py"
    if f"megatron_{_file}" not in sys.modules:
        _spec = importlib.util.spec_from_file_location(f"megatron_{_file}", _path)
        sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_spec.name])
random_plan = sys.modules["megatron_random_plans"].random_plan
random_pipeline = sys.modules["megatron_random_pipelines"].random_pipeline
random_shared_plan = sys.modules["megatron_shared_plans"].random_shared_plan

LENGTHS = (37, 5, 64, 2)
MODEL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 97}


def tokens_of(index: int) -> Any:
    return np.random.default_rng(index).integers(0, 97, LENGTHS[index])


def recipe(pp: int, stage: int, v_shape: bool = False, layers: Any = None, **more: Any) -> Any:
    own = {name: more.pop(name) for name in ("dtype", "clip_grad", "recompute") if name in more}
    train = {"clip_grad": 0.0, "weight_decay": 0.1, **own}
    model = {**MODEL, **({"num_query_groups": 4} if more.get("family") == "gpt" else {}), **more}
    return recipes.parse(
        {
            "trainer": "deepspeed",
            "model": model,
            "data": {"max_length": 64},
            "parallel": {"pp": pp, "layers": layers},
            "train": train,
            "deepspeed": {"zero_stage": stage},
            "plugins": {"pipeline": {"enabled": True, "v_shape": True}} if v_shape else {},
        }
    )


@contextmanager
def hosted(pp: int, stage: int, **more: Any) -> Iterator[Any]:
    host = open_host(recipe(pp, stage, **more), init_world())
    try:
        yield host
    finally:
        host.close()


def planned(host: Any, name: str) -> StepPlan:
    """`7`: a random plan; `7 W`: with weight gradients as passes; `7 shared`, `7 idle`, `7 recompute`; `whole`. In a V
    of stages: `7 drawn`, with W passes, recomputation and replays, or what is made of a plan without a merge."""
    seed, _, kind = name.partition(" ")
    layout = host.layout
    sizes = {
        "num_ranks": layout.dp,
        "num_stages": layout.num_stages,
        "layers_per_stage": max(layout.layers, default=host.recipe.model.num_layers // layout.num_stages),
        "layers": layout.layers,
    }
    if layout.v_shape and kind == "drawn":
        return random_pipeline(Random(seed), LENGTHS, v_shape=True, replay="some", **sizes)
    if seed == "whole":
        packs = [(0, 1), (2,), (3,)]
        micro_batches = tuple(
            MicroBatch(tuple(Slice(i, 0, LENGTHS[i]) for i in pack), (min(number, layout.dp - 1),))
            for number, pack in enumerate(packs)
        )
        limits = Limits(layout.dp, 1 << 20, layout.pp, sizes["layers_per_stage"], layers=layout.layers)
        return check(StepPlan(as_lengths(LENGTHS), micro_batches, limits))
    if kind == "shared":
        sizes.pop("layers")
        return random_shared_plan(int(seed), LENGTHS, heads=4, **sizes)
    own = {"idle": {"idle": (1,), "asymmetric": False}, "recompute": {"recompute": True, "asymmetric": False}}
    drawn: dict[str, Any] = own.get(kind, {})
    plan = random_plan(int(seed), LENGTHS, **sizes, **drawn)
    if layout.v_shape:
        return check(merged(replace(plan, limits=replace(plan.limits, v_shape=True))))
    return with_weights(plan, np.random.default_rng(int(seed))) if kind == "W" else plan


def with_weights(plan: StepPlan, draw: np.random.Generator) -> StepPlan:
    """Some backwards of each stage leave their weight gradients to a pass somewhere behind them."""
    order = []
    for ops in plan.order:
        row = list(ops)
        for op in [op for op in row if op.kind == "B" and draw.random() < 0.6]:
            place = int(draw.integers(row.index(op) + 1, len(row) + 1))
            row.insert(place, Op("W", op.micro_batch))
        order.append(tuple(row))
    return check(replace(plan, order=tuple(order), limits=replace(plan.limits, splits_backward=True)))


def exactness(pp: int, stage: int, names: list[str], **more: Any) -> dict[str, Any]:
    """Errors of every plan against the plain reference, and what the rank ran."""
    found = {}
    with hosted(pp, stage, **more) as host:
        batch = as_lengths(LENGTHS)
        masked = half_masked(None, tokens_of, np.arange(len(LENGTHS)), batch, 0)
        weighed = (
            drawn_weights(None, tokens_of, batch, "sequence", [0]),
            drawn_weights(masked, tokens_of, batch, "token", [0]),
        )
        every = None, masked, *weighed
        references = [(labels, *reference(host.recipe, host, tokens_of, batch, labels)) for labels in every]
        before = host.weights()
        for name, (labels, loss, wanted) in zip(names, cycle(references), strict=False):
            plan = planned(host, name)
            norm = float(torch.stack([g.double().norm() for g in wanted.values()]).norm())
            result, gradients = host.gradients(plan, tokens_of, labels)
            mine = [tuple(s) for j in plan.of_rank(host.dp_cp_rank, "B") for s in plan.passes("B")[j].slices]
            found[name] = {
                "loss": abs(result.loss / loss - 1),
                "grad": relative_error(gradients, {n: wanted[n] for n in gradients}),
                "norm": abs(result.grad_norm - norm) / norm,
                "executed": plan.shared or sorted(map(tuple, result.executed)) == sorted(mine),
                "names": sorted(gradients),
            }
        after = host.weights()
        found["moved"] = max(float((after[name] - before[name]).abs().max()) for name in before)
        found["all"] = sorted(wanted)
        found["parameters"] = host.describe()["parameters"], sum(weight.numel() for weight in after.values())
    return found


def trained(pp: int, stage: int, names: list[str], unmarked: bool = False, **more: Any) -> dict[str, Any]:
    """Two clipped optimizer steps, and the same with plain torch: losses, norms, how far the weights are apart.

    Args:
        unmarked: parameters do not say that other stages have others.
    """
    with hosted(pp, stage, clip_grad=0.5, **more) as host:
        for parameter in host.module.parameters() if unmarked else ():
            parameter.model_parallel = False
        start, model = host.weights(), build_model(host.recipe, attn_implementation="sdpa")
        model.load_state_dict(start)
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
        )
        told: dict[str, Any] = {"loss": [], "norm": [], "passes": [], "marks": []}
        for name in names:
            loss, _ = plain_gradients(model, tokens_of, as_lengths(LENGTHS))
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            plan, marks = planned(host, name), []
            result = host.train_step(plan, tokens_of, lr=1e-2, mark=marks.append, record=True)
            told["loss"].append(abs(result.loss - loss) / loss)
            told["norm"].append(abs(result.grad_norm - norm) / norm)
            told["passes"].append((passes_here(host, plan), [(s.kind, s.micro_batch) for s in result.spans]))
            told["marks"].append(marks)
            told["clipped"] = norm > 0.5
        weights = host.weights()
        plain = dict(model.named_parameters())
        told["apart"] = max(
            float((weights[name] - plain[name].detach()).norm() / (plain[name].detach() - start[name]).norm())
            for name in weights
        )
        return told


def passes_here(host: Any, plan: StepPlan) -> list[tuple[str, int]]:
    """(kind, number) of the passes that this rank runs of a plan, as spans have them, in order."""
    program = lower(plan, host.pipeline_stage, host.dp_cp_rank)
    return [(LETTERS[action.kind].upper(), action.op.micro_batch) for action in program if action.computes]


def memory(pp: int) -> dict[str, Any]:
    """Bytes that the forward of one micro-batch keeps, by the number of layers that its plan recomputes."""
    kept = {}
    lengths = (64,)
    with hosted(pp, 1) as host:
        limits = Limits(1, 1 << 20, num_stages=pp, layers_per_stage=4 // pp)
        order = ((Op("F", 0), Op("B", 0)),) * pp
        run = Executor._backward
        for layers in range(4 // pp + 1):
            saved: dict[int, int] = {}

            def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
                storage = tensor.untyped_storage()
                saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            plan = check(
                StepPlan(
                    as_lengths(lengths),
                    (MicroBatch((Slice(0, 0, 64),), (0,)),),
                    limits,
                    order,
                    recompute=((layers,),) * pp,
                )
            )

            def forward_alone(stage: Any, action: Any, saved: dict[int, int] = saved, layers: int = layers) -> None:
                kept[layers] = sum(saved.values())
                run(stage, action)

            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with patch.object(Executor, "_backward", forward_alone), hooks:
                host.gradients(plan, lambda _: np.arange(64) % 97)
    return kept


def alive_after_sending(pp: int) -> int:
    """Stage outputs whose memory is still taken when the first backward begins, of two that were sent."""
    outputs: list[Any] = []
    alive: list[int] = []
    send, run = Executor._send, Executor._backward

    def sending(stage: Any, action: Any) -> None:
        if action.op.kind == "F":
            outputs.append(weakref.ref(stage._result.untyped_storage()))
        send(stage, action)

    def backward(stage: Any, action: Any) -> None:
        alive.append(sum(output() is not None for output in outputs))
        run(stage, action)

    with hosted(pp, 1) as host:
        limits = Limits(1, 1 << 20, num_stages=pp, layers_per_stage=4 // pp)
        order = (tuple(Op(kind, i) for kind in ("F", "B") for i in range(2)),) * pp  # type: ignore[arg-type]
        micro_batches = tuple(MicroBatch((Slice(i, 0, 16),), (0,)) for i in range(2))
        plan = check(StepPlan(as_lengths((16, 16)), micro_batches, limits, order))
        with patch.object(Executor, "_send", sending), patch.object(Executor, "_backward", backward):
            host.gradients(plan, lambda _: np.arange(16))
    return alive[0]


def save_and_go_on(pp: int, stage: int, folder: str, dtype: str, **more: Any) -> list[str]:
    with hosted(pp, stage, clip_grad=1.0, dtype=dtype, **more) as host:
        _steps(host, 1)
        host.save(Path(folder))
        return _steps(host, 2)


def resume(pp: int, stage: int, folder: str, dtype: str, **more: Any) -> list[str]:
    with hosted(pp, stage, clip_grad=1.0, dtype=dtype, **more) as host:
        try:
            host.load(Path(folder))
        except EvenloadError as error:
            return [str(error)]
        return _steps(host, 2)


def _steps(host: Any, count: int) -> list[str]:
    """Losses of some steps, in full."""
    return [host.train_step(planned(host, str(seed)), tokens_of, lr=1e-2).loss.hex() for seed in range(count)]


def mutants(pp: int) -> dict[str, Any]:
    """(loss error, gradient error) of deliberately broken runs, or what was raised; and of sound ones."""
    with hosted(pp, 1) as host:
        cut = planned(host, "1 W")
        replayed = random_plan(
            5, LENGTHS, num_ranks=host.layout.dp, num_stages=pp, layers_per_stage=4 // pp, replay="all"
        )
        loss, wanted = reference(host.recipe, host, tokens_of, as_lengths(LENGTHS))

        def errors(plan: StepPlan = cut) -> Any:
            try:
                result, gradients = host.gradients(plan, tokens_of)
            except EvenloadError as error:
                return error.what
            error = relative_error(gradients, {n: wanted[n] for n in gradients})
            everyone = torch.tensor(error, dtype=torch.float64)
            dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
            return abs(result.loss - loss) / loss, float(everyone)

        found = {"sound": errors(), "sound replay": errors(replayed)}
        for name, place, attribute, broken, plan in (
            ("dKV dropped", PrefixStore, "settle", _settle_own_only, cut),
            ("position restart", engine_stage, "build_pack", _positions_from_zero, cut),
            ("W of nothing", WgradStore, "run", _zeros, cut),
            ("tape shifted", Tape, "gather", _shifted, replayed),
            ("loss per micro-batch", engine_stage, "token_losses", _mean, cut),
        ):
            stock = getattr(place, attribute)

            def faulty(*args: Any, stock: Any = stock, broken: Any = broken, **kwargs: Any) -> Any:
                return broken(stock, *args, **kwargs)

            with patch.object(place, attribute, faulty):
                found[name] = errors(plan)
        found["sound again"] = errors()
        found |= _crossed(host)
        return found


def _crossed(host: Any) -> dict[str, Any]:
    """Two forwards of one length and then their backwards, the last stage with the loss of the other one."""

    def tokens(index: int) -> Any:
        return np.random.default_rng(index + 50).integers(0, 97, 16)

    limits = Limits(1, 1 << 20, num_stages=2, layers_per_stage=2)
    micro_batches = tuple(MicroBatch((Slice(i, 0, 16),), (0,)) for i in range(2))
    order = (tuple(Op(kind, i) for kind in ("F", "B") for i in range(2)),) * 2  # type: ignore[arg-type]
    plan = check(StepPlan(as_lengths((16, 16)), micro_batches, limits, order))
    _, wanted = reference(host.recipe, host, tokens, plan.lengths)
    wanted = {n: g for n, g in wanted.items() if n in host.module.global_parameters()}

    def error() -> tuple[float, float]:
        error = torch.tensor(relative_error(host.gradients(plan, tokens)[1], wanted), dtype=torch.float64)
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        return 0.0, float(error)

    def crossed(action: Any) -> Any:
        return action._replace(graph=1 - action.graph) if action.kind == "forward" else action

    def other(*place: Any) -> Any:
        program = lower(*place)
        return tuple(map(crossed, program)) if host.pipeline_stage == 1 else program

    found = {"sound, two forwards first": error()}
    with patch.object(pipeline_host, "lower", other):
        found["losses crossed"] = error()
    return found


def _settle_own_only(settle: Any, store: Any, layer: int, piece: Any, dk: Any, dv: Any) -> Any:
    own = dk[piece.start :].clone(), dv[piece.start :].clone()
    settle(store, layer, piece, dk, dv)
    return own


def _positions_from_zero(build_pack: Any, micro_batch: Any, *args: Any, **more: Any) -> Any:
    pack = build_pack(micro_batch, *args, **more)
    starts = torch.tensor([s.start for s in micro_batch.slices for _ in range(s.length)] or [0])
    return replace(pack, positions_T=pack.positions_T - starts)


def _zeros(run: Any, later: Any, number: int) -> None:
    later._left[number] = [item._replace(dy=torch.zeros_like(item.dy)) for item in later._left[number]]
    run(later, number)


def _shifted(gather: Any, tape: Any, slices: Any, segments: Any, like: Any, **named: Any) -> Any:
    return like.copy_(gather(tape, slices, segments, like, **named).roll(1, 0))


def _mean(losses: Any, logits: Any, pack: Any, **named: Any) -> Any:
    return losses(logits, pack, **named) / max(1, pack.num_targets)


def refused(pp: int) -> dict[str, str]:
    """Messages of plans of another layout, and of what is not there to load."""
    told = {}
    with hosted(pp, 1) as host:
        foreign = replace(planned(host, "1"), limits=Limits(host.layout.dp + 1, 1 << 20, num_stages=pp))
        flat = replace(planned(host, "whole"), limits=Limits(host.layout.dp, 1 << 20))
        for name, call in (
            ("ranks", lambda: host.gradients(foreign, tokens_of)),
            ("stages", lambda: host.gradients(flat, tokens_of)),
            ("load", lambda: host.load(Path("/nonexistent"))),
        ):
            try:
                call()
                told[name] = "no error"
            except EvenloadError as error:
                told[name] = str(error)
        host.module.blocks[0].mlp.act_fn = torch.nn.Dropout(0.1)
        try:
            host.gradients(
                random_plan(5, LENGTHS, num_ranks=host.layout.dp, num_stages=pp, layers_per_stage=2, replay="all"),
                tokens_of,
            )
        except EvenloadError as error:
            told["dropout"] = str(error)
    return told
