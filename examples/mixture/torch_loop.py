"""A plain PyTorch loop on a mixture whose shares follow its losses (ODM); killed, it goes on with the same samples.

python examples/mixture/torch_loop.py runs/torch [STEPS]      or: torchrun --nproc-per-node 2 examples/mixture/...
"""

import asyncio
import email
import json
import os
import sys
from pathlib import Path

import evenload
import numpy as np
import torch
import torch.distributed as dist
from evenload.api import load_plugins
from evenload.core.policies import DomainsToMix, Proportions, SeenDomains, chosen_policy, started, stepped
from evenload.core.registry import data_policies
from torch.utils.data import ConcatDataset, DataLoader, StackDataset

LENGTH, BATCH, MICRO_BATCH, WORKERS = 64, 16, 4, 1
LAG = 4  # steps between what a step shows and the shares that follow: a loader with workers draws ahead


def blocks(package):
    """The package's source as rows of bytes."""
    text = b"".join(path.read_bytes() for path in sorted(Path(package.__path__[0]).glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()


out, steps = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 6
torch.set_num_threads(1)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

domains = {"email": blocks(email), "asyncio": blocks(asyncio)}
names, sizes = sorted(domains), {name: len(rows) for name, rows in domains.items()}
sampler = evenload.MixtureSampler(sizes, {"email": 1, "asyncio": 3}, BATCH, MICRO_BATCH, rank, num_ranks)
rows = ConcatDataset(list(domains.values()))
loader = DataLoader(StackDataset(range(len(rows)), rows), batch_sampler=sampler, num_workers=WORKERS)

load_plugins()
odm = chosen_policy("mix", "odm", {"scale": 4.0}, data_policies("mix"))
state, answer = started(odm, DomainsToMix(tuple(names), (0.75, 0.25), tuple(sizes[name] for name in names)))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

first, last = 0, out / "last.pt"
out.mkdir(parents=True, exist_ok=True)
if last.exists():
    saved = torch.load(last)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    sampler.load_state_dict(saved["sampler"])
    first, state, answer = saved["step"], saved["state"], Proportions(tuple(saved["shares"]))

batches = iter(loader)
for step in range(first, steps):
    numbers, sums = [], torch.zeros(len(names), 2, dtype=torch.float64)  # of each domain: losses, samples
    optimizer.zero_grad()
    for _ in range(BATCH // num_ranks // MICRO_BATCH):
        own, tokens = next(batches)
        losses = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none").sum(1)
        (losses.sum() / (BATCH * (LENGTH - 1))).backward()
        numbers += own.tolist()
        for name, loss in zip(sampler.names_of(own), losses.tolist(), strict=True):
            sums[names.index(name)] += torch.tensor([loss, 1.0], dtype=torch.float64)
    for tensor in [sums, *(parameter.grad for parameter in model.parameters())] if num_ranks > 1 else ():
        dist.all_reduce(tensor)
    optimizer.step()
    samples = sums[:, 1].numpy().astype(np.int64)
    seen = SeenDomains(sums[:, 0].numpy(), samples * (LENGTH - 1), samples)
    state, answer = stepped(odm, state, seen, answer)
    sampler.set_shares(dict(zip(names, answer.shares, strict=True)), step + LAG)  # alike on all ranks: of sums of all
    with (out / f"rank{rank}.jsonl").open("a") as log:
        log.write(json.dumps({"step": step, "numbers": numbers, "shares": answer.shares}) + "\n")
    if rank == 0 and (step + 1) % 2 == 0:
        progress = {"step": step + 1, "state": state, "shares": answer.shares, "sampler": sampler.state_dict(step + 1)}
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **progress}, f"{last}.new")
        os.replace(f"{last}.new", last)
if dist.is_initialized():
    dist.destroy_process_group()
