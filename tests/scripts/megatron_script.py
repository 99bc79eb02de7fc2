"""A plain Megatron-Core pre-training script, as its author would write it: it knows nothing of evenload.

torchrun --nproc-per-node 2 megatron_script.py --out FOLDER [--dtypes fp32 fp64 bf16 fp16] [--pp 2] [--tp 2]
"""

import argparse
import os
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

SEQ_LENGTH, VOCABULARY, MICRO_BATCH, NUM_MICRO_BATCHES, STEPS = 64, 128, 2, 3, 3
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def sample(index):
    """A sample of its own length, padded to SEQ_LENGTH; its first quarter is a prompt without loss.

    Of five samples one carries loss at every second token only, and one nowhere.
    """
    generator = torch.Generator().manual_seed(index)
    length = int(4 + (SEQ_LENGTH - 4) * torch.rand((), generator=generator) ** 3)
    text = torch.zeros(SEQ_LENGTH + 1, dtype=torch.int64)
    text[: length + 1] = torch.randint(1, VOCABULARY, (length + 1,), generator=generator)
    loss_mask = torch.zeros(SEQ_LENGTH)
    loss_mask[length // 4 : length : 2 if index % 5 == 4 else 1] = float(index % 5 != 3)
    return {
        "tokens": text[:-1],
        "labels": text[1:],
        "loss_mask": loss_mask,
        "position_ids": torch.arange(SEQ_LENGTH),
    }


def batches():
    """This data-parallel rank's micro-batches, for ever."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    index = rank * MICRO_BATCH
    while True:
        yield torch.utils.data.default_collate([sample(index + i) for i in range(MICRO_BATCH)])
        index += ranks * MICRO_BATCH


def loss_func(loss_mask, losses):
    loss_mask = loss_mask.view(-1)
    loss = torch.sum(losses.view(-1) * loss_mask)
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(shapes, data_iterator, model):
    device = torch.cuda.current_device()
    batch = {name: value.to(device) for name, value in next(data_iterator).items()}
    shapes.append(tuple(batch["tokens"].shape))
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def gpt(dtype, longest, vocabulary=VOCABULARY, positions="rope", **own):
    """(config, model) of this rank's part; ``own``: fields of the config."""
    size = {
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
    }
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    types = {"params_dtype": dtype, "pipeline_dtype": dtype, "attention_softmax_in_fp32": False}
    config = TransformerConfig(**{**SHAPE, **size, **no_dropout, **types, **own})
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=vocabulary,
        max_sequence_length=longest,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=positions,
    )
    return config, model.double() if dtype == torch.float64 else model


def wrapped(config, model, **own):
    """The model for data parallelism."""
    ddp_config = DistributedDataParallelConfig(**own)
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)


def build(dtype, positions, overlap):
    exact = dtype == torch.float64
    half = {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
    own = {**half, "calculate_per_token_loss": True, "deallocate_pipeline_outputs": pipelined}
    config, model = gpt(dtype, SEQ_LENGTH, positions=positions, **own)
    if any(half.values()):
        model = Float16Module(config, model)
    model = wrapped(config, model, overlap_grad_reduce=overlap, use_distributed_optimizer=not exact)
    if overlap:
        config.no_sync_func = model.no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3,
            clip_grad=0.0 if exact else 1.0,
            params_dtype=dtype,
            **half,
            initial_loss_scale=2.0**10,
            use_distributed_optimizer=not exact,
        ),
        [model],
    )
    if any(half.values()):
        config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def run(data, model, shapes, **more):
    """(sum of token losses, number of tokens) of a step, over all ranks; tensor-parallel peers count twice in both."""
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, shapes),
        data_iterator=data,
        model=[model],
        num_microbatches=NUM_MICRO_BATCHES,
        seq_length=SEQ_LENGTH,
        micro_batch_size=MICRO_BATCH,
        **more,
    )
    total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    for report in reports:
        total += report["lm loss"]
    torch.distributed.all_reduce(total)
    return total


def train(dtype, positions, overlap):
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    model, optimizer = build(dtype, positions, overlap)
    data, losses, shapes = batches(), [], []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss, num_tokens = run(data, model, shapes, forward_only=False).tolist()
        gradients = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
        optimizer.step()
        losses.append((loss / num_tokens, num_tokens))
    evaluated = []
    evaluation = run(data, model, evaluated, forward_only=True)
    return {
        "losses": losses,
        "shapes": shapes,
        "evaluation": (evaluation[0] / evaluation[1]).item(),
        "evaluated": evaluated,
        "gradients": gradients,
        "weights": {name: p.detach().clone() for name, p in model.module.named_parameters()},
    }


def begin(tp, pp):
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(tp, pp)


def end():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", default=["fp32"], choices=DTYPES)
    parser.add_argument("--positions", default="rope", choices=["rope", "learned_absolute"])
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    begin(args.tp, args.pp)
    rank = torch.distributed.get_rank()
    for name in args.dtypes:
        result = train(DTYPES[name], args.positions, args.overlap)
        torch.save(result, args.out / f"{name}.rank{rank}.pt")
    end()


if __name__ == "__main__":
    main()
