"""Trains LoRA adapters of a causal language model with PEFT under Transformers' Trainer.

torchrun --nproc-per-node 2 peft_script.py --model MODEL --data FOLDER --output_dir OUT [any of TrainingArguments]
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model: str
    data: str
    lora_r: int = 4


def main() -> None:
    script, training = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=script.lora_r, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(script.model), lora)
    model.print_trainable_parameters()
    data = load_dataset(script.data, split="train")
    data = data.map(
        lambda row: tokenizer(row["text"], truncation=True),
        remove_columns=data.column_names,
        load_from_cache_file=False,
        keep_in_memory=True,
    )
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model=model, args=training, train_dataset=data, data_collator=collate)
    trainer.train()
    if trainer.is_world_process_zero() and "HOSTS_OUT" in os.environ:
        Path(os.environ["HOSTS_OUT"]).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
