"""What the ranks of test_pipeline.py do: schedules drawn by the test against plain training, and planted faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.order import orders_of_stage
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.plan_json import read_step
from evenload.core.planning.setting import Setting, context_of
from evenload.integrations.host.step import Step, no_mark
from evenload.integrations.megatron import stage as stage_module
from evenload.integrations.megatron.model import gpt as model
from evenload.integrations.megatron.model import linears
from evenload.integrations.megatron.model.attention import PackedCoreAttention
from evenload.integrations.megatron.model.weights import global_gradients
from evenload.integrations.megatron.plain import grad_rel_err, reference
from evenload.runtime.measure.busy import BusyClock
from evenload.runtime.stage import deferred, stage_links
from evenload.runtime.stage.deferred import WgradStore
from evenload.runtime.stage.executor import Executor
from evenload.runtime.stage.stage_links import StageLinks
from harness.proof import Found, errors_of_plans, faults, tokens
from harness.proof.faults import around
from megatron_tests.jobs import CPU, hosted
from megatron_tests.telling import told


def _plan(host: Any, written: dict[str, Any]) -> StepPlan:
    layout = host.layout
    layers = layout.layers or (host.recipe.model.num_layers // layout.num_stages,)
    sizes = {"num_stages": layout.num_stages, "layers_per_stage": max(layers), "layers": layout.layers}
    limits = Limits(layout.dp_cp_size, 1 << 20, splits_backward=True, v_shape=layout.v_shape, **sizes)
    return check(read_step(written, limits))


def piped(
    world: Any,
    *,
    plans: list[dict[str, Any]],
    lengths: list[int],
    mutant: str = "",
    one_queue: bool = False,
    **changes: Any,
) -> list[Found]:
    """Errors of plans (as JSON), each with other labels and weights, against plain training.

    ``one_queue``: devices run all streams in one queue, so that a result waits for its turn to be sent.
    """
    with patch.object(stage_links, "has_one_queue", lambda _: one_queue), hosted(world, **changes) as host:
        return errors_of_plans(host, _numbered(host, plans), lengths, fault(mutant))


def piped_under_faults(
    world: Any, *, plans: dict[str, list[dict[str, Any]]], lengths: list[int], **changes: Any
) -> dict[str, Any]:
    """By the fault that is planted the errors of its plans; "": of all plans, where none is."""
    with hosted(world, **changes) as host:
        found = {"": errors_of_plans(host, _numbered(host, [plan for own in plans.values() for plan in own]), lengths)}
        for name, own in plans.items():
            found[name] = errors_of_plans(host, _numbered(host, own), lengths, fault(name))
        return found


def _numbered(host: Any, plans: list[dict[str, Any]]) -> list[tuple[int, StepPlan]]:
    return [(number, _plan(host, written)) for number, written in enumerate(plans)]


def sharded(world: Any, *, plans: list[dict[str, Any]], lengths: list[int], **changes: Any) -> list[float]:
    """Errors of the gradient shards that training steps leave to a distributed optimizer, in float64.

    Megatron's sharded optimizer wants float32; its gradient buffers and their overlapped reduce-scatter do not.
    """
    config, errors = model.DistributedDataParallelConfig, []

    def sharding_config(**fields: Any) -> Any:
        return config(**(fields | {"use_distributed_optimizer": True}))

    sharding = patch.object(model, "DistributedDataParallelConfig", sharding_config)
    with sharding, hosted(world, **changes) as host:
        _, expected = reference(host.recipe, host, tokens(lengths), as_lengths(lengths))
        for written in plans:
            host.trained.run(Step(_plan(host, written), tokens(lengths), None, no_mark, BusyClock(CPU)))
            for group in host.ddp.bucket_groups:
                for bucket in group.buckets:
                    members = group.intra_distributed_optimizer_instance_group
                    mine = bucket.grad_data.chunk(dist.get_world_size(members))[dist.get_rank(members)].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, mine, group=members)
            errors.append(grad_rel_err(dict(global_gradients(host.model)), expected))
    return errors


def passes(world: Any, *, plan: dict[str, Any], lengths: list[int], **changes: Any) -> dict[str, Any]:
    """What ran in a step: its spans, products for weight gradients by kind of pass, layers, tensors on the way."""
    told: dict[str, Any] = {"B": 0, "W": 0, "attention": 0, "sent": 0, "most": 0, "held": []}
    attend, product = PackedCoreAttention.forward, deferred.weight_gradient
    send, weights = StageLinks.send, Executor._weight_grads
    kind = ["B"]

    def attending(self: Any, *args: Any, **kwargs: Any) -> Any:
        told["attention"] += 1
        return attend(self, *args, **kwargs)

    def multiplying(*args: Any) -> Any:
        told[kind[0]] += 1
        return product(*args)

    def sending(self: Any, *args: Any) -> None:
        send(self, *args)
        told["sent"] += 1
        told["most"] = max(told["most"], *map(len, self._sent.values()))

    def weighing(self: Any, action: Any) -> None:
        before = self.wgrads.held_bytes()
        kind[0] = "W"
        weights(self, action)
        kind[0] = "B"
        told["held"].append((action.op.micro_batch, before - self.wgrads.held_bytes()))

    with (
        hosted(world, **changes) as host,
        patch.object(PackedCoreAttention, "forward", attending),
        patch.object(deferred, "weight_gradient", multiplying),
        patch.object(StageLinks, "send", sending),
        patch.object(Executor, "_weight_grads", weighing),
    ):
        the_plan = _plan(host, plan)
        result = host.train_step(the_plan, tokens(lengths), lr=0.0, record=True)
        context = context_of(Setting.of_recipe(host.recipe), host.layout)
        ops = orders_of_stage(the_plan, host.pipeline_stage)[host.dp_cp_rank]
        return {
            **told,
            "deferred_bytes_per_token": context.costs.memory.deferred_bytes_per_token,
            "spans": [(s.kind, s.micro_batch, s.start_s, s.end_s) for s in result.spans],
            "ops": [tuple(op) for op in ops],
            "left_over": any(any(links._sent.values()) for links in host._links),
            "patched": [name for name, m in host.model.named_modules() if "_forward_impl" in vars(m)],
            "busy": (result.busy_s, result.forward_s),
        }


def after_an_error(world: Any, *, plan: dict[str, Any], lengths: list[int], **changes: Any) -> list[str]:
    """What the steps say that follow one that failed in a backward, which the loop caught."""
    receive, told = Executor._receive, []

    def failing(*_: Any) -> None:
        raise RuntimeError("planted")

    def failing_backward(self: Any, action: Any) -> None:
        (failing if action.op.kind == "B" else receive)(self, action)

    with hosted(world, **changes) as host:
        for number in range(3):
            with ExitStack() as stack:
                if number == 0:
                    stack.enter_context(patch.object(Executor, "_backward", failing))
                    stack.enter_context(patch.object(Executor, "_receive", failing_backward))
                try:
                    host.gradients(_plan(host, plan), tokens(lengths))
                except (EvenloadError, RuntimeError) as error:
                    told.append(str(error))
        dist.barrier()
    return told


def unsplittable(world: Any, *, plan: dict[str, Any], lengths: list[int], **changes: Any) -> dict[str, str]:
    """What is said of a plan with W passes for models that cannot run them, on one rank."""
    with hosted(world, **changes) as host:
        layer = host.model.decoder.layers[1].mlp.linear_fc1
        reasons = {
            "someone else's": deferred.replaced(layer, "_forward_impl", layer._forward_impl),
            "a layer of another kind": patch.object(linears, "ColumnParallelLinear", linears.RowParallelLinear),
            "fusion": patch.object(host.model.config, "gradient_accumulation_fusion", True),
        }
        run = partial(host.gradients, _plan(host, plan), tokens(lengths))
        return {why: told(run, change) for why, change in reasons.items()}


def fault(name: str) -> Any:
    """What plants a fault, of which a rank may be told in any words."""

    @contextmanager
    def planted() -> Iterator[None]:
        with FAULTS[name]():
            try:
                yield
            except RuntimeError as error:
                raise EvenloadError(str(error)) from error

    return planted if name else nullcontext


def _computed_twice(run: Any, store: Any, number: int) -> None:
    left = list(store._left[number])
    run(store, number)
    store._left[number] = left
    run(store, number)


def _inputs_of_another() -> Any:
    """Products of the output gradients of one micro-batch and the inputs that the one before had."""
    last: dict[Any, Any] = {}

    def mixed(product: Any, x: Any, dy: Any) -> Any:
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        key = (x.shape[-1], dy.shape[-1])
        other, last[key] = last.get(key, x), x
        tokens = min(len(other), len(dy))
        return product(other[:tokens], dy[:tokens])

    return around(deferred, "weight_gradient", mixed)


@contextmanager
def _recomputed_under_another_plan() -> Iterator[None]:
    """As if the pack were in a global: a layer that is recomputed sees the one of the latest forward."""
    latest, replays = [], []

    def attending(attend: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        if not replays:
            latest[:] = [packed_seq_params]
        return attend(*args, packed_seq_params=latest[0], **kwargs)

    def stepping(step: Any, *args: Any) -> Any:
        replays.append(1)
        try:
            return step(*args)
        finally:
            replays.clear()

    with around(PackedCoreAttention, "forward", attending), around(stage_module, "backward_step", stepping):
        yield


def _dx_of_one_rank(linear: Any, store: Any, x: Any, weight: Any, bias: Any, sum_over: Any = None) -> Any:
    return linear(store, x, weight, bias)


FAULTS: dict[str, Any] = {
    **faults.FAULTS,
    "no weight gradients": lambda: patch.object(Executor, "_weight_grads", lambda *_: None),
    "empty W": lambda: patch.object(WgradStore, "run", lambda self, number: self._left.pop(number)),
    "W twice": lambda: around(WgradStore, "run", _computed_twice),
    "inputs of another micro-batch": _inputs_of_another,
    "recomputed under another plan": _recomputed_under_another_plan,
    "dx of one rank": lambda: around(WgradStore, "linear", _dx_of_one_rank),
}
