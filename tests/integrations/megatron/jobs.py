"""What the ranks of a test do; each function gets the world and returns something that can be pickled."""

from __future__ import annotations

import random
import resource
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from evenload.core.laws import check
from evenload.core.plan.action import LETTERS
from evenload.core.plan.limits import Limits
from evenload.core.plan.order import one_forward_one_backward
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.recipe.recipe import parse
from evenload.integrations.host.step import Step, no_mark
from evenload.integrations.megatron import PlannedBatches, forward_step, open_host, open_plane
from evenload.integrations.megatron import reduction as reduction_module
from evenload.integrations.megatron.model.gpt import torch_optimizers
from evenload.integrations.megatron.model.weights import global_gradients, global_parameters
from evenload.integrations.megatron.plain import grad_rel_err, reference
from evenload.integrations.megatron.reduction import Reduction
from evenload.integrations.megatron.saving import checkpoint as checkpoint_module
from evenload.runtime.attention.labels import Labels, TargetWeights, weighed
from evenload.runtime.measure.busy import BusyClock
from evenload.training.proof.masking import half_masked
from harness.proof import LENGTHS, VOCABULARY, Found, errors_of_plans, planned, tokens
from harness.proof.faults import around, fault
from harness.references import kept
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron_tests.telling import told
from torch.distributed import distributed_c10d

CPU = torch.device("cpu")


def recipe(**changes: Any) -> Any:
    data: dict[str, Any] = {
        "trainer": "megatron",
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": VOCABULARY,
        },
        "data": {"max_length": 128},
        "parallel": {"dp": None},
        "train": {"global_batch_size": 8, "dtype": "fp64", "clip_grad": 1.0, "seed": 7},
        "megatron": {},
        "plugins": {},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        data[section][name] = value
    return parse(data)


def masked(lengths: Any = LENGTHS, seed: int = 0) -> Labels:
    """Labels in which half of the tokens carry no loss, and the others count as tokens of another seed."""
    return half_masked(None, tokens(lengths, seed + 100), np.arange(len(lengths)), as_lengths(lengths), seed)


def plan(num_ranks: int, lengths: Any = LENGTHS, packs: Any = None) -> StepPlan:
    """Whole sequences; ``packs`` lists (rank, sequence indices), by default unequal numbers on the ranks."""
    if packs is None:
        packs = {
            1: [(0, (2, 1)), (0, (0, 3, 6)), (0, (4, 5, 7))],
            2: [(0, (2, 1)), (1, (0, 3)), (0, (4, 6)), (0, (5,)), (1, (7,))],
            4: [(0, (2, 1)), (1, (0, 3)), (2, (4, 6)), (0, (5,)), (3, (7,))],
        }[num_ranks]
    micro_batches = tuple(MicroBatch(tuple(Slice(i, 0, lengths[i]) for i in own), (rank,)) for rank, own in packs)
    return check(StepPlan(as_lengths(lengths), micro_batches, Limits(num_ranks, 4096)))


def plan_of(host: Any, which: Any = None, lengths: Any = LENGTHS, **drawn: Any) -> StepPlan:
    """A plan by the name or seed that `planned` knows, of listed packs, or the default one of `plan`."""
    if isinstance(which, str | int):
        return planned(host, which, lengths, **drawn)
    return plan(host.layout.dp_cp_size, lengths, which)


@contextmanager
def hosted(world: Any, **changes: Any) -> Any:
    host = open_host(recipe(**changes), world)
    try:
        yield host
    finally:
        host.close()


def proven(
    world: Any,
    *,
    plans: Any = (None,),
    lengths: Any = LENGTHS,
    drawn: dict[str, Any] | None = None,
    mutant: str = "",
    drawings: int = 0,
    **changes: Any,
) -> list[Found]:
    """Errors of plans against plain training, one reference for all of them; see `plan_of`."""
    with hosted(world, **changes) as host:
        named = ((str(which), plan_of(host, which, lengths, **(drawn or {}))) for which in plans)
        return errors_of_plans(host, named, lengths, lambda: mutation(mutant), drawings=drawings)


def mutation(name: str) -> Any:
    """Plant a fault in the planned path; "": none."""
    return FAULTS[name]() if name in FAULTS else fault(name)()


def _one_target_more(total: Any, *args: Any) -> Any:
    loss, count = total(*args)
    return loss, count + 1


def _naive_overlap(init: Any, reduction: Any, ddp: Any, *args: Any, **named: Any) -> None:
    init(reduction, ddp, *args, **named)
    reduction.quiet, ddp.config.no_sync_func = False, None


def _load_as_upstream(load: Any, optimizer: Any, state: Any) -> None:
    load(optimizer, state)
    states = [state for one in torch_optimizers(optimizer) for state in one.state.values()]
    for one in states:
        one["step"] = states[0]["step"]


FAULTS = {
    "wrong scale": lambda: around(reduction_module, "_sum_over_world", _one_target_more),
    "naive overlap": lambda: around(Reduction, "__init__", _naive_overlap),
    "shared step": lambda: around(checkpoint_module, "load_optimizer", _load_as_upstream),
}


def train(
    world: Any,
    *,
    steps: int = 3,
    plans: Any = (None,),
    read: str = "",
    write: str = "",
    first: int = 0,
    mutant: str = "",
    record: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """Losses and norms of some steps, what each generator of random numbers draws in each, and a sum over the weights
    after them.

    ``plans`` of the steps, by turns, as for `plan_of`; ``read`` and ``write`` name a checkpoint to start from and one
    to leave. ``record``: spans, too.
    """
    random.seed(1)
    np.random.seed(1)
    with hosted(world, **changes) as host, mutation(mutant):
        if read:
            host.load(Path(read))
        results, draws, passes = [], [], []
        for step in range(first, first + steps):
            draws.append(drawn())
            the_plan = plan_of(host, plans[step % len(plans)])
            passes.append(passes_here(host, the_plan))
            results.append(host.train_step(the_plan, tokens(seed=step), lr=1e-2, record=record))
        if write:
            save_new(world, host, Path(write))
        weights = {name: p.detach().double().norm().item() for name, p in global_parameters(host.model)}
        return {
            "losses": [r.loss for r in results],
            "norms": [r.grad_norm for r in results],
            "targets": [r.num_targets for r in results],
            "spans": [r.spans for r in results],
            "passes": passes,
            "weights": weights,
            "draws": draws,
        }


def save_new(world: Any, host: Any, folder: Path) -> None:
    """Save into a folder that is made for it."""
    if world.rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    host.save(folder)


def passes_here(host: Any, the_plan: Any) -> list[tuple[str, int]]:
    """(kind, number) of the passes that this rank runs of a plan, as spans have them, in order."""
    if the_plan.order:
        program = lower(the_plan, host.pipeline_stage, host.dp_cp_rank)
        return [(LETTERS[action.kind].upper(), action.op.micro_batch) for action in program if action.computes]
    behind = host.layout.pp - 1 - host.pipeline_stage
    return [tuple(op) for op in one_forward_one_backward(the_plan.of_rank(host.dp_cp_rank), behind)]


def drawn() -> tuple[float, ...]:
    """A number of each generator that a checkpoint keeps."""
    with get_cuda_rng_tracker().fork():
        ranks_own = float(torch.rand(()))
    return random.random(), float(np.random.random()), float(torch.rand(())), ranks_own


def summed_gradients(world: Any, *, plans: list[Any], mutant: str = "", **changes: Any) -> list[float]:
    """Per step of some plans without updates: error of the reduced gradients against plain training.

    This is `train_step` without the optimizer, so the protocol under test is the one that training uses. With the
    non-distributed optimizer every rank holds the whole sum.
    """
    errors = []
    with hosted(world, megatron__distributed_optimizer=False, **changes) as host:
        _, expected = kept(reference, host.recipe, host, tokens(), as_lengths(LENGTHS))
        with mutation(mutant):
            for which in plans:
                host.trained.run(Step(plan_of(host, which), tokens(), None, no_mark, BusyClock(CPU)))
                errors.append(grad_rel_err(dict(global_gradients(host.model)), expected))
    return errors


def refusal(world: Any, **changes: Any) -> str:
    """What is said where a host is opened."""
    return told(lambda: None, hosted(world, **changes))


def bad_plans(world: Any) -> dict[str, str]:
    """What is said of plans that the host cannot run, which change no weight."""
    good = plan(1)
    first, *rest = good.micro_batches
    cut = first._replace(slices=(first.slices[0]._replace(stop=7), *first.slices[1:]))
    plans = {
        "cut": replace(good, micro_batches=(cut, *rest)),
        "ranks": replace(good, limits=replace(good.limits, num_ranks=2)),
        "shared": replace(good, micro_batches=(first._replace(ranks=(0, 0)), *rest)),
        "stages": replace(good, recompute=((1,) * len(good.micro_batches),) * 2),
    }
    with hosted(world) as host, unchanged(host):
        return {kind: told(lambda bad=bad: host.train_step(bad, tokens(), lr=1.0)) for kind, bad in plans.items()}


@contextmanager
def unchanged(host: Any) -> Any:
    """No weight of the model changes in here."""
    before = [p.detach().clone() for p in host.model.parameters()]
    yield
    assert all(torch.equal(a, b) for a, b in zip(before, host.model.parameters(), strict=True))


def cancelling(lengths: Any = LENGTHS) -> Labels:
    """Labels whose weights add up to 0."""
    rows = [np.full(n, (-1.0) ** i / (n - 1)) for i, n in enumerate(lengths)]
    labels = weighed(None, tokens(lengths), as_lengths(lengths), rows.__getitem__)
    return labels._replace(
        weights=TargetWeights(rows.__getitem__, np.array([(-1.0) ** i for i in range(len(lengths))]))
    )


def cancelled(world: Any) -> str:
    """What is said of a batch whose weights cancel out; no weight of the model changes."""
    with hosted(world) as host, unchanged(host):
        return told(lambda: host.train_step(plan(world.size), tokens(), lr=1.0, labels=cancelling()))


def initial_weights(world: Any, **changes: Any) -> dict[str, Any]:
    """Weights by global name, made whole again over the tensor-parallel ranks. As arrays: where Megatron-Core 0.19 is
    loaded, a tensor is pickled with a function of its own, which the test's process does not have."""
    with hosted(world, **changes) as host:
        whole = {}
        for name, parameter in global_parameters(host.model):
            parts = [torch.empty_like(parameter) for _ in range(host.layout.tp)]
            torch.distributed.all_gather(
                parts, parameter.detach().contiguous(), group=parallel_state.get_tensor_model_parallel_group()
            )
            if getattr(parameter, "tensor_model_parallel", False):
                stride, dim = parameter.partition_stride, parameter.partition_dim
                pieces = [part.chunk(stride, dim) for part in parts]
                parts = [torch.cat([pieces[r][s] for s in range(stride) for r in range(host.layout.tp)], dim)]
            whole[name] = parts[0].detach().numpy()
        return whole


def own_loop(world: Any, *, shared: bool = False) -> float:
    """A loop of one's own, from the public pieces and stock Megatron only; its error against plain training."""
    with hosted(world, train__dtype="fp32", megatron__distributed_optimizer=False) as host:
        data, the_plan = tokens(), plan_of(host, "zones" if shared else None)
        _, expected = kept(reference, host.recipe, host, data, the_plan.lengths)
        plane = open_plane() if shared else None
        batches = PlannedBatches.of_rank(the_plan, host.dp_cp_rank, data, plane=plane)
        host.ddp.config.no_sync_func, host.ddp.config.finalize_model_grads_func = None, finalize_model_grads
        host.ddp.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=[host.ddp],
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        if plane:
            plane.close()
        return grad_rel_err(dict(global_gradients(host.model)), expected)


def time_limits(world: Any) -> list[float]:
    """Seconds after which collectives fail: those of the world, and of all groups of tensors that a host adds."""
    with hosted(world, train__dtype="fp32"):
        added = [group for group in distributed_c10d._world.pg_map if not group.group_desc.endswith("GLOO")]
        groups = [dist.group.WORLD, *(group for group in added if group is not dist.group.WORLD)]
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def measured_parts(world: Any) -> dict[str, float]:
    """What the busy clock counts, against a clock around the whole step, with a pause that it must leave out."""
    with hosted(world, train__dtype="fp32") as host:
        the_plan, data = plan(host.layout.dp_cp_size), tokens()
        pauses = []

        def slow(index: int) -> np.ndarray:
            time.sleep(0.05)
            pauses.append(0.05)
            return data(index)

        start = time.perf_counter()
        result = host.train_step(the_plan, slow, lr=1e-3)
        return {"busy": result.busy_s, "paused": sum(pauses), "all": time.perf_counter() - start}


def recomputed(world: Any, *, by_plan: bool) -> float:
    """Error with layers recomputed in backward, which must see its own micro-batch's plan; without an order."""
    with hosted(world, parallel__pp=world.size, train__recompute=not by_plan) as host:
        data, the_plan = tokens(), plan(host.layout.dp_cp_size)
        _, expected = kept(reference, host.recipe, host, data, the_plan.lengths)
        if by_plan:
            limits = replace(the_plan.limits, num_stages=world.size, layers_per_stage=4 // world.size)
            layers = tuple(i % 3 for i in range(len(the_plan.micro_batches)))
            the_plan = check(replace(the_plan, limits=limits, recompute=(layers,) * world.size))
        _, gradients = host.gradients(the_plan, data)
        return grad_rel_err(gradients, expected)


def load_error(world: Any, *, folder: str, **changes: Any) -> str:
    """What is said of a checkpoint; no weight changes where something is."""
    with hosted(world, **changes) as host:
        before = [p.detach().clone() for p in host.model.parameters()]
        said = told(lambda: host.load(Path(folder)))
        assert not said or all(torch.equal(a, b) for a, b in zip(before, host.model.parameters(), strict=True))
        return said


def save_error(world: Any, *, folder: str, limit_rank: int = -1, **changes: Any) -> str:
    """What is said of a save; ``limit_rank`` may write no file longer than 2 KiB meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with hosted(world, **changes) as host:
        if world.rank == limit_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
        try:
            return told(lambda: host.save(Path(folder)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
