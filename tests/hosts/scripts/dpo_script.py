"""Direct preference optimization with TRL: its loss needs both answers of a pair in one batch.

torchrun --nproc-per-node 2 dpo_script.py --model_name_or_path MODEL --dataset_name FOLDER --output_dir OUT
    [any of DPOConfig and ModelConfig]
"""

import json
import os
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser


def main() -> None:
    script, training, model = TrlParser((ScriptArguments, DPOConfig, ModelConfig)).parse_args_and_config()
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model.model_name_or_path),
        args=training,
        train_dataset=load_dataset(script.dataset_name, split="train"),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
    )
    trainer.train()
    if trainer.is_world_process_zero() and "HOSTS_OUT" in os.environ:
        Path(os.environ["HOSTS_OUT"]).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
