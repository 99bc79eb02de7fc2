"""Keys of other tools, by what says the same in a recipe."""

from __future__ import annotations

_SAME = {
    "train.steps": ("max_steps", "train_iters", "num_steps", "total_steps"),
    "train.epochs": ("num_train_epochs", "num_epochs"),
    "train.lr": ("learning_rate",),
    "train.min_lr": ("lr_min", "cosine_min_lr"),
    "train.lr_schedule": ("lr_scheduler_type", "lr_scheduler", "lr_decay_style"),
    "train.warmup_steps": ("lr_warmup_iters", "warmup_iters", "warmup_ratio"),
    "train.clip_grad": ("max_grad_norm", "gradient_clipping"),
    "train.dtype (fp32 or bf16)": ("bf16", "fp16", "torch_dtype", "mixed_precision", "precision"),
    "train.recompute": ("gradient_checkpointing", "activation_checkpointing", "recompute_granularity"),
    "train.micro_batch_size (of the stock plan)": ("per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
    "train.global_batch_size (samples of all ranks in a step)": (
        *("gradient_accumulation_steps", "train_batch_size", "batch_size", "effective_batch_size"),
    ),
    "train.export": ("output_model_dir", "hf_output_dir"),
    "checkpoint.dir": ("output_dir", "save_dir", "save"),
    "checkpoint.every": ("save_steps", "save_interval"),
    "checkpoint.keep": ("save_total_limit",),
    "checkpoint.best": ("load_best_model_at_end", "save_best"),
    "checkpoint.resume": ("resume_from_checkpoint",),
    "log.tensorboard, log.wandb or log.jsonl": ("report_to", "tensorboard_dir", "wandb_project", "logging_dir"),
    "log.every": ("logging_steps", "log_interval"),
    "data.validation": ("eval_steps", "eval_strategy", "eval_interval", "val_set_size", "eval_dataset"),
    "model.weights": ("model_name_or_path", "base_model", "model_name", "model_id", "pretrained"),
    "data.source": ("dataset", "datasets", "dataset_name", "train_file", "data_path", "dataset_path"),
    "data.max_length": ("max_seq_length", "max_seq_len", "seq_length", "sequence_len", "cutoff_len"),
    "data.loss_on": ("train_on_inputs", "completion_only_loss", "assistant_only_loss"),
    "data.tokenizer": ("tokenizer_name", "tokenizer_type"),
    "plugins.packing.enabled": ("packing", "sample_packing", "multipack"),
    "plugins.lora": ("peft", "adapter", "lora_r", "lora_rank", "use_peft"),
    "parallel.tp": ("tensor_parallel_size", "tensor_model_parallel_size"),
    "parallel.pp": ("pipeline_parallel_size", "pipeline_model_parallel_size"),
    "parallel.cp": ("context_parallel_size", "sequence_parallel_size", "sp_size"),
    "parallel.ep": ("expert_parallel_size", "expert_model_parallel_size"),
    "parallel.dp": ("data_parallel_size", "num_gpus", "nproc", "world_size"),
}

ELSEWHERE = {theirs: ours for ours, names in _SAME.items() for theirs in names}
"""Of keys of training tools and of configs written for them."""
