"""Trains a tiny causal language model on ragged rows with Transformers' Trainer; it knows nothing of evenload.

torchrun --nproc-per-node 2 trainer_script.py FOLDER
"""

import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def collate(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


torch.manual_seed(0)
config = LlamaConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=64)
arguments = TrainingArguments(
    sys.argv[1],
    use_cpu=True,
    max_steps=2,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    save_steps=1,
    report_to="none",
    disable_tqdm=True,
)
rows = [list(range(1, 3 + 5 * k % 29)) for k in range(32)]
Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, data_collator=collate).train()
print("came to its end")
if torch.distributed.is_initialized():  # gloo's threads end before the interpreter does
    torch.distributed.barrier()
    time.sleep(0.2)
    torch.distributed.destroy_process_group()
