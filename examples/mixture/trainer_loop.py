"""Transformers' Trainer on a mixture; killed, it goes on with the same samples.

python examples/mixture/trainer_loop.py runs/trainer [STEPS]      or: torchrun --nproc-per-node 2 examples/mixture/...
"""

import asyncio
import email
import json
import os
import sys
from pathlib import Path

import evenload
import torch
from torch.utils.data import ConcatDataset, StackDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

LENGTH, BATCH, MICRO_BATCH = 64, 16, 4
STATE = "sampler.json"


def blocks(package):
    """The package's source as rows of bytes."""
    text = b"".join(path.read_bytes() for path in sorted(Path(package.__path__[0]).glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()


class MixtureTrainer(Trainer):
    """Draws by a sampler; notes what each step was trained on."""

    def _get_train_sampler(self, train_dataset=None):
        return sampler  # of all ranks: Accelerate divides its batches among them

    def training_step(self, model, inputs, num_items_in_batch=None):
        row = {"step": self.state.global_step, "numbers": inputs.pop("numbers").tolist()}
        with (out / f"rank{self.args.process_index}.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        return super().training_step(model, inputs, num_items_in_batch)


class KeepSampler(TrainerCallback):
    """Writes the sampler's state beside every checkpoint."""

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            path = out / f"checkpoint-{state.global_step}" / STATE
            path.write_text(json.dumps(sampler.state_dict(state.global_step)))


def collate(pairs):
    numbers, tokens = zip(*pairs, strict=True)
    return {"numbers": torch.tensor(numbers), "input_ids": torch.stack(tokens), "labels": torch.stack(tokens)}


out, steps = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 6
torch.set_num_threads(1)
domains = {"email": blocks(email), "asyncio": blocks(asyncio)}
sampler = evenload.MixtureSampler(
    {name: len(rows) for name, rows in domains.items()}, {"email": 1, "asyncio": 3}, BATCH
)
sampler.set_shares({"email": 3, "asyncio": 1}, step=4)
last = max(out.glob(f"checkpoint-*/{STATE}"), key=lambda path: int(path.parent.name.partition("-")[2]), default=None)
if last:
    sampler.load_state_dict(json.loads(last.read_text()))

torch.manual_seed(0)
config = LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=256)
arguments = TrainingArguments(
    str(out),
    use_cpu=not torch.cuda.is_available(),
    max_steps=steps,
    per_device_train_batch_size=MICRO_BATCH,
    gradient_accumulation_steps=BATCH // MICRO_BATCH // int(os.environ.get("WORLD_SIZE", "1")),
    save_steps=2,
    ignore_data_skip=True,  # the sampler knows where to go on
    remove_unused_columns=False,
    report_to="none",
    disable_tqdm=True,
)
rows = ConcatDataset(list(domains.values()))
data = StackDataset(range(len(rows)), rows)
trainer = MixtureTrainer(
    LlamaForCausalLM(config), arguments, train_dataset=data, data_collator=collate, callbacks=[KeepSampler()]
)
trainer.train(resume_from_checkpoint=str(last.parent) if last else None)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
