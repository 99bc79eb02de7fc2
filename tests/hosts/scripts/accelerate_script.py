"""A training loop of its author's own on Accelerate, without a Trainer.

accelerate launch --num_processes 2 accelerate_script.py --model MODEL --data FOLDER
"""

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=10)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    data = load_dataset(args.data, split="train")
    data = data.map(
        lambda row: tokenizer(row["text"], truncation=True),
        remove_columns=data.column_names,
        load_from_cache_file=False,
        keep_in_memory=True,
    )
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    evaluation_loader = DataLoader(data.select(range(16)), batch_size=args.batch_size, collate_fn=collate)
    model, optimizer, loader, evaluation_loader = accelerator.prepare(model, optimizer, loader, evaluation_loader)

    history: list[dict[str, float]] = []
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                mean = accelerator.gather(loss.detach()).mean()
                history.append({"step": len(history) + 1, "loss": float(mean), "grad_norm": float(norm or 0.0)})
                accelerator.print(history[-1])
            optimizer.step()
            optimizer.zero_grad()
        if len(history) == args.max_steps:
            break
    model.eval()
    with torch.no_grad():
        evaluation = accelerator.gather(torch.stack([model(**batch).loss for batch in evaluation_loader])).mean()
    history[-1]["eval_loss"] = float(evaluation)
    if accelerator.is_main_process and "HOSTS_OUT" in os.environ:
        Path(os.environ["HOSTS_OUT"]).write_text(json.dumps(history))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
