"""A DeepSpeed loop on a mixture, by ``deepspeed_io(data_sampler=)``; killed, it goes on with the same samples.

python examples/mixture/deepspeed_loop.py runs/deepspeed [STEPS]   or: torchrun --nproc-per-node 2 examples/mixture/...
"""

import asyncio
import email
import json
import os
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import evenload
import torch
from torch.utils.data import ConcatDataset, StackDataset

LENGTH, BATCH, MICRO_BATCH = 64, 16, 4
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else DeepSpeed compiles it for CPUs


def blocks(package):
    """The package's source as rows of bytes."""
    text = b"".join(path.read_bytes() for path in sorted(Path(package.__path__[0]).glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()


class Model(torch.nn.Sequential):
    def forward(self, tokens):
        return torch.nn.functional.cross_entropy(super().forward(tokens[:, :-1]).mT, tokens[:, 1:])


out, steps = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 6
torch.set_num_threads(1)
os.environ.update({key: value for key, value in ALONE.items() if key not in os.environ})
torch.manual_seed(0)
engine, *_ = deepspeed.initialize(
    model=Model(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256)),
    config={
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    },
)
rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

domains = {"email": blocks(email), "asyncio": blocks(asyncio)}
sizes = {name: len(rows) for name, rows in domains.items()}
sampler = evenload.MixtureSampler(sizes, {"email": 1, "asyncio": 3}, BATCH, rank=rank, num_ranks=num_ranks, steps=steps)
out.mkdir(parents=True, exist_ok=True)
if (out / "latest").exists():
    sampler.load_state_dict(engine.load_checkpoint(str(out))[1]["sampler"])
else:
    sampler.set_shares({"email": 3, "asyncio": 1}, step=4)
rows = ConcatDataset(list(domains.values()))
loader = engine.deepspeed_io(StackDataset(range(len(rows)), rows), data_sampler=sampler, pin_memory=False)

numbers = []
for own, tokens in loader:  # read by two workers, which are ahead of the training
    engine.backward(engine(tokens.to(engine.device)))
    numbers += own.tolist()
    boundary = engine.is_gradient_accumulation_boundary()
    engine.step()
    if boundary:
        step = engine.global_steps
        with (out / f"rank{rank}.jsonl").open("a") as log:
            log.write(json.dumps({"step": step - 1, "numbers": numbers}) + "\n")
        numbers = []
        if step % 2 == 0:
            engine.save_checkpoint(str(out), client_state={"sampler": sampler.state_dict(step)})
engine.destroy()
torch.distributed.destroy_process_group()
