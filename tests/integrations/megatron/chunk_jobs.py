"""What the ranks of unmodified/test_chunks.py do: a loop over virtual pipeline stages, stock and with packs.

Model, samples and loss are those of `tests/scripts/megatron_script.py`; chunks, their iterators and their hooks for the
gradient sum are made as Megatron-LM's ``setup_model_and_optimizer`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import evenload
import torch
from evenload.integrations.megatron.unmodified.running.chunks import round_up_microbatches
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_tests.float64 import all_in_float64
from megatron_tests.telling import told
from megatron_tests.user_jobs import compared, loaded_script, recipe

PACKED = {"packing": {"enabled": True, "max_tokens": 128, "slices": "off"}}


class Chunked:
    """One step at a time, from the same weights and the same samples."""

    def __init__(self, script: Any, model: list[Any], values: int, lone: bool, micro_batches: int) -> None:
        self.script, self.model, self.values, self.micro_batches = script, model, values, micro_batches
        self.fed = [not lone or self._is_fed(chunk) for chunk in model]
        self.last = parallel_state.is_pipeline_last_stage()

    @staticmethod
    def _is_fed(chunk: Any) -> bool:
        """As Megatron-LM: the first tensor-parallel rank, where tokens are embedded or losses computed."""
        ends = chunk.module.pre_process or chunk.module.post_process
        return bool(ends) and parallel_state.get_tensor_model_parallel_rank() == 0

    def step(self, planned: bool = False) -> dict[str, Any]:
        """Gradients, reports and what the forward step saw. In a stock step every chunk has its iterator."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.shapes: list[Any] = []
        iterators = [self.script.batches() if fed or not planned else None for fed in self.fed]
        reports = self.script.get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=iterators,
            model=self.model,
            num_microbatches=self.micro_batches,
            seq_length=self.script.SEQ_LENGTH,
            micro_batch_size=self.script.MICRO_BATCH,
            forward_only=False,
        )
        for chunk in self.model:
            if chunk.ddp_config.use_distributed_optimizer:
                gather_gradients(chunk)
        named = [(f"{i}.{n}", p) for i, chunk in enumerate(self.model) for n, p in chunk.module.named_parameters()]
        return {
            "gradients": {name: p.main_grad.clone() for name, p in named},
            "reports": [report["lm loss"] for report in reports],
            "further": further_losses(),
            "shapes": self.shapes,
            "next": [next(one)["tokens"].tolist() for one in iterators if one is not None],
        }

    def forward_step(self, data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        device = torch.cuda.current_device()
        batch = {name: value.to(device) for name, value in next(data_iterator).items()}
        self.shapes.append(tuple(batch["tokens"].shape))
        labels = {name: batch[name] for name in ("labels", "loss_mask")}
        output = model(batch["tokens"], batch["position_ids"], None, **labels)
        loss_func = partial(self.script.loss_func, batch["loss_mask"])

        def mean(losses: Any) -> Any:
            total, count, _ = loss_func(losses)
            average = total / count.clamp(min=1)
            return average, {"lm loss": average.detach().clone()}

        return output, loss_func if self.values == 3 else mean


def further_losses() -> torch.Tensor | None:
    """What Megatron-LM prints of multi-token prediction, before it divides by the number of micro-batches."""
    tracker = MTPLossLoggingHelper.tracker
    losses, group = tracker.get("values", tracker.get("loss_values")), tracker.get("avg_group")
    tracker.clear()
    if losses is not None:
        torch.distributed.all_reduce(losses, group=group)
    return None if losses is None else losses / torch.distributed.get_world_size(group)


def gather_gradients(chunk: Any) -> None:
    """The distributed optimizer leaves each rank the sum of its own part alone."""
    group = parallel_state.get_data_parallel_group()
    rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    for bucket in [bucket for group_of_them in chunk.bucket_groups for bucket in group_of_them.buckets]:
        parts = [part.contiguous() for part in bucket.grad_data.chunk(ranks)]
        torch.distributed.all_gather(parts, parts[rank].clone(), group=group)
        bucket.grad_data.copy_(torch.cat(parts))


@contextmanager
def chunked(
    pp: int,
    tp: int = 1,
    virtual_stages: int = 2,
    overlap: bool = False,
    distributed_optimizer: bool = False,
    values: int = 3,
    lone: bool = False,
    micro_batches: int = 4,
    aligned: bool = False,
    **fields: Any,
) -> Iterator[Chunked]:
    """``aligned``: reductions start together on all stages, Megatron-LM's --align-grad-reduce."""
    sizes = {"virtual_pipeline_model_parallel_size": virtual_stages if virtual_stages > 1 else None}
    with loaded_script("megatron_script", tp, pp, **sizes) as script, all_in_float64():
        ddp = DistributedDataParallelConfig(
            overlap_grad_reduce=overlap, use_distributed_optimizer=distributed_optimizer
        )
        model = [_chunk(script, ddp, i, pp, tp, virtual_stages, fields) for i in range(virtual_stages)]
        config = model[0].config
        config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            config.no_sync_func = [chunk.no_sync for chunk in model]
            if aligned:
                config.grad_sync_func = [chunk.start_grad_sync for chunk in model]
        yield Chunked(script, model, values, lone, micro_batches)


def _chunk(script: Any, ddp: Any, stage: int, pp: int, tp: int, virtual_stages: int, fields: dict[str, Any]) -> Any:
    config = TransformerConfig(
        **{
            "num_layers": pp * virtual_stages,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": torch.float64,
            "pipeline_dtype": torch.float64,
            "pipeline_model_parallel_size": pp,
            "tensor_model_parallel_size": tp,
            "virtual_pipeline_model_parallel_size": virtual_stages if virtual_stages > 1 else None,
            "calculate_per_token_loss": True,
            "attention_softmax_in_fp32": False,
            # Megatron frees an output that is still on the way; on CUDA its stream keeps the memory, gloo would not.
            "deallocate_pipeline_outputs": virtual_stages == 1 or not fields.get("overlap_p2p_comm", True),
            "overlap_p2p_comm": virtual_stages > 1,
            "batch_p2p_comm": virtual_stages == 1,
            **fields,
        }
    )
    layer = get_gpt_layer_local_spec(config.num_moe_experts, moe_grouped_gemm=False)
    further = None
    if config.mtp_num_layers:
        further = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=stage)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        mtp_block_spec=further,
        vocab_size=script.VOCABULARY,
        max_sequence_length=script.SEQ_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="rope",
        vp_stage=stage,
    )
    model.vp_stage = stage
    return DistributedDataParallel(config=config, ddp_config=ddp, module=model.double())


def packs_in_chunks(world: Any, **loop: Any) -> list[dict[str, Any]]:
    """Errors of two packed steps against the loop with nothing switched on, and of that loop afterwards."""
    results = []
    with chunked(**loop) as user:
        stock = user.step()
        with evenload.enabled(recipe(**PACKED)):
            results += [_errors(user.step(planned=True), stock) for _ in range(2)]
        results.append(_errors(user.step(), stock))
    return results


def _errors(planned: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    further = _furthest(planned["further"], stock["further"])
    return {
        **compared(planned, stock),
        "further": further,
        "next": all(one in stock["next"] for one in planned["next"]),
    }


def _furthest(planned: Any, stock: Any) -> float | None:
    """Megatron's tracker is float32."""
    return None if stock is None else float(((planned - stock).abs() / stock).max())


def told_of_chunks(world: Any, **loop: Any) -> dict[str, str]:
    """What is said where chunks are given other samples, of an order, and where the samples end."""
    with chunked(**loop) as user:
        batches, drawn = user.script.batches, []

        def others() -> Any:
            drawn.append(1)
            data = batches()
            if len(drawn) % 2 == 0:
                next(data)
            return data

        def ended() -> str:
            try:
                return told(user.step, evenload.enabled(recipe(**PACKED)))
            except StopIteration:
                return "the end"

        orders = recipe(pipeline={"enabled": True, "max_tokens": 32})
        said = {"order": told(user.step, evenload.enabled(orders))}
        user.script.batches = others
        said["other samples"] = told(user.step, evenload.enabled(recipe(**PACKED)))
        user.script.batches = lambda: iter([next(batches())])
        return {**said, "end": ended()}


def told_of_further_tokens(world: Any, **loop: Any) -> dict[str, Any]:
    """What is said where the model gets no loss mask, and what is left in Megatron afterwards."""
    said: dict[str, Any] = {}
    saving = {name: value for name, value in vars(MTPLossLoggingHelper).items() if name.startswith("save_")}
    with chunked(pp=1, virtual_stages=1, num_layers=2, mtp_num_layers=1, **loop) as user:
        gpt = user.model[0].module
        forward = type(gpt).forward
        with evenload.enabled(recipe(**PACKED)):
            user.step(planned=True)
            said["left"] = [
                saving and all(vars(MTPLossLoggingHelper)[name] is value for name, value in saving.items()),
                "apply" not in vars(MTPLossAutoScaler),
                "compute_language_model_loss" not in vars(gpt),
                type(gpt).forward is forward,
            ]
            user.forward_step = partial(user.script.forward_step, user.shapes)  # passes none
            said["no mask"] = told(partial(user.step, planned=True))
    return said


def numbers_of_packs(world: Any) -> list[Any]:
    """Where `round_up_microbatches` gives another number than the least that passes the schedule's own two checks."""
    wrong = []
    for stages, group, number in product(range(2, 6), range(2, 9), range(1, 40)):
        if group < stages:
            continue
        takes = (n for n in range(max(number, group), 99) if n % group == 0 or n % group >= stages)
        if round_up_microbatches(number, group, stages) != (wanted := next(takes)):
            wrong.append((stages, group, number, wanted))
    return wrong
