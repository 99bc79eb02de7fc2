"""A Megatron-Core loop on a mixture, by its ``data_iterator``; killed, it goes on with the same samples.

python examples/mixture/megatron_loop.py runs/megatron [STEPS [TP]]   or: torchrun --nproc-per-node 2 examples/...
"""

import asyncio
import email
import json
import os
import sys
from functools import partial
from pathlib import Path

import evenload
import torch
from evenload.patches import bridge_cpu
from torch.utils.data import ConcatDataset, DataLoader, StackDataset

if not torch.cuda.is_available():
    bridge_cpu()  # before Megatron-Core is imported, which expects a GPU

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, BATCH, MICRO_BATCH = 64, 16, 4
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29518"}


def blocks(package):
    """The package's source as rows of bytes."""
    text = b"".join(path.read_bytes() for path in sorted(Path(package.__path__[0]).glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()


def loss_func(losses):
    return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int), {}


def forward_step(numbers, data_iterator, model):
    own, tokens = next(data_iterator)
    numbers += own.tolist()
    tokens = tokens.to(torch.cuda.current_device())
    positions = torch.arange(LENGTH - 1, device=tokens.device).expand(len(tokens), -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), partial(loss_func)


out, steps, tp = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 6, int(sys.argv[3]) if sys.argv[3:] else 1
torch.set_num_threads(1)
os.environ.update({key: value for key, value in ALONE.items() if key not in os.environ})
torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
parallel_state.initialize_model_parallel(tp)
rank, num_ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
model_parallel_cuda_manual_seed(1234)
config = TransformerConfig(
    num_layers=1,
    hidden_size=32,
    num_attention_heads=4,
    tensor_model_parallel_size=tp,
    calculate_per_token_loss=True,
    attention_softmax_in_fp32=False,
)
gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=LENGTH)
model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
config.finalize_model_grads_func = finalize_model_grads
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [model])

domains = {"email": blocks(email), "asyncio": blocks(asyncio)}
sizes = {name: len(rows) for name, rows in domains.items()}
sampler = evenload.MixtureSampler(sizes, {"email": 1, "asyncio": 3}, BATCH, MICRO_BATCH, rank, num_ranks)
sampler.set_shares({"email": 3, "asyncio": 1}, step=4)
first, last = 0, out / f"last{parallel_state.get_tensor_model_parallel_rank()}.pt"
out.mkdir(parents=True, exist_ok=True)
if last.exists():
    saved = torch.load(last, weights_only=False)
    gpt.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    sampler.load_state_dict(saved["sampler"])
    first = saved["step"]
rows = ConcatDataset(list(domains.values()))
data = iter(DataLoader(StackDataset(range(len(rows)), rows), batch_sampler=sampler, num_workers=1))

for step in range(first, steps):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    numbers = []
    get_forward_backward_func()(
        forward_step_func=partial(forward_step, numbers),
        data_iterator=data,
        model=[model],
        num_microbatches=BATCH // MICRO_BATCH // num_ranks,
        seq_length=LENGTH - 1,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    optimizer.step()
    with (out / f"rank{torch.distributed.get_rank()}.jsonl").open("a") as log:
        log.write(json.dumps({"step": step, "numbers": numbers}) + "\n")
    torch.distributed.barrier()
    if rank == 0 and (step + 1) % 2 == 0:
        progress = {"step": step + 1, "sampler": sampler.state_dict(step + 1)}
        torch.save({"model": gpt.state_dict(), "optimizer": optimizer.state_dict(), **progress}, f"{last}.new")
        os.replace(f"{last}.new", last)
torch.distributed.destroy_process_group()
