"""A little causal transformer in float64 on devices that have two stages each, for the executor: what ranks do."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from evenload.core.laws import check
from evenload.core.plan.forwards import lower_forwards
from evenload.core.plan.program import lower
from evenload.core.plan.step_plan import StepPlan
from evenload.runtime.attention.attention import packed_attention
from evenload.runtime.attention.pack import IGNORE, build_pack
from evenload.runtime.measure.busy import BusyClock
from evenload.runtime.stage import stage_links
from evenload.runtime.stage.deferred import WgradStore, deferring
from evenload.runtime.stage.executor import Executor, LoadedPack, StageTrainer, run_stages
from evenload.runtime.stage.stage_links import v_links
from harness.proof.drawn import random_plan
from harness.proof.pipelines import in_v, random_pipeline
from torch import Tensor, nn

CPU, WORDS, WIDTH, HEADS, LAYERS = torch.device("cpu"), 50, 8, 2, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x_1TC: Tensor, pack: Any, number: int) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv(x_1TC)[0].chunk(3, dim=-1))
        mixed = packed_attention(q, k, v, pack, number, (WIDTH // HEADS) ** -0.5).flatten(-2)
        return torch.tanh(x_1TC + self.out(mixed[None]))


def stage_of(number: int, num_stages: int) -> nn.ModuleDict:
    """The modules of a stage, equal on whatever rank they are made."""
    torch.manual_seed(number)
    parts: dict[str, nn.Module] = {"layers": nn.ModuleList(Layer() for _ in range(LAYERS))}
    if number == 0:
        parts["embedding"] = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
    if number == num_stages - 1:
        parts["head"] = nn.Linear(WIDTH, WORDS, dtype=torch.float64)
    return nn.ModuleDict(parts)


def sample(index: int, length: int) -> Any:
    return torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(index)).numpy()


class Trainer(StageTrainer):
    def __init__(self, stage: nn.ModuleDict, plan: StepPlan) -> None:
        super().__init__(list(stage["layers"]), CPU)
        self._stage, self._plan, self.loss = stage, plan, 0.0

    @contextmanager
    def prepared(self, program: Any, wgrads: WgradStore) -> Iterator[None]:
        linears = [m for m in self._stage["layers"].modules() if isinstance(m, nn.Linear)]
        with deferring(linears, wgrads):
            yield

    def load(self, micro_batch: Any, prefix: Any) -> Any:
        return LoadedPack(build_pack(micro_batch, lambda i: sample(i, int(self._plan.lengths[i])), CPU, prefix))

    def forward(self, loaded: Any, received: Tensor | None, action: Any) -> Tensor:
        x = self._stage["embedding"](loaded.pack.tokens_T[None]) if received is None else received
        for number, layer in enumerate(self._stage["layers"]):
            x = layer(x, loaded.pack, number)
        if "head" not in self._stage or action.kind == "forward_kv":
            return x
        labels = loaded.pack.labels_T
        loss = nn.functional.cross_entropy(self._stage["head"](x[0]), labels, ignore_index=IGNORE, reduction="sum")
        self.loss += loss.item()
        return loss

    def backward(self, graph: Any, gradient: Tensor | None) -> Tensor | None:
        torch.autograd.backward(graph.output, gradient)
        return None if graph.received is None else graph.received.grad

    def empty_like_input(self, pack: Any) -> Tensor:
        return torch.empty(1, pack.num_padded_tokens, WIDTH, dtype=torch.float64)


def plan_of(seed: int, lengths: list[int], num_ranks: int, num_devices: int, kind: str) -> StepPlan:
    """A random lawful plan of a V: of any groups and replays ("regrouped"), or with W passes."""
    sizes = {"num_ranks": num_ranks, "num_stages": 2 * num_devices, "layers_per_stage": LAYERS}
    draw = Random(seed)
    if kind == "weights":
        return random_pipeline(draw, lengths, **sizes, recompute="none", replay="", v_shape=True)
    return check(in_v(draw, random_plan(seed, lengths, **sizes, recompute=False)))


def reference(plan: StepPlan) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of plain training of whole sequences, on one process."""
    stages = [stage_of(s, plan.limits.num_stages) for s in range(plan.limits.num_stages)]
    total = torch.zeros((), dtype=torch.float64)
    for index, length in enumerate(plan.lengths.tolist()):
        tokens = torch.from_numpy(sample(index, length))
        x = stages[0]["embedding"](tokens[None])
        for layer in (layer for stage in stages for layer in stage["layers"]):
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in layer.qkv(x).chunk(3, dim=-1))
            scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed = (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(-2)
            x = torch.tanh(x + layer.out(mixed))
        logits = stages[-1]["head"](x[0])
        total = total + nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
    total.backward()
    return total.item(), gradients(dict(enumerate(stages)))


def gradients(stages: dict[int, nn.ModuleDict]) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": torch.zeros_like(p) if p.grad is None else p.grad
        for number, stage in stages.items()
        for name, p in stage.named_parameters()
    }


def trained(seeds: list[int], lengths: list[int], num_ranks: int, num_devices: int, kind: str, one_queue: bool) -> Any:
    """The largest errors of loss and gradients over these plans, on the devices of this rank's pipeline."""
    size = num_ranks * num_devices
    assert dist.get_world_size() == size
    device, rank = divmod(dist.get_rank(), num_ranks)
    rows = [tuple(range(r, size, num_ranks)) for r in range(num_ranks)]
    with patch.object(stage_links, "has_one_queue", lambda backend: one_queue):
        links = v_links(rows)
    worst = 0.0
    for seed in seeds:
        plan = plan_of(seed, lengths, num_ranks, num_devices, kind)
        own = plan.limits.stages_of_device(device)
        stages = {s: stage_of(s, plan.limits.num_stages) for s in own}
        trainers = [Trainer(stages[s], plan) for s in own]
        rest: Any = {"plane": None, "clock": BusyClock(CPU), "mark": lambda _: None}
        executors = [
            Executor(plan, s, rank, lower(plan, s, rank), trainer, links=link, **rest)
            for s, trainer, link in zip(own, trainers, links, strict=True)
        ]
        run_stages(executors)
        loss = torch.tensor(sum(trainer.loss for trainer in trainers), dtype=torch.float64)
        dist.all_reduce(loss)
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, {name: g.numpy() for name, g in gradients(stages).items()})
        wanted_loss, wanted = reference(plan)
        summed = {name: sum(torch.from_numpy(each[name]) for each in everything if name in each) for name in wanted}
        errors = [(summed[name] - g).norm() / g.norm().clamp(min=1e-30) for name, g in wanted.items()]
        worst = max([worst, abs(float(loss) - wanted_loss) / wanted_loss, *map(float, errors)])
    for link in links:
        link.close()
    return worst


def scored(seeds: list[int], lengths: list[int], num_devices: int) -> Any:
    """The largest error of the loss of forwards alone."""
    links, worst = v_links([tuple(range(num_devices))]), 0.0
    for seed in seeds:
        plan = plan_of(seed, lengths, 1, num_devices, "weights")
        own = plan.limits.stages_of_device(dist.get_rank())
        trainers = [Trainer(stage_of(s, plan.limits.num_stages), plan) for s in own]
        rest: Any = {"plane": None, "clock": BusyClock(CPU), "mark": lambda _: None}
        run_stages(
            [
                Executor(plan, s, 0, lower_forwards(plan, s, 0), trainer, links=link, **rest)
                for s, trainer, link in zip(own, trainers, links, strict=True)
            ]
        )
        loss = torch.tensor(sum(trainer.loss for trainer in trainers), dtype=torch.float64)
        dist.all_reduce(loss)
        wanted, _ = reference(plan)
        worst = max(worst, abs(float(loss) - wanted) / wanted)
    for link in links:
        link.close()
    return worst
