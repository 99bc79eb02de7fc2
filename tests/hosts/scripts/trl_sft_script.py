"""Supervised fine-tuning with TRL on chats, or on prompts with completions, whose losses alone count.

torchrun --nproc-per-node 2 trl_sft_script.py --model_name_or_path MODEL --dataset_name FOLDER --output_dir OUT
    [any of SFTConfig and ModelConfig, e.g. --use_peft]
"""

import json
import os
from pathlib import Path

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config


def main() -> None:
    script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    data = load_dataset(script.dataset_name)
    training.model_init_kwargs = {"dtype": model.dtype}
    trainer = SFTTrainer(
        model=model.model_name_or_path,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    if trainer.is_world_process_zero() and "HOSTS_OUT" in os.environ:
        Path(os.environ["HOSTS_OUT"]).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
