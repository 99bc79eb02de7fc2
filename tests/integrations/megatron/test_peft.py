"""Tenants in company against peft: each trained alone by it on the Hugging Face model, one whole sample at a time."""

from __future__ import annotations

import numpy as np
import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

VOCABULARY = 51
STEPS = 3
TENANTS = (
    ({"r": 4, "lora_alpha": 8}, {"weight_decay": 0.1, "clip_grad": 0.3}, 1e-2, (37, 9, 5)),
    (
        {"r": 8, "target_modules": ("q_proj", "v_proj", "down_proj"), "use_rslora": True},
        {"weight_decay": 0.0, "clip_grad": 0.0, "betas": (0.8, 0.99)},
        3e-3,
        (64, 26),
    ),
    (
        {"r": 16, "lora_alpha": 32, "rank_pattern": {"o_proj": 5}, "alpha_pattern": {"layers.0.mlp.*": 3.0}},
        {"weight_decay": 0.3, "clip_grad": 1e-2, "eps": 1e-6},
        5e-2,
        (29, 41, 2),
    ),
)
"""Adapter, training, learning rate and lengths of the samples of a step."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, all_in_float64):
    """A folder with a model, and a file with what peft made of each tenant."""
    import torch
    import transformers

    root = tmp_path_factory.mktemp("peft")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(root / "base")
    with all_in_float64():
        torch.save([trained_by_peft(root / "base", number) for number in range(len(TENANTS))], root / "tenants.pt")
    return str(root / "base"), str(root / "tenants.pt")


def trained_by_peft(base, number):
    """A tenant's start and end, and samples, loss, norm and gradients of each of its steps, in float64."""
    import peft
    import torch
    import transformers

    adapter, train, rate, lengths = TENANTS[number]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    targets = adapter.get("target_modules", "all-linear")
    words = {**adapter, "target_modules": targets if isinstance(targets, str) else list(targets)}
    model = peft.get_peft_model(model, peft.LoraConfig(**words), autocast_adapter_dtype=False)
    matrices = {_short(name): p for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(number)
    for name in sorted(matrices):
        torch.nn.init.normal_(matrices[name], std=0.1, generator=generator)
    start = {name: p.detach().clone() for name, p in matrices.items()}
    clip = train["clip_grad"] or torch.inf
    fields = {"betas": train.get("betas", (0.9, 0.999)), "eps": train.get("eps", 1e-8)}
    optimizer = torch.optim.AdamW(matrices.values(), lr=rate, weight_decay=train["weight_decay"], **fields)
    draw, steps = np.random.default_rng(number), []
    for _ in range(STEPS):
        samples = [torch.from_numpy(draw.integers(0, VOCABULARY, length)) for length in lengths]
        optimizer.zero_grad()
        logits = [model(input_ids=ids[None]).logits[0, :-1] for ids in samples]
        targets = torch.cat([ids[1:] for ids in samples])
        loss = torch.nn.functional.cross_entropy(torch.cat(logits), targets)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in matrices.items()}
        norm = float(torch.nn.utils.clip_grad_norm_(list(matrices.values()), clip))
        optimizer.step()
        steps.append({"samples": samples, "loss": loss.item(), "gradients": gradients, "norm": norm})
    end = {name: p.detach().clone() for name, p in matrices.items()}
    return {"adapter": adapter, "train": train, "rate": rate, "start": start, "end": end, "steps": steps}


def _short(name):
    return name.removeprefix("base_model.model.").replace(".default.weight", "")


@pytest.mark.parametrize(
    ("size", "plans", "layout"),
    [
        pytest.param(1, [0, 11, 2], {}, id="one"),
        only_full(2, [3, 4, "shared 101"], {}, id="dp2"),
        only_full(2, [0, 1, 2], {"tp": 2}, id="tp2"),
        only_full(2, [0, 1, 2], {"pp": 2}, id="pp2"),
    ],
)
def test_three_steps_in_company_are_those_of_peft_alone(on_ranks, trained, tmp_path, size, plans, layout):
    folder, saved = trained
    for worst in on_ranks(size, "as_with_peft", folder=folder, saved=saved, out=str(tmp_path), plans=plans, **layout):
        assert max(worst.values()) < 1e-9, worst
