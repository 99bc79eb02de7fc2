"""Loads a model and evaluates it with Transformers' Trainer: no training step is ever taken.

torchrun --nproc-per-node 2 no_step_script.py --model MODEL --data FOLDER --output_dir OUT [any of TrainingArguments]
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class ScriptArguments:
    model: str
    data: str


def main() -> None:
    script, training = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    model = AutoModelForCausalLM.from_pretrained(script.model)
    data = load_dataset(script.data, split="test")
    data = data.map(
        lambda row: tokenizer(row["text"], truncation=True),
        remove_columns=data.column_names,
        load_from_cache_file=False,
        keep_in_memory=True,
    )
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model=model, args=training, eval_dataset=data, data_collator=collate)
    trainer.evaluate()
    if trainer.is_world_process_zero() and "HOSTS_OUT" in os.environ:
        Path(os.environ["HOSTS_OUT"]).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
