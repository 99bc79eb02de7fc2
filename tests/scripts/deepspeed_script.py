"""A plain DeepSpeed fine-tuning script, as its author would write it: it knows nothing of evenload.

torchrun --nproc-per-node 2 deepspeed_script.py --ds-config CONFIG.json --stages 0 1 2 3 --out FOLDER [--checkpointing]
"""

import argparse
import json
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

# Keeps DeepSpeed from compiling an operator for CPUs that only inference uses.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Samples(Dataset):
    """Sequences of very different lengths; the first third of each is a prompt without loss."""

    def __init__(self, count: int = 26) -> None:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(3, 40, (count,), generator=generator) ** 2 // 20 + 3
        self.rows = [torch.randint(1, 97, (int(n),), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = [row.clone() for row in rows]
    for label in labels:
        label[: len(label) // 3] = -100
        label[1::7] = -100
        if len(label) % 5 == 0:
            label[:] = -100
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def train(ds_config: dict, out: Path, checkpointing: bool) -> None:
    model = build_model()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=ds_config, training_data=Samples(), collate_fn=collate
    )
    losses, shapes = [], []
    for batch in loader:
        batch = {name: value.to(engine.device) for name, value in batch.items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        shapes.append(list(batch["input_ids"].shape))

    engine.eval()
    with torch.no_grad():
        batch = {name: value.to(engine.device) for name, value in collate([Samples()[0], Samples()[1]]).items()}
        evaluation = engine(**batch).loss.item()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=engine.zero_optimization_stage() == 3):
        weights = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    rank = torch.distributed.get_rank()
    result = {"losses": losses, "shapes": shapes, "steps": engine.global_steps, "evaluation": evaluation}
    torch.save({**result, "weights": weights}, out / f"stage{engine.zero_optimization_stage()}.rank{rank}.pt")
    engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ds-config", type=Path, required=True)
    parser.add_argument("--stages", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for stage in args.stages:
        ds_config = json.loads(args.ds_config.read_text())
        ds_config["zero_optimization"] = {"stage": stage}
        train(ds_config, args.out, args.checkpointing)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
