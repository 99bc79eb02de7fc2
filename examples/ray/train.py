"""Ray Train's workers: put your own `train`, on Transformers, DeepSpeed or Megatron-Core, in place of this one.

A recipe's plugins are switched on in each worker, and this file stays as it is without them:

    evenload env recipe.yaml --export ray > runtime_env.yaml       # on a machine of the cluster
    ray job submit --runtime-env runtime_env.yaml --working-dir examples/ray -- python train.py
    evenload run recipe.yaml -- python examples/ray/train.py       # where this machine is the whole cluster
"""

from __future__ import annotations

import os
from typing import Any

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict[str, Any]) -> None:
    """One worker's; Ray has made the process group of all of them before."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    arguments = TrainingArguments(
        config["folder"],
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    rows = [list(range(1, 4 + k * k % 61)) for k in range(96)]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()


if __name__ == "__main__":
    workers = ScalingConfig(num_workers=2, use_gpu=bool(os.environ.get("CUDA_VISIBLE_DEVICES")))
    TorchTrainer(train, train_loop_config={"folder": os.path.abspath("out")}, scaling_config=workers).fit()
