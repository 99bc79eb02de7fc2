"""A Trainer of TRL by its name, unmodified; what GRPO and RLOO would generate is drawn from the data, so that a step is
its update alone.

torchrun --nproc-per-node 2 trl_script.py dpo|kto|reward|grpo|rloo --model_name_or_path MODEL --dataset_name FOLDER
    --output_dir OUT [any of the Trainer's config and ModelConfig]
"""

import json
import logging
import os
import random
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    ModelConfig,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    ScriptArguments,
    TrlParser,
    get_peft_config,
)

TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
}


def drawing(kind: type, answers: list[str], returns_logprobs: bool) -> type:
    """The Trainer, with completions drawn from these texts, other ones on each rank and in each step."""

    class Drawing(kind):
        def _generate_single_turn(self, prompt_ids, *_):
            draw = random.Random(f"{self.state.global_step} {self.accelerator.process_index}")
            texts = [draw.choice(answers) for _ in prompt_ids]
            ids = [self._tokenizer(text)["input_ids"][: self.max_completion_length] for text in texts]
            return (ids, None) if returns_logprobs else ids

    return Drawing


def many_unlike_words(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(one.split()))) for one in completions]


def alike(completions: list[str], **_: object) -> list[float]:
    return [0.5 for _ in completions]


def main() -> None:
    logging.basicConfig()
    logging.getLogger("evenload").setLevel(logging.INFO)
    task = sys.argv.pop(1)
    kind, config = TRAINERS[task]
    script, training, model = TrlParser((ScriptArguments, config, ModelConfig)).parse_args_and_config()
    data = load_dataset(script.dataset_name, split="train")
    torch.manual_seed(0)
    name, more = model.model_name_or_path, {}
    if task == "reward":
        net = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
    else:
        net = AutoModelForCausalLM.from_pretrained(name)
    if task in ("grpo", "rloo"):
        kind = drawing(kind, data["chosen"], task == "grpo")
        data, more = data.select_columns("prompt"), {"reward_funcs": many_unlike_words}
        if "HOSTS_CASCADE" in os.environ:
            from evenload import cascade

            more = {"reward_funcs": [many_unlike_words, cascade([(alike, (0.5, 0.5)), many_unlike_words])]}
    tokenizer = AutoTokenizer.from_pretrained(name)
    trainer = kind(
        net, args=training, train_dataset=data, processing_class=tokenizer, peft_config=get_peft_config(model), **more
    )
    trainer.train()
    if trainer.is_world_process_zero() and "HOSTS_OUT" in os.environ:
        Path(os.environ["HOSTS_OUT"]).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
