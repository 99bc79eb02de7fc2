"""A small model of Collatz paths, whose samples are as uneven as answers: "27:82 41 124 ... 2 1" and an end.

    python benchmarks/generation/collatz.py --out runs/collatz [--steps 400] [--batch 16]

A path of a number below 1,000 has 4 to 899 bytes, half of them at most 155. The model (llama, 2 layers of 128, bytes as
tokens, its end a newline) is trained by Transformers alone, in about two minutes of one core, and written as a Hugging
Face folder, which `model.weights` of both trainers takes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import transformers

END, PADDING, BELOW = 10, 0, 1000
CONFIG = {
    **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    **{"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": END, "pad_token_id": PADDING},
}


def prompt_of(number: int) -> list[int]:
    return list(f"{number}:".encode())


def answer_of(number: int) -> list[int]:
    """The path of a number, its end included."""
    path = []
    while number != 1:
        number = 3 * number + 1 if number % 2 else number // 2
        path.append(str(number))
    return [*" ".join(path).encode(), END]


def batch_of(numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [B, T], padded behind."""
    rows = [(prompt_of(n), answer_of(n)) for n in numbers]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((len(rows), longest), PADDING)
    labels = torch.full((len(rows), longest), -100)
    for row, (prompt, answer) in enumerate(rows):
        tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return tokens, labels


def train(folder: Path, steps: int, batch: int = 16) -> float:
    """Write the trained model; its last loss. Numbers of like lengths share a batch."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(steps, 100), pct_start=0.1)
    draw = np.random.default_rng(0)
    lengths = np.array([len(answer_of(n)) for n in range(2, BELOW)])
    begin_s = time.process_time()
    for step in range(steps):
        drawn = draw.integers(2, BELOW, 8 * batch)
        ranked = drawn[np.argsort(lengths[drawn - 2], kind="stable")]
        first = batch * int(draw.integers(0, 8))
        tokens, labels = batch_of(ranked[first : first + batch].tolist())
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.3f} CPU s {time.process_time() - begin_s:.0f}", flush=True)
    model.eval().save_pretrained(folder)
    return float(loss.detach())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    torch.set_num_threads(1)
    train(**{"folder" if name == "out" else name: value for name, value in vars(parser.parse_args()).items()})
