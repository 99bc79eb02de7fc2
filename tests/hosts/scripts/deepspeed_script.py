"""A DeepSpeed loop that gives its samples to deepspeed.initialize.

torchrun --nproc-per-node 2 deepspeed_script.py --model MODEL --data FOLDER --deepspeed_config CONFIG.json
"""

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--max-steps", type=int, default=10)
    args = deepspeed.add_config_arguments(parser).parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    data = load_dataset(args.data, split="train")
    data = data.map(
        lambda row: tokenizer(row["text"], truncation=True),
        remove_columns=data.column_names,
        load_from_cache_file=False,
        keep_in_memory=True,
    )
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        training_data=data,
        collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    history: list[dict[str, float]] = []
    total = torch.zeros(())
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        total += loss.detach() / engine.gradient_accumulation_steps()
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary:
            torch.distributed.all_reduce(total)
            mean = total.item() / torch.distributed.get_world_size()
            norm = float(engine.get_global_grad_norm() or 0.0)
            history.append({"step": engine.global_steps, "loss": mean, "grad_norm": norm})
            total.zero_()
        if engine.global_steps == args.max_steps:
            break
    if torch.distributed.get_rank() == 0 and "HOSTS_OUT" in os.environ:
        Path(os.environ["HOSTS_OUT"]).write_text(json.dumps(history))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
