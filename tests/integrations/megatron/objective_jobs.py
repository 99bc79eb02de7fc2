"""What the ranks of unmodified/test_objective.py do: the script's loop under both objectives, fed as by Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import evenload
import torch
from evenload.core.plan.step_plan import Slice
from evenload.integrations.megatron.unmodified.planning import call_plan
from evenload.integrations.megatron.unmodified.reading.context_parallel import CpShards
from evenload.integrations.megatron.unmodified.running.objective import MeanOfMeans
from evenload.integrations.megatron.unmodified.running.reports import Reports
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron_tests.float64 import all_in_float64
from megatron_tests.telling import planted, told
from megatron_tests.user_jobs import Loop, compared, drawn, planning, recipe, user_loop, worst

PACKED = {"packing": {"enabled": True, "max_tokens": 128, "slices": "off"}}


class Fed(Loop):
    """The loop whose iterators only those ranks have to which Megatron-LM gives one, and whose loss function returns
    the sum, or the mean, as its config asks."""

    def __init__(self, loop: Loop, values: int, lone: bool) -> None:
        super().__init__(loop.script, loop.model)
        self.values = values
        ends = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
        self.fed = not lone or (ends and parallel_state.get_tensor_model_parallel_rank() == 0)

    def forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        output, loss_func = self.script.forward_step(self.shapes, data_iterator, model)

        def mean(losses: Any) -> Any:
            total, count, _ = loss_func(losses)
            average = total / count  # 0 / 0 without loss, as in Megatron-LM's run_simple_mcore_train_loop.py
            # The same storage: Megatron's schedules divide it in place, behind the function.
            shared = average.detach()
            return average, {"lm loss": shared if self.values == 1 else shared.clone()}

        return output, loss_func if self.values == 3 else mean

    def fed_step(self) -> dict[str, Any]:
        """A planned step: ranks without data are given None."""
        batches = self.script.batches
        with patch.object(self.script, "batches", batches if self.fed else lambda: None):
            return self.step()


def objectives(
    world: Any, *, values: int = 3, lone: bool = False, seeds: tuple[int, ...] = (), mutant: str = "", **loop: Any
) -> list[dict[str, Any]]:
    """Errors of packs in the stock schedule, and of random plans, against the loop with nothing switched on."""
    results = []
    with user_loop(**loop) as alike, all_in_float64():
        user = Fed(alike, values, lone)
        stock = user.step()
        with evenload.enabled(recipe(**PACKED)), planted(FAULTS, mutant):
            results.append(compared(user.fed_step(), stock))
        for seed in seeds:
            with evenload.enabled(recipe()), planning(drawn(seed)), planted(FAULTS, mutant):
                results.append(compared(user.fed_step(), stock))
    return results


FAULTS = {
    "as if packs were micro-batches": lambda: patch.object(MeanOfMeans, "weigh", lambda self, output, packed: output),
    "one count for all": lambda: patch.object(
        call_plan, "weights_of", lambda targets, order: [1.0 / (len(targets[0]) * targets[0][0][0])] * len(order)
    ),
}


def passed_groups(world: Any, **loop: Any) -> list[Any]:
    """A loop that passes process groups to the schedule: its own, and those of another layout."""
    with user_loop(**loop) as user:
        groups = _collection()
        passed = {"pg_collection": groups, "p2p_communicator": P2PCommunicator(groups.pp, get_model_config(user.model))}

        def step() -> dict[str, Any]:
            return user.step(schedule=lambda **call: user.script.get_forward_backward_func()(**call, **passed))

        stock = step()
        with evenload.enabled(recipe(**PACKED)):
            packed = step()
        with evenload.enabled(recipe()), planning(drawn(1)):
            ordered = step()
        found = [max(worst(one, stock) for one in (packed, ordered)), {rows for rows, _ in packed["shapes"]}]
        groups.dp_cp, groups.pp = groups.pp, groups.dp_cp
        return [*found, told(step, evenload.enabled(recipe(**PACKED)))]


def _collection() -> ProcessGroupCollection:
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


def missing_iterators(world: Any) -> list[str]:
    """What a loop is told of which no rank has an iterator, and one whose last or first stage has none."""
    said = []
    for layout, stage in (({"tp": 2}, None), ({"pp": 2}, 0), ({"pp": 2}, 1)):
        with user_loop(**layout) as user, evenload.enabled(recipe(**PACKED)):
            if parallel_state.get_pipeline_model_parallel_rank() != stage:
                user.script.batches = lambda: None
            said.append(told(user.step))
    return said


def odd_mask(world: Any, **loop: Any) -> str:
    """What ranks are told where the first of them is given a mask that is not causal, and tensor-parallel peers of it
    are given nothing."""
    with user_loop(**loop) as user, evenload.enabled(recipe(**PACKED)):
        batches, odd = user.script.batches, torch.distributed.get_rank() == 0

        def masked() -> Iterator[Any]:
            for batch in batches():
                mask = ~torch.ones(1, 1, *2 * batch["tokens"].shape[1:], dtype=torch.bool).tril()
                mask[..., 2:, :2] |= odd
                yield {**batch, "attention_mask": mask}

        user.script.batches = masked if parallel_state.get_tensor_model_parallel_rank() == 0 else lambda: None
        return told(user.step)


def second_model(world: Any) -> list[Any]:
    """What a loop with a teacher is told under evenload, and without it."""
    with user_loop() as user:
        teacher, _ = user.script.build(torch.float64, "rope", overlap=False)

        def taught(data_iterator: Any, model: Any) -> Any:
            batch = next(data_iterator)
            teacher(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            return user.forward_step(iter([batch]), model)

        step = partial(user.step, taught)
        planned = told(step, evenload.enabled(recipe(**PACKED)))
        return [planned, told(step), hasattr(GPTModel.forward, "__wrapped__")]


def reports_of_ranks(world: Any) -> list[Any]:
    """Keys and number of what two ranks report where one has a dummy alone, of which every value is zero; and the keys
    where a later call reports something else."""
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    found = []
    for kinds in (None, {"lm loss": ("mean", torch.zeros(()))}):
        reports = Reports(CpShards(1, [2, 2]), kinds)
        loss_mask, slices = (torch.zeros(1, 1), ()) if rank else (torch.ones(1, 4), (Slice(0, 0, 2), Slice(1, 0, 2)))
        packed = SimpleNamespace(
            fields={"loss_mask": loss_mask}, pack=SimpleNamespace(slices=slices, segments=(0, 2, 4))
        )
        loss = loss_mask.sum() / loss_mask.sum().clamp(min=1)
        answer = loss, {"lm loss": loss.clone(), "hits": 3 * loss}
        reports.add(packed, torch.ones_like(loss_mask), answer)
        entries = reports.of_loop([answer[-1]], [[rank], [rank]], [2.0, 2.0], group)
        found.append([sorted(entry) for entry in entries])
    return found
