"""Fine-tunes a causal language model on a folder of texts with Transformers' Trainer, or LoRA adapters of it with PEFT.

torchrun --nproc-per-node 2 trainer_script.py --model MODEL --data FOLDER --output_dir OUT [any of TrainingArguments]
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
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
    dtype: str = "float32"
    lora_r: int = 0


def main() -> None:
    script, training = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    model = AutoModelForCausalLM.from_pretrained(script.model, dtype=getattr(torch, script.dtype))
    if script.lora_r:
        lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=script.lora_r, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(model, lora)
    data = load_dataset(script.data)
    data = data.map(
        lambda rows: tokenizer(rows["text"], truncation=True),
        batched=True,
        remove_columns=data["train"].column_names,
        load_from_cache_file=False,
        keep_in_memory=True,
    )
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    print(f"trained a {type(trainer.model_wrapped).__name__} on {training.world_size} ranks")
    if trainer.is_world_process_zero() and "HOSTS_OUT" in os.environ:
        Path(os.environ["HOSTS_OUT"]).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
