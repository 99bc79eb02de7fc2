"""What ranks do with DeepSpeed's pipelines; what they share with other hosts is in jobs.py."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from deepspeed_tests.jobs import hosted, told
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.integrations.deepspeed.engine.model import build_model
from evenload.integrations.deepspeed.pipeline import host as pipeline_host
from evenload.integrations.deepspeed.plain import plain_gradients, reference, relative_error
from evenload.runtime.stage.executor import Executor
from harness.proof import LENGTHS, planned, tokens


def beside_plain_torch(stage: int, unmarked: bool = False, **more: Any) -> dict[str, Any]:
    """Clipped optimizer steps, and the same with plain torch: losses, norms, how far the weights are apart.

    Args:
        unmarked: parameters do not say that other stages have others.
    """
    with hosted(stage, pp=2, clip_grad=0.5, **more) as host:
        for parameter in host.module.parameters() if unmarked else ():
            parameter.model_parallel = False
        start, model = host.weights(), build_model(host.recipe, attn_implementation="sdpa")
        model.load_state_dict(start)
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
        )
        said: dict[str, Any] = {"loss": [], "norm": []}
        for name in ("pipeline 3", "2"):
            loss, _ = plain_gradients(model, tokens(), as_lengths(LENGTHS))
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            result = host.train_step(planned(host, name), tokens(), lr=1e-2)
            said["loss"].append(abs(result.loss - loss) / loss)
            said["norm"].append(abs(result.grad_norm - norm) / norm)
            said["clipped"] = norm > 0.5
        weights = host.weights()
        plain = {name: p.detach() for name, p in model.named_parameters()}
        apart = [(weights[name] - p).norm() / (p - start[name]).norm() for name, p in plain.items()]
        return {**said, "apart": float(max(apart))}


def _alone(host: Any, length: int, recompute: int = 0, count: int = 1) -> StepPlan:
    """Some sequences of a length, a micro-batch each: all forwards, then all backwards."""
    limits = Limits(1, 1 << 20, num_stages=2, layers_per_stage=2)
    micro_batches = tuple(MicroBatch((Slice(i, 0, length),), (0,)) for i in range(count))
    order = (tuple(Op(kind, i) for kind in ("F", "B") for i in range(count)),) * 2  # type: ignore[arg-type]
    rows = ((recompute,) * count,) * 2
    return check(StepPlan(as_lengths([length] * count), micro_batches, limits, order, recompute=rows))


def memory() -> dict[int, int]:
    """Bytes that the forward of one micro-batch keeps, by the number of layers that its plan recomputes."""
    kept = {}
    with hosted(1, pp=2) as host:
        run = Executor._backward
        for layers in range(3):
            saved: dict[int, int] = {}

            def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
                storage = tensor.untyped_storage()
                saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            def forward_alone(stage: Any, action: Any, saved: dict[int, int] = saved, layers: int = layers) -> None:
                kept[layers] = sum(saved.values())
                run(stage, action)

            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with patch.object(Executor, "_backward", forward_alone), hooks:
                host.gradients(_alone(host, 64, recompute=layers), lambda _: np.arange(64))
    return kept


def alive_after_sending() -> int:
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

    with (
        hosted(1, pp=2) as host,
        patch.object(Executor, "_send", sending),
        patch.object(Executor, "_backward", backward),
    ):
        host.gradients(_alone(host, 16, count=2), lambda _: np.arange(16))
    return alive[0]


def crossed_losses() -> dict[str, float]:
    """Errors of two forwards of one length and then their backwards; and of the same, the last stage with the loss of
    the other one."""
    with hosted(1, pp=2) as host:
        plan = _alone(host, 16, count=2)
        data = tokens((16, 16))
        _, wanted = reference(host.recipe, host, data, plan.lengths)
        wanted = {n: g for n, g in wanted.items() if n in host.module.global_parameters()}

        def error() -> float:
            error = torch.tensor(relative_error(host.gradients(plan, data)[1], wanted), dtype=torch.float64)
            dist.all_reduce(error, op=dist.ReduceOp.MAX)
            return float(error)

        def crossed(action: Any) -> Any:
            return action._replace(graph=1 - action.graph) if action.kind == "forward" else action

        def other(*place: Any) -> Any:
            program = lower(*place)
            return tuple(map(crossed, program)) if host.pipeline_stage == 1 else program

        sound = error()
        with patch.object(pipeline_host, "lower", other):
            return {"sound": sound, "crossed": error()}


def refused() -> dict[str, str]:
    with hosted(1, pp=2) as host:
        plan = planned(host, "packs")
        foreign = plan.revised(limits=Limits(host.layout.dp + 1, 1 << 20, num_stages=2))
        flat = plan.revised(order=(), limits=Limits(host.layout.dp, 1 << 20))
        said = {
            "ranks": told(lambda: host.gradients(foreign, tokens())),
            "stages": told(lambda: host.gradients(flat, tokens())),
            "load": told(lambda: host.load(Path("/nonexistent"))),
        }
        host.module.blocks[0].mlp.act_fn = torch.nn.Dropout(0.1)
        return {**said, "dropout": told(lambda: host.gradients(planned(host, "5", replay="all"), tokens()))}
