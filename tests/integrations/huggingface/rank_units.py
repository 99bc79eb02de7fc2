"""What the ranks of a test world run: TRL's Trainers of pairs and of single answers, stock and regrouped by units."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import families
import torch
from datasets import Dataset
from evenload.integrations.transformers import pack_call
from evenload.runtime.attributes import with_attributes
from evenload.runtime.world.agreement import rank_and_size
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_runs import Gradients, Keep, arguments, ends, error_of, forget_layout, planned_by, recipe
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.trainer.utils import _ChunkedLogProbFunction

ANSWERS = ((61, 5), (3, 17), (33, 40), (9, 2), (90, 70), (3, 4), (40, 11), (26, 61))
ANSWERS = (*ANSWERS, (7, 8), (72, 9), (2, 2), (14, 55), (1, 31), (21, 20), (12, 1), (5, 48))


class Penalized(DPOTrainer):
    """With a term of the whole batch that is 0 where the policy is its reference, and its gradient too."""

    penalty = ""

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        loss = super()._compute_loss(model, inputs, return_outputs)
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        words = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels}
        with torch.no_grad():
            reference = self.ref_model(**words, fused_lm_head=True).log_probs.sum(1)
        gaps = model(**words, fused_lm_head=True).log_probs.sum(1) - reference
        return loss + (1e-3 * gaps.mean() ** 2 if self.penalty == "mean of the batch" else 1e-3 * gaps.var())


KINDS = {
    "dpo": (DPOTrainer, DPOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "kto": (KTOTrainer, KTOConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
    "distillation": (DistillationTrainer, DistillationConfig),
}
GENERATING = ("grpo", "rloo", "distillation")


class WideHead:
    """`torch` for TRL's head, which would keep log-probabilities of float64 models in float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


def tokenizer() -> Any:
    words = {word: place for place, word in enumerate(("<pad>", "<eos>", *(f"w{n}" for n in range(94))))}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")


def model(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, initializer_range=0.25)
    config._attn_implementation = "sdpa" if kind in GENERATING else "eager"
    if kind == "reward":
        config.num_labels = 1
        return LlamaForSequenceClassification(config).double().eval()
    return LlamaForCausalLM(config).double().eval()  # as from_pretrained leaves it


def data(kind: str) -> Any:
    """Texts of words; of single answers every other one is desirable."""
    draw = torch.Generator().manual_seed(3)
    rows: list[dict[str, Any]] = []
    for number, sizes in enumerate(ANSWERS):
        texts = [" ".join(f"w{w}" for w in torch.randint(94, (n,), generator=draw)) for n in (2 + number % 5, *sizes)]
        prompt, chosen, rejected = texts
        one = {"prompt": prompt, "completion": f" {chosen}", "label": number % 2 == 0}
        pair = {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}
        if kind in GENERATING:
            rows.append({"prompt": prompt})
            continue
        margin = {"margin": number / 9} if kind == "reward" else {}
        rows.append(one if kind == "kto" else pair | margin)
    return Dataset.from_list(rows)


def _many_unlike_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(one.split()))) for one in completions]


def adapted(net: Any, kind: str) -> Any:
    torch.manual_seed(1)
    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type=task)
    return get_peft_model(net, lora).double()


def trained(
    kind: str,
    *,
    lora: bool = False,
    steps: int = 1,
    accumulate: int = 2,
    penalty: str = "",
    num_rows: int = len(ANSWERS),
    **own: Any,
) -> tuple[Any, Gradients]:
    """A Trainer that has run on the first rows of `data`, and the gradients of its last step."""
    forget_layout()
    of_kind, of_config = KINDS[kind]
    net, keep, more = model(kind), Keep(), {}
    if kind in GENERATING:
        more = {"teacher_model": model(kind)} if kind == "distillation" else {"reward_funcs": _many_unlike_words}
        own = {"max_completion_length": 6} | own
        own |= {} if kind == "distillation" else {"num_generations": 2}
        own |= {"beta": 0.0} if kind == "rloo" else {}
    if kind not in ("reward", "grpo", "rloo") and not lora:
        more |= {} if kind == "distillation" else {"ref_model": model(kind)}
        with torch.no_grad():  # another policy than the reference from the first step on
            for parameter in net.parameters():
                parameter.mul_(1.0 if penalty else 1.01)
    own |= {"per_device_train_batch_size": 8 // rank_and_size()[1] // accumulate, "max_steps": steps}
    settings = {"bf16": False, "learning_rate": 0.1, "gradient_checkpointing": False} | own
    trainer = (Penalized if penalty else of_kind)(
        adapted(net, kind) if lora else net,
        args=of_config(**arguments(gradient_accumulation_steps=accumulate, **settings)),
        train_dataset=data(kind).select(range(num_rows)),
        processing_class=tokenizer(),
        callbacks=[keep],
        **more,
    )
    trainer.penalty = penalty
    trainer.train()
    return trainer, keep.updates[-1]


def errors(kinds: list[str], **more: Any) -> dict[str, Any]:
    """`compared` of several kinds."""
    return {kind: compared(kind, **more) for kind in kinds}


def with_pairs_of_one() -> dict[str, str]:
    """How a run ends by itself and planned, and what is said, where collate functions lose the last rejected answer."""

    class Losing(DPOTrainer):
        def get_train_dataloader(self) -> Any:
            collate = self.data_collator
            self.data_collator = lambda rows: {key: value[:-1] for key, value in collate(rows).items()}
            return super().get_train_dataloader()

    with patch.dict(KINDS, dpo=(Losing, DPOConfig)):
        return ends(partial(trained, "dpo"), recipe(packing={"max_tokens": 512}))


def compared(kind: str, max_tokens: int = 512, **more: Any) -> dict[str, Any]:
    """The largest error of a gradient and of each logged figure against the stock Trainer's, and what was planned."""
    calls: list[Any] = []
    packs_of = pack_call._pack

    def pack(*call: Any) -> Any:
        calls.append(packs_of(*call))
        return calls[-1]

    if kind == "kto":
        more = {"loss_type": "apo_zero_unpaired", **more}
    with ExitStack() as stack:
        if kind != "distillation":  # whose kernel writes into float32 of its own
            stack.enter_context(families.Wide())
            stack.enter_context(with_attributes(import_module(_ChunkedLogProbFunction.__module__), torch=WideHead()))
            stack.enter_context(with_attributes(torch.Tensor, float=torch.Tensor.double))  # no mode reaches backwards
        stock, wanted = trained(kind, **more)
        stack.enter_context(with_attributes(pack_call, _pack=pack))
        seen = stack.enter_context(planned_by(recipe(packing={"max_tokens": max_tokens})))
        own, gradients = trained(kind, **more)
    return {
        "grad": error_of(gradients, wanted),
        "size": max(float(w.norm()) for w in wanted.values()),
        "apart": _apart(own.state.log_history, stock.state.log_history),
        "planned": len(seen.plans),
        "most_slots": max((m.num_padded_tokens for plan in seen.plans for m in plan.micro_batches), default=0),
        "packed": sum(one is not None for one in calls),
        "shared": sum(one is not None and one[0].trie is not None for one in calls),
        "idle": seen.idle,
    }


def _apart(own: list[dict[str, float]], stock: list[dict[str, float]]) -> dict[str, float]:
    """The largest relative difference of each logged figure; much of one that is no number, or that one run lacks."""
    apart: dict[str, float] = {}
    for wanted_log, own_log in zip(stock, own, strict=True):
        for key in {*wanted_log, *own_log} - {"train_runtime", "total_flos", "step_time"}:
            if "per_second" not in key:
                a, b = own_log.get(key, float("nan")), wanted_log.get(key, float("nan"))
                apart[key] = max(apart.get(key, 0.0), abs(a - b) / max(abs(b), 1e-12) if a == a and b == b else 9.0)
    return apart
